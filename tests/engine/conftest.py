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
from reference import fastkv, models, speed

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
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        core = self.core
        self.scheduler = core.scheduler
        self.pool = core.scheduler.kv_cache_manager.block_pool
        executor = core.model_executor
        self.runner: Any = None
        if hasattr(executor, "driver_worker"):  # Not with several ranks: they are processes.
            self.runner = executor.driver_worker.worker.model_runner
        admission = getattr(core.scheduler, "admission", None)
        self._free_windows = admission.free_windows if admission is not None else 0
        self._count_preemptions()
        self._submitted = 0
        self.answered: dict[str, list[int]] = {}

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

    def submit(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        policies: Sequence[str | None] | None = None,
    ) -> list[str]:
        """Adds requests without running them; their ids."""
        from vllm.inputs import TokensPrompt

        ids = []
        for prompt, name in zip(prompts, policies or [None] * len(prompts), strict=True):
            self._submitted += 1
            ids.append(f"submitted-{self._submitted}")
            self.llm.llm_engine.add_request(
                ids[-1], TokensPrompt(prompt_token_ids=prompt), greedy(max_tokens, name)
            )
        return ids

    def step(self) -> None:
        """One step of the engine; `answered` gets the tokens of requests that end with it."""
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

    def preemptions(self) -> int:
        """Preemptions so far."""
        return len(self.preempted)

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
        # Tokens computed until then, and tokens of the prompt.
        self.preempted: list[tuple[int, int]] = []
        preempt = self.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preempted.append((request.num_computed_tokens, request.num_prompt_tokens))
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
        for manager in getattr(scheduler, "policy_managers", []):
            assert not manager.requests and not manager._to_copy and not manager.req_to_blocks
        for manager in getattr(scheduler, "lower_managers", []):
            assert not manager.requests and not manager.req_to_blocks
        admission = getattr(scheduler, "admission", None)
        if admission is not None:
            assert not admission._prompts and not admission._pages and not admission._split
            assert admission.used_pages == 0 and admission.free_windows == self._free_windows
            assert not scheduler._to_shrink and not scheduler._counted_unshared
        # Workers learn with the next step who is gone; this one runs nobody.
        while scheduler.has_finished_requests():
            self.core.step_fn()
        state: Any = getattr(self.runner, "model_state", None)
        if hasattr(state, "requests"):
            assert not state.requests.prompts and not state.requests.index
            assert len(state.requests.free_windows) == self._free_windows
            assert state.stash is None or state.stash.used_tokens == 0


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

    gc.freeze()  # vLLM collects garbage several times while it starts.
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
    # It goes before `kv_cache_memory_bytes`, and a GiB takes seconds to clear.
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
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


def named(keep: fastkv.Keep) -> str:
    """The policy whose semantics `keep` spells out."""
    parts = []
    if keep.cutoff is not None:
        parts.append(f"speed-{keep.cutoff}:anchors={keep.anchors},tail={keep.tail}")
    budget = f"kv_rate={keep.kv_rate}" if keep.kv_budget is None else f"kv_budget={keep.kv_budget}"
    scored = f"{budget},window={keep.window},kernel={keep.kernel}"
    if keep.sinks is not None:
        parts.append(f"streamingllm:sinks={keep.sinks},recent={keep.recent}")
    elif keep.tsp_layer is not None:
        parts.append(f"fastkv:tsp_layer={keep.tsp_layer},tsp_rate={keep.tsp_rate},{scored}")
    elif keep.kv_budget is not None or keep.kv_rate != 1:
        parts.append(f"snapkv:{scored}")
    return "+".join(parts) or "full"


# Scores closer than this may be ordered either way by float32 sums in another order.
NEAR_TIE = 1e-5


