"""An engine of our own that answers under several policies."""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from vllm_kvx.config.settings import LAYOUT_KEY, POLICY_KEY, KVSettings, dtype_of_engine
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import at_dtype
from vllm_kvx.policy.policy import KVPolicy, with_retrieval
from vllm_kvx.tools.engine import last_line, on_cpu, prepare_environment
from vllm_kvx.tools.evaluate.shares import Shares, shares_of

# The CPU backend's blocks are multiples of this, and retrieval's groups fill whole blocks.
_CPU_BLOCK = 32


@dataclass(frozen=True)
class Asked:
    """A prompt to be answered.

    max_tokens: the longest answer. forced: tokens that the answer has to be, whose logprobs are
    wanted; empty to let the model answer.
    """

    token_ids: Sequence[int]
    max_tokens: int
    forced: Sequence[int] = ()


@dataclass(frozen=True)
class Answered:
    """The answer's text, and the mean negative logprob of its tokens in nats."""

    text: str
    nats: float


class Progress(Protocol):
    """What is told how far answers are."""

    def begin(self, row: str, count: int) -> None:
        """The engine is given so many prompts of a row."""

    def step(self, read: Sequence[int], written: int) -> None:
        """Answers began to prompts of so many tokens each, and so many tokens were written."""

    def finish(self, asked: Asked, tokens: int) -> None:
        """An answer has ended after so many tokens."""


class NotStarted(ToolError):
    """An engine does not start; others may."""


class OwnEngine:
    """vLLM's ``LLM`` with room for all of some policies.

    Attributes:
        num_layers, block_size: the model's, and the engine's.
    """

    def __init__(self, model: str, policies: Mapping[str, KVPolicy], options: Mapping[str, Any]):
        """policies: by the names that answers are asked for under. options: keywords of ``LLM``.

        Raises:
            NotStarted: the engine does not start.
        """
        self._requested = {name: str(with_retrieval(p)) for name, p in policies.items()}
        first, *others = dict.fromkeys(self._requested.values())
        config = {POLICY_KEY: first, **({LAYOUT_KEY: others} if others else {})}
        given = dict(options)
        config.update(given.pop("additional_config", {}))
        prepare_environment()
        from vllm import LLM

        defaults: dict[str, Any] = {
            "enable_prefix_caching": False,
            "enable_trace_replay": True,
            "seed": 0,
        }
        if on_cpu():
            defaults |= {"enforce_eager": True, "dtype": "float32", "block_size": _CPU_BLOCK}
        try:
            self.llm: Any = LLM(model, additional_config=config, **(defaults | given))
        except (ValueError, RuntimeError, TypeError, OSError) as error:
            names = ", ".join(policies)
            why = f"the engine for {names} does not start: {last_line(error)}"
            raise NotStarted(why) from error
        vllm_config = self.llm.llm_engine.vllm_config
        settings = KVSettings.from_vllm_config(vllm_config)
        assert settings is not None
        self._settings = settings
        self.num_layers = settings.num_layers
        self.block_size = vllm_config.cache_config.block_size
        self._dtype = at_dtype(dtype_of_engine(vllm_config))
        self._ids = count()

    def answers(self, policy: str, asked: Sequence[Asked], progress: Progress) -> list[Answered]:
        """Greedy answers under one of the engine's policies, all prompts given at once.

        Raises:
            ToolError: the engine fails.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        extra = {POLICY_KEY: self._requested[policy]}
        ids = {str(next(self._ids)): index for index in range(len(asked))}
        written = [0] * len(asked)
        found: dict[int, Answered] = {}
        try:
            prompts = [TokensPrompt(prompt_token_ids=list(each.token_ids)) for each in asked]
            inputs = engine.renderer.render_cmpl(prompts)
            for request, each, prompt in zip(ids, asked, inputs, strict=True):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=len(each.forced) or each.max_tokens,
                    logprobs=0,
                    ignore_eos=bool(each.forced),
                    trace_decode_token_ids=list(each.forced) or None,
                    extra_args=extra,
                    # Each step says how far it is, which `LLM.generate` does not.
                    output_kind=RequestOutputKind.CUMULATIVE,
                )
                engine.add_request(request, prompt, params)
            progress.begin(policy, len(asked))
            while engine.has_unfinished_requests():
                outputs = [(ids[output.request_id], output) for output in engine.step()]
                begun = [len(asked[index].token_ids) for index, _ in outputs if not written[index]]
                now = {index: len(output.outputs[0].token_ids) for index, output in outputs}
                progress.step(begun, sum(now.values()) - sum(written[i] for i in now))
                for index, output in outputs:
                    written[index] = now[index]
                    if output.finished:
                        found[index] = answered(output.outputs[0])
                        progress.finish(asked[index], written[index])
        except (ValueError, RuntimeError) as error:
            raise ToolError(
                f"the engine failed under {policy}: {last_line(error)}. Finished answers are kept"
            ) from error
        return [found[index] for index in range(len(asked))]

    def shares(self, policy: str, prompt_len: int) -> Shares:
        """What the policy keeps of such a prompt, with the layers that the engine resolved."""
        resolved = self._settings.parse(self._requested[policy])
        return shares_of(resolved, prompt_len, self.block_size, self.num_layers)

    def resolved(self, policy: str) -> str:
        """The policy's name with the layers and the KV cache dtype that the engine resolved."""
        return str(self._settings.parse(self._requested[policy])) + self._dtype

    def close(self) -> None:
        """Frees the device."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def answered(choice: Any) -> Answered:
    """The answer that vLLM's output of a request is."""
    nats = [
        -entry[token].logprob
        for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
    ]
    return Answered(choice.text, math.fsum(nats) / max(len(nats), 1))


@contextmanager
def own_engine(
    model: str, policies: Mapping[str, KVPolicy], options: Mapping[str, Any]
) -> Iterator[OwnEngine]:
    """An engine while the block runs."""
    engine = OwnEngine(model, policies, options)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
