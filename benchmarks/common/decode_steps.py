"""Decode steps of an engine in this process, one by one: how long they take, and a profile."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.common.trace import summary

# Steps that set up what is new to the engine, that are timed, and that the profiler records.
WARM, TIMED, PROFILED = 6, 16, 6


def most_tokens(drafts: int) -> int:
    """Tokens that a request may get in these steps, where so many are drafted for it in each."""
    return (WARM + TIMED + PROFILED + 4) * (1 + drafts)


class Decoding:
    """Requests that decode all at once, step by step, from their first tokens on.

    got: tokens of each so far, as this process has received them.
    """

    def __init__(
        self,
        llm: Any,
        prompts: Sequence[Sequence[int]],
        most: int,
        extra_args: dict[str, Any] | None = None,
    ) -> None:
        """Runs the prompts, and the steps that set up what is new to the engine.

        Args:
            llm: vLLM's ``LLM``. prompts: token ids. most: tokens of an answer.
            extra_args: of the requests' sampling parameters.
        """
        import torch
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self.most, self._engine = most, llm.llm_engine
        # Elsewhere a step's tokens come once the device has them, and to wait for one here would
        # take up its memory.
        self._on_device = torch.cuda.is_available() and hasattr(
            self._engine.engine_core, "engine_core"
        )
        params = SamplingParams(
            temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, extra_args=extra_args
        )
        self.got = {f"profiled-{i}": 0 for i in range(len(prompts))}
        for name, prompt in zip(self.got, prompts, strict=True):
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), params)
        while not all(self.got.values()):
            self.run(1)
        self.run(WARM)

    def run(self, steps: int) -> tuple[float, int]:
        """Seconds of so many steps, and new tokens.

        Raises:
            RuntimeError: a request ended within them.
        """
        import torch

        before, began = sum(self.got.values()), time.monotonic()
        for _ in range(steps):
            for output in self._engine.step():
                self.got[output.request_id] = len(output.outputs[0].token_ids)
        if self._on_device:
            torch.cuda.synchronize()
        took = time.monotonic() - began
        if max(self.got.values()) >= self.most:
            raise RuntimeError(
                "a request ended before the last step: let all prompts come in at once"
            )
        return took, sum(self.got.values()) - before

    def end(self) -> None:
        """Aborts the requests."""
        self._engine.abort_request(list(self.got))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def profiled(llm: Any, prompts: Sequence[Sequence[int]], drafts: int) -> dict[str, Any]:
    """Figures of steps in which all requests decode at once, by step.

    step_ms: milliseconds without a profiler. profiled_step_ms: with it, which slows the host and
    graphs down. tokens: of all requests, new ones. The others: ``trace.summary``.

    Args:
        llm: vLLM's ``LLM``, whose engine runs in this process.
        prompts: token ids. drafts: the most tokens that are drafted for a request in a step.
    """
    import torch

    decoding = Decoding(llm, prompts, most_tokens(drafts))
    seconds, tokens = decoding.run(TIMED)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with (
        marked(llm.llm_engine.engine_core.engine_core),
        torch.profiler.profile(activities=activities) as profile,
    ):
        profiled_seconds, _ = decoding.run(PROFILED)
    decoding.end()
    figures = summary(_events(profile), PROFILED)
    return {
        "steps": PROFILED,
        "step_ms": round(seconds * 1e3 / TIMED, 3),
        "tokens": round(tokens / TIMED, 2),
        "profiled_step_ms": round(profiled_seconds * 1e3 / PROFILED, 3),
        **figures,
    }


@contextmanager
def marked(core: Any) -> Iterator[None]:
    """Inside, the parts of a step have marks in a profile. core: vLLM's ``EngineCore``."""
    runner = core.model_executor.driver_worker.worker.model_runner
    parts = [
        (core.scheduler, "schedule"),
        (core.scheduler, "update_from_output"),
        (runner, "execute_model"),
        (runner, "sample_tokens"),
    ]
    if getattr(runner, "speculator", None) is not None:
        parts.append((runner.speculator, "propose"))
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(patch.object(owner, name, mark(name, getattr(owner, name))))
        yield


def mark(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which a profile shows by that name."""
    import torch

    def marked_call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return call(*args, **kwargs)

    return marked_call


def _events(profile: Any) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(errors="replace"))["traceEvents"]
        return events
