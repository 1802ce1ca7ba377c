"""Real vLLM engines, in process, on tiny models; the same runner that GPUs use."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from support import inside
from support.configs import served

T = TypeVar("T")
BLOCK = 32  # What the CPU attention backend takes.
# What it asks of a CPU for an fp8 KV cache.
HAS_FP8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


@dataclass
class Answer:
    """One generated sequence: tokens, their logprobs (S,) and tokens taken from the cache.

    transfer: what a KV connector says for the engine that is to go on with it.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    cached: int
    transfer: dict[str, Any] | None = None


class Preempted(NamedTuple):
    """A request as it was thrown out: the policy it named, and its tokens until then."""

    policy: str
    computed: int
    prompt_len: int
    generated: int


class Engine:
    """A vLLM ``LLM`` whose scheduler and model state are within reach."""

    def __init__(self, model: Path, policy: str | None, **options: Any) -> None:
        from vllm import LLM

        config: dict[str, Any] = {} if policy is None else {"kv_debug": True}
        config.update(options.pop("config", {}))
        if policy is not None:
            config["kv_policy"] = served(policy)
            config["kv_layout"] = [served(name) for name in config.get("kv_layout", ())]
        defaults: dict[str, Any] = dict(
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=2304,
            max_num_seqs=8,
            max_num_batched_tokens=96,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=False,
            seed=0,
        )
        self.llm = LLM(model=str(model), additional_config=config, **(defaults | options))
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        core = self.core
        self.scheduler = core.scheduler
        self.pool = core.scheduler.kv_cache_manager.block_pool
        executor = core.model_executor
        self.runner: Any = None
        if hasattr(executor, "driver_worker"):  # Not with several ranks: they are processes.
            self.runner = executor.driver_worker.worker.model_runner
        self._windows = inside.free_windows(self)
        self._count_preemptions()
        self._submitted = 0
        self._adapters: dict[Path, int] = {}
        self.answered: dict[str, list[int]] = {}

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int = 4,
        policies: Sequence[str | None] | None = None,
        cache_salt: str | Sequence[str] | None = None,
        adapters: Sequence[Path | None] | None = None,
        transfers: Sequence[dict[str, Any]] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Greedy answers to all prompts, given to the engine at once.

        cache_salt: of all prompts, or of each. adapters: the LoRA adapter of each, if it has one.
        transfers: each prompt's ``kv_transfer_params``, of a KV connector between two engines.
        images: those of each prompt, which the engine then knows with all of their tokens.
        """
        from vllm.inputs import TokensPrompt

        policies = policies or [None] * len(prompts)
        params = [greedy(max_tokens, name, **sampling) for name in policies]
        for one, transfer in zip(params, transfers or (), strict=bool(transfers)):
            one.extra_args = {**(one.extra_args or {}), "kv_transfer_params": transfer}
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        for item, its in zip(inputs, images or (), strict=bool(images)):
            if its:
                item["multi_modal_data"] = {"image": list(its)}
        if cache_salt is not None:
            salts = repeat(cache_salt) if isinstance(cache_salt, str) else cache_salt
            for item, salt in zip(inputs, salts, strict=False):
                item["cache_salt"] = salt
        named = adapters and [self.lora_request(adapter) for adapter in adapters]
        outputs = self.llm.generate(inputs, params, use_tqdm=False, lora_request=named)
        return [
            Answer(
                prompt=list(output.prompt_token_ids or ()),
                tokens=list(choice.token_ids),
                logprobs=torch.tensor(
                    [
                        entry[token].logprob
                        for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
                    ]
                ),
                cached=output.num_cached_tokens or 0,
                transfer=output.kv_transfer_params,
            )
            for output in outputs
            for choice in output.outputs
        ]

    def submit(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        policies: Sequence[str | None] | None = None,
        adapters: Sequence[Path | None] | None = None,
        transfers: Sequence[dict[str, Any]] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Adds requests without running them; their ids. Arguments are those of `generate`."""
        from vllm.inputs import TokensPrompt

        ids, none = [], [None] * len(prompts)
        given = (policies, adapters, transfers, images)
        each = zip(prompts, *(one or none for one in given), strict=True)
        for prompt, name, adapter, transfer, its in each:
            self._submitted += 1
            ids.append(f"submitted-{self._submitted}")
            params = greedy(max_tokens, name, **sampling)
            if transfer is not None:
                params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
            item = TokensPrompt(prompt_token_ids=prompt)
            if its:
                item["multi_modal_data"] = {"image": list(its)}
            self.llm.llm_engine.add_request(
                ids[-1],
                item,
                params,
                lora_request=self.lora_request(adapter),
            )
        return ids

    def go_on(self, session: str, prompt: list[int], max_tokens: int) -> list[int]:
        """What follows the next part of a session's prompt, whose input is streamed.

        The prompt is never complete: `end` ends the session.
        """
        engine = self.llm.llm_engine
        part = engine.input_processor.process_inputs(
            session,
            {"type": "token", "prompt_token_ids": prompt},
            greedy(max_tokens),
            supported_tasks=("generate",),
            resumable=True,
        )
        engine.engine_core.add_request(part)
        found = list[int]()
        while len(found) < max_tokens:
            for one in engine.engine_core.get_output().outputs:
                found += one.new_token_ids
        return found

    def end(self, session: str) -> None:
        """Aborts a session that waits for more."""
        self.core.abort_requests([session])

    def lora_request(self, adapter: Path | None) -> Any:
        """vLLM's name of an adapter: its folder's, and a number of this engine's own."""
        from vllm.lora.request import LoRARequest

        if adapter is None:
            return None
        number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
        return LoRARequest(adapter.name, number, str(adapter))

    def step(self, count: int = 1) -> None:
        """Steps of the engine; `answered` gets the tokens of requests that end with them."""
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.answered[output.request_id] = list(output.outputs[0].token_ids)  # type: ignore

    def finish(self, max_steps: int = 400) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                return
            self.step()
        running, waiting = (
            [r.request_id for r in queue]
            for queue in (self.scheduler.running, self.scheduler.waiting)
        )
        raise AssertionError(f"after {max_steps} steps {running} run and {waiting} wait")

    def abort(self, ids: list[str]) -> None:
        self.llm.llm_engine.abort_request(ids)
        self.finish()

    def throw_out(self, **how: Any) -> None:
        """Preempts every running request by hand. how: as vLLM's scheduler is told."""
        while self.scheduler.running:
            self.scheduler._preempt_request(self.scheduler.running.pop(), 0.0, **how)

    def preemptions(self) -> int:
        """Preemptions so far."""
        return len(self.preempted)

    def watch_running(self) -> list[int]:
        """Grows by the number of running requests after every schedule."""
        return self._watch(lambda _: len(self.scheduler.running))

    def watch_steps(self) -> list[dict[int, int]]:
        """Grows with every schedule by tokens of each prompt of `generate`, by its number."""
        return self._watch(
            lambda output: {
                int(request.split("-")[0]): count
                for request, count in output.num_scheduled_tokens.items()
            }
        )

    def _watch(self, found: Callable[[Any], T]) -> list[T]:
        """Grows by what is `found` in the output of every schedule."""
        every: list[T] = []
        schedule = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            every.append(found(output))
            return output

        self.scheduler.schedule = watched
        return every

    def held_blocks(self, request_id: str) -> list[int]:
        """Blocks of a request by KV group."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return [len(manager.req_to_blocks.get(request_id, ())) for manager in managers]

    def _count_preemptions(self) -> None:
        self.preempted: list[Preempted] = []
        preempt = self.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            named = (request.sampling_params.extra_args or {}).get("kv_policy", "")
            computed, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
            self.preempted.append(Preempted(named, computed, prompt_len, request.num_output_tokens))
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = counted

    def stats(self) -> dict[str, Any]:
        """Rank 0's layout and counters."""
        return self.llm.collective_rpc("kv_policy_stats")[0]

    def assert_idle(self) -> None:
        """Every block but vLLM's null block is free, and nothing is left behind."""
        scheduler = self.scheduler
        assert not scheduler.has_unfinished_requests()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        inside.assert_scheduler_forgot(self, self._windows)
        # Workers learn with the next step who is gone; this one runs nobody.
        while scheduler.has_finished_requests():
            self.core.step_fn()
        inside.assert_worker_forgot(self, self._windows)


