"""Real vLLM engines, in process, on tiny models; the same runner that GPUs use."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import models, speed

BLOCK = 32  # What the CPU attention backend takes.
VOCAB = 512
# Prompt lengths around block and chunk edges.
EDGES = (2, 3, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 129, 191, 193)


@dataclass
class Answer:
    """One generated sequence: tokens, their logprobs (S,) and tokens taken from the cache."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    cached: int


class Engine:
    """A vLLM ``LLM`` whose scheduler and model state are within reach."""

    def __init__(self, model: Path, policy: str | None, **options: Any) -> None:
        from vllm import LLM

        config = {} if policy is None else {"kv_policy": policy, "kv_debug": True}
        config.update(options.pop("config", {}))
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
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = core.scheduler.kv_cache_manager.block_pool
        executor = core.model_executor
        if hasattr(executor, "driver_worker"):  # Not with several ranks: they are processes.
            self.runner = executor.driver_worker.worker.model_runner
        self._count_preemptions()

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int = 4,
        policies: Sequence[str | None] | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Greedy answers to all prompts, given to the engine at once."""
        from vllm.inputs import TokensPrompt

        policies = policies or [None] * len(prompts)
        params = [greedy(max_tokens, name, **sampling) for name in policies]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        if cache_salt is not None:
            for item in inputs:
                item["cache_salt"] = cache_salt
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [
            Answer(
                prompt=prompt,
                tokens=list(choice.token_ids),
                logprobs=torch.tensor(
                    [
                        entry[token].logprob
                        for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
                    ]
                ),
                cached=output.num_cached_tokens or 0,
            )
            for prompt, output in zip(prompts, outputs, strict=True)
            for choice in output.outputs
        ]

    def submit(self, prompts: Sequence[list[int]], max_tokens: int) -> list[str]:
        """Adds requests without running them; their ids."""
        from vllm.inputs import TokensPrompt

        self._submitted = getattr(self, "_submitted", 0)
        ids = []
        for prompt in prompts:
            self._submitted += 1
            ids.append(f"submitted-{self._submitted}")
            self.llm.llm_engine.add_request(
                ids[-1], TokensPrompt(prompt_token_ids=prompt), greedy(max_tokens)
            )
        return ids

    def preemptions(self) -> int:
        """Preemptions so far."""
        return self._preempted

    def watch_running(self) -> list[int]:
        """Grows by the number of running requests after every schedule."""
        counts: list[int] = []
        schedule = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            counts.append(len(self.scheduler.running))
            return output

        self.scheduler.schedule = watched
        return counts

    def _count_preemptions(self) -> None:
        self._preempted = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def stats(self) -> dict[str, Any]:
        """Rank 0's layout and counters."""
        return self.llm.collective_rpc("kv_policy_stats")[0]

    def assert_idle(self) -> None:
        """Every block but vLLM's null block is free, and nothing is left behind."""
        # One more schedule lets frees that wait for a step's end happen.
        assert not self.scheduler.has_unfinished_requests()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        for manager in getattr(self.scheduler, "policy_managers", []):
            assert not manager.requests and not manager._to_copy and not manager.req_to_blocks


def greedy(max_tokens: int, policy: str | None = None, **sampling: Any) -> Any:
    """Sampling parameters of a greedy answer of exactly this many tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "logprobs": 0, "detokenize": False} | sampling,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=None if policy is None else {"kv_policy": policy},
    )


@contextmanager
def running(model: Path, policy: str | None, **options: Any) -> Iterator[Engine]:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine = Engine(model, policy, **options)
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core in this process, so that tests can look into it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds tiny models, each once per session."""
    made: dict[str, Path] = {}

    def make(arch: str = "llama", **options: Any) -> Path:
        key = f"{arch}-{sorted(options.items())}"
        if key not in made:
            path = tmp_path_factory.mktemp(arch)
            made[key] = models.build_model(path, arch=arch, vocab=VOCAB, **options)
        return made[key]

    return make


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_matches(model: Any, answers: Sequence[Answer], **reference: Any) -> None:
    """Greedy tokens equal the dense reference's, logprobs within 1e-4."""
    loaded = speed.load(model)
    for answer in answers:
        expected = speed.score(loaded, answer.prompt, answer.tokens, **reference)
        where = f"prompt of {len(answer.prompt)} tokens, {reference}"
        assert expected.argmax == answer.tokens, where
        error = (answer.logprobs - expected.chosen_logprob).abs().max()
        assert error < 1e-4, f"{where}: logprobs differ by {error}"