def assert_kept(model: Path, answers: Sequence[Answer], keeps: Sequence[fastkv.Keep]) -> None:
    """Greedy tokens equal the dense reference's, logprobs within 1e-4; near-ties are passed over.

    At most one prompt in ten may be one: more would show nothing.
    """
    loaded, near_ties = fastkv.load(model), 0
    for answer, keep in zip(answers, keeps, strict=True):
        expected = fastkv.score(loaded, answer.prompt, answer.tokens, keep)
        error = float((answer.logprobs - expected.chosen_logprob).abs().max())
        if expected.argmax == answer.tokens and error < 1e-4:
            continue
        where = f"prompt of {len(answer.prompt)} tokens, {named(keep)}, slack {expected.slack}"
        assert expected.slack < NEAR_TIE, (
            f"{where}: {answer.tokens} for {expected.argmax}, logprobs differ by {error}"
        )
        near_ties += 1
    assert near_ties <= len(answers) // 10, f"{near_ties} near-ties among {len(answers)} prompts"


@pytest.fixture(scope="session", autouse=True)
def quick_on_cpu() -> None:
    """Several times faster: one thread, and one set-up of ``triton.language`` per kernel launch.

    Tiny matrices gain nothing from threads, which wait for each other where the cores are shared.
    Triton's interpreter would set up anew for every function that a kernel calls.
    """
    if torch.cuda.is_available():
        return
    torch.set_num_threads(1)
    import vllm.triton_utils  # noqa: F401  In this order: it installs the CPU backend.
    from triton.runtime import interpreter

    stock, done = interpreter._patch_lang, set[int]()

    def patch_lang(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return interpreter._LangPatchScope()
        is_launch = not done
        done.add(module)
        scope = stock(fn)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                done.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang


@pytest.fixture
def dense_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and selects by the kernels' torch references: the engine around them is tested.

    Interpreted, the kernels take a second per prompt; tests/ops compares them, and the tests
    without this fixture run them.
    """
    from vllm_kvx.ops.prompt import attention_metrics as metrics
    from vllm_kvx.ops.prompt import move, pool, saliency, select
    from vllm_kvx.scores import window_attention
    from vllm_kvx.worker.prefill import centrality, score_and_move

    def window_saliency(*args: Any, key_scale: float = 1.0) -> torch.Tensor:
        sizes, scale = args[:-3], args[-1]
        return saliency.window_saliency_reference(*sizes, scale, key_scale)  # type: ignore[call-arg]

    def pool_per_kv_head(*args: Any) -> torch.Tensor:
        return pool.pool_per_kv_head_reference(*args[:-1])

    def select_kept(scores: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.cat(select.select_kept_reference(scores, *args[:4]), dim=1).int()

    def select_moves(scores: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        *sizes, offsets, total = args
        moves = select.select_moves_reference(scores, *sizes)
        sources = torch.zeros(scores.shape[0], total, dtype=torch.int32)
        targets, counts = torch.zeros_like(sources), sources.new_zeros(len(scores), len(moves))
        for f, rows in enumerate(moves):
            for head, (source, target) in enumerate(rows):
                columns = slice(int(offsets[f]), int(offsets[f]) + len(source))
                sources[head, columns], targets[head, columns] = source.int(), target.int()
                counts[head, f] = len(source)
        return sources, targets, counts

    def move_entries(
        paged: Any,
        tables: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        _: int,
    ) -> None:
        moves = [
            [
                (sources[head, first : first + n].long(), targets[head, first : first + n].long())
                for head, n in enumerate(counts[:, f].tolist())
            ]
            for f, first in enumerate(offsets[: counts.shape[1]].tolist())
        ]
        move.move_entries_reference(paged, tables, moves)

    def window_metrics(
        queries: torch.Tensor,
        paged: Any,
        tables: torch.Tensor,
        num_keys: torch.Tensor,
        windows: torch.Tensor,
        _: int,
        scale: float,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        return metrics.window_metrics_reference(
            queries, paged, tables, num_keys, windows, scale, key_scale
        )

    kernels = (
        window_saliency,
        window_metrics,
        pool_per_kv_head,
        select_kept,
        select_moves,
        move_entries,
    )
    for replacement in kernels:
        for module in (window_attention, score_and_move, centrality):
            if hasattr(module, replacement.__name__):
                monkeypatch.setattr(module, replacement.__name__, replacement)
