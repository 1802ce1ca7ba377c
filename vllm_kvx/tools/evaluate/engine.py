"""An engine of our own that answers under several policies."""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.settings import LAYOUT_KEY, POLICY_KEY, KVSettings
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.policy import KVPolicy, with_retrieval
from vllm_kvx.policy.spec import servable
from vllm_kvx.tools.engine import last_line, on_cpu, prepare_environment, wake_if_dead
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.shares import Shares, shares_of

# The CPU backend's blocks are multiples of this, and retrieval's groups fill whole blocks.
_CPU_BLOCK = 32


@dataclass(frozen=True)
class Prompt:
    """Tokens to be answered.

    max_tokens: the longest answer. forced: tokens that the answer has to be, whose logprobs are
    wanted; empty to let the model answer.
    """

    token_ids: Sequence[int]
    max_tokens: int
    forced: Sequence[int] = ()


@dataclass(frozen=True)
class Answered:
    """The answer's text, and the mean negative logprob of its tokens in nats.

    tokens: how many it has.
    """

    text: str
    nats: float
    tokens: int


class Progress(Protocol):
    """What is told how far answers are."""

    def begin(self, row: Row, count: int) -> None:
        """The engine is given so many prompts of a row."""

    def step(self, read: Sequence[int], written: int) -> None:
        """Answers began to prompts of so many tokens each, and so many tokens were written."""

    def finish(self, prompt: Prompt, tokens: int) -> None:
        """An answer has ended after so many tokens."""


class NotStarted(ToolError):
    """An engine does not start; others may."""


class Refused(ToolError):
    """The engine takes no such prompt under a row; it answers under others."""


class EngineFailed(ToolError):
    """The engine failed while it answered; others may answer."""


class OwnEngine:
    """vLLM's ``LLM`` with room for all of some policies.

    Attributes:
        num_layers, block_size: the model's, and the engine's.
    """

    def __init__(self, model: str, policies: Mapping[Row, KVPolicy], options: Mapping[str, Any]):
        """policies: by the rows that answers are asked for under. options: keywords of ``LLM``.

        Raises:
            NotStarted: the engine does not start.
        """
        self._requested = {row: servable(with_retrieval(p)) for row, p in policies.items()}
        first, *others = dict.fromkeys(self._requested.values())
        config = {POLICY_KEY: first, **({LAYOUT_KEY: others} if others else {})}
        given = dict(options)
        config.update(given.pop("additional_config", {}))
        prepare_environment()
        from vllm import LLM

        defaults: dict[str, Any] = {
            "enable_prefix_caching": False,
            "enable_trace_replay": True,
            "language_model_only": True,  # Texts are asked alone.
            "seed": 0,
        }
        if on_cpu():
            defaults |= {"enforce_eager": True, "dtype": "float32", "block_size": _CPU_BLOCK}
        try:
            self.llm: Any = LLM(model, additional_config=config, **(defaults | given))
        except (ValueError, RuntimeError, TypeError, OSError) as error:
            names = ", ".join(map(str, policies))
            why = f"the engine for {names} does not start: {last_line(error)}"
            raise NotStarted(why) from error
        wake_if_dead(self.llm)
        vllm_config = self.llm.llm_engine.vllm_config
        settings = KVSettings.from_vllm_config(vllm_config)
        assert settings is not None
        self._settings = settings
        self.num_layers = settings.num_layers
        self.block_size = vllm_config.cache_config.block_size
        self._dtype = dtype_of_engine(vllm_config)
        self._ids = count()

    def answers(self, row: Row, prompts: Sequence[Prompt], progress: Progress) -> list[Answered]:
        """Greedy answers under one of the engine's rows, all prompts given at once.

        Raises:
            Refused: it takes one of the prompts not under this row, and has answered none.
            EngineFailed: it fails.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMServerError, VLLMValidationError
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        extra = {POLICY_KEY: self._requested[row]}
        ids = {str(next(self._ids)): index for index in range(len(prompts))}
        written = [0] * len(prompts)
        found: dict[int, Answered] = {}
        try:
            inputs = engine.renderer.render_cmpl(
                [TokensPrompt(prompt_token_ids=list(prompt.token_ids)) for prompt in prompts]
            )
            for request, prompt, rendered in zip(ids, prompts, inputs, strict=True):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=len(prompt.forced) or prompt.max_tokens,
                    logprobs=0,
                    ignore_eos=bool(prompt.forced),
                    trace_decode_token_ids=list(prompt.forced) or None,
                    extra_args=extra,
                    # Each step says how far it is, which `LLM.generate` does not.
                    output_kind=RequestOutputKind.CUMULATIVE,
                )
                engine.add_request(request, rendered, params)
            progress.begin(row, len(prompts))
            while engine.has_unfinished_requests():
                outputs = [(ids[output.request_id], output) for output in engine.step()]
                begun = [len(prompts[i].token_ids) for i, _ in outputs if not written[i]]
                now = {index: len(output.outputs[0].token_ids) for index, output in outputs}
                progress.step(begun, sum(now.values()) - sum(written[i] for i in now))
                for index, output in outputs:
                    written[index] = now[index]
                    if output.finished:
                        found[index] = answered(output.outputs[0])
                        progress.finish(prompts[index], written[index])
        except VLLMValidationError as error:
            engine.abort_request(list(ids))
            raise Refused(f"the engine does not answer under {row}: {last_line(error)}") from error
        except (VLLMServerError, ValueError, RuntimeError) as error:
            raise EngineFailed(
                f"the engine failed under {row}: {last_line(error).rstrip('.')}. "
                "Finished answers are kept"
            ) from error
        return [found[index] for index in range(len(prompts))]

    def shares(self, row: Row, prompt_len: int, generated: int) -> Shares:
        """What the row keeps of such a prompt, with the layers that the engine resolved.

        generated: tokens of its answer.
        """
        resolved = self._settings.parse(self._requested[row])
        sliding = self._settings.layout.sliding
        layers = self.num_layers
        return shares_of(resolved, prompt_len, self.block_size, layers, sliding, generated)

    def resolved(self, row: Row) -> Row:
        """The row's policy with the layers and the KV cache dtype that the engine resolved."""
        return Row(str(self._settings.parse(self._requested[row]))).over(self._dtype)

    def close(self) -> None:
        """Ends the engine, which frees the device's memory."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def answered(choice: Any) -> Answered:
    """The answer that vLLM's output of a request is."""
    nats = [
        -entry[token].logprob
        for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
    ]
    return Answered(choice.text, math.fsum(nats) / max(len(nats), 1), len(choice.token_ids))


@contextmanager
def own_engine(
    model: str, policies: Mapping[Row, KVPolicy], options: Mapping[str, Any]
) -> Iterator[OwnEngine]:
    """An engine while the block runs."""
    engine = OwnEngine(model, policies, options)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