def greedy(max_tokens: int, policy: str | None = None, **sampling: Any) -> Any:
    """Sampling parameters of a greedy answer of exactly this many tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "logprobs": 0, "detokenize": False} | sampling,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=None if policy is None else {"kv_policy": served(policy)},
    )


@contextmanager
def running(model: Path, policy: str | None, **options: Any) -> Iterator[Engine]:
    """An engine while the block runs; `policy` None is stock vLLM, `config` further keys."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.freeze()  # vLLM collects garbage several times while it starts.
    engine = Engine(model, policy, **options)
    try:
        yield engine
    finally:
        with _collecting_once():
            engine.llm.llm_engine.engine_core.shutdown()
            del engine
            cleanup_dist_env_and_memory()


def forget_ranks() -> None:
    """Ends vLLM's groups of ranks, which an engine that failed to start has left.

    Those of a dense model have no group of expert parallelism.
    """
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        model_parallel_is_initialized,
    )

    if model_parallel_is_initialized():
        cleanup_dist_env_and_memory()


@contextmanager
def _collecting_once() -> Iterator[None]:
    """Garbage is collected at the end of the block, and not each time that somebody asks for it."""
    collect = gc.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield
    collect()


def keep_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core in this process, so that tests can look into it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # It goes before `kv_cache_memory_bytes`, and a GiB takes seconds to clear.
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def schedule_ahead(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """Whether steps are planned before the one before is done; vLLM would refuse it on CPU."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    monkeypatch.setattr(
        CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)
    )
