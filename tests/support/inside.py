"""The one way inside vllm_kvx: every access of tests to its private or internal state.

When internals are renamed this file changes, and no test does. Imports of the package stand in
the functions that need them, so that one name that is gone breaks the tests that use it alone.
`engine` is a ``support.engine.Engine``.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

# The scheduler's side.


def _admission(engine: Any) -> Any:
    """Where prompts wait and chunks end; None on a stock scheduler."""
    return getattr(engine.scheduler, "admission", None)


def free_windows(engine: Any) -> int:
    """Windows that may be spread over chunks now."""
    admission = _admission(engine)
    return 0 if admission is None else admission.free_windows


def used_stash_pages(engine: Any) -> int:
    """Stash pages that the scheduler has given to prompts."""
    return used_pages(engine.scheduler)


def state_tokens(engine: Any) -> int:
    """Tokens of a block of hidden states in the prefix cache."""
    return engine.scheduler.sharing.states.tokens


def upper_managers(engine: Any) -> list[Any]:
    """The managers of KV groups that hold less than their requests' tokens from the start."""
    return engine.scheduler.later_stage_managers


def assert_scheduler_forgot(engine: Any, windows: int) -> None:
    """No request, page or window (of `windows`) is held by the scheduler and its managers."""
    scheduler, admission = engine.scheduler, _admission(engine)
    for manager in getattr(scheduler, "later_stage_managers", []):
        assert not manager.requests and not manager._to_copy and not manager.req_to_blocks
    for manager in getattr(scheduler, "first_stage_managers", []):
        assert not manager.requests and not manager.req_to_blocks
    if admission is not None:
        assert not admission._prompts and not admission._pages and not admission._split
        assert used_pages(scheduler) == 0 and admission.free_windows == windows
        assert not admission._waiting_since and not admission._seekers
        assert not scheduler._to_shrink and not scheduler._counted_unshared


def owed_blocks(scheduler: Any) -> int:
    """Blocks that the scheduler leaves for copies before any other request begins."""
    managers = (*scheduler.first_stage_managers, *scheduler.later_stage_managers)
    return sum(manager.owed() for manager in managers)


def left_in_scheduler(scheduler: Any) -> dict[str, Any]:
    """What an idle scheduler of ours still holds, by kind; all empty if it forgot everything."""
    admission = scheduler.admission
    full = *scheduler.first_stage_managers, *scheduler.later_stage_managers
    managers = *full, *scheduler._sliding_managers
    return {
        "prompts": admission._prompts,
        "pages": used_pages(scheduler) or admission._pages,
        "windows": admission._split,
        "waiting": admission._waiting_since or admission._seekers,
        "to shrink": scheduler._to_shrink,
        "counted": scheduler._counted_unshared,
        "managed": any(m.requests or any(m.req_to_blocks.values()) for m in managers),
    }


def used_pages(scheduler: Any) -> int:
    """Stash pages that a scheduler of ours has given to prompts."""
    from vllm_kvx.policy.storage import stash_pages

    pages: int = stash_pages(scheduler.kv_settings.stash_tokens) - scheduler.admission.free_pages
    return pages


def stash_seekers(scheduler: Any) -> set[str]:
    """Requests that a scheduler of ours believes to be in the queue without their stash pages."""
    return set(scheduler.admission._seekers)


def watch_blocks(scheduler: Any) -> list[dict[str, Any]]:
    """Grows by the new blocks of every request, by KV group, with every schedule."""
    given: list[dict[str, Any]] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        here = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        given.append(here | {new.req_id: new.block_ids for new in output.scheduled_new_reqs})
        return output

    scheduler.schedule = watched
    return given


def count_allocations(scheduler: Any) -> list[str]:
    """Grows by a request's id whenever vLLM is asked for its blocks."""
    coordinator, asked = scheduler.kv_cache_manager.coordinator, list[str]()
    allocate = coordinator.allocate_new_blocks

    def counted(request_id: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(request_id)
        return allocate(request_id, *args, **kwargs)

    coordinator.allocate_new_blocks = counted
    return asked


def published_blocks(scheduler: Any) -> dict[tuple[int, str], int]:
    """By KV group and request, how many of its blocks are in the prefix cache."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        (group, name): count
        for group, manager in enumerate(managers)
        for name, count in manager.num_cached_block.items()
    }


def read_events(engine: Any, read: Callable[[bytes], None], after_step: Callable[[], None]) -> None:
    """Hands every published batch of KV cache events to `read`, encoded as it is sent."""
    from msgspec.msgpack import Encoder

    core, encode = engine.core, Encoder().encode
    step = core.step_fn
    engine.scheduler.kv_event_publisher.publish = lambda batch: read(encode(batch))

    def stepped() -> Any:
        result = step()
        after_step()
        return result

    core.step_fn = stepped


def cached_hashes(engine: Any) -> set[tuple[int, int]]:
    """What is in the prefix cache, as KV cache events name it: hashes and KV groups."""
    from vllm.v1.core import kv_cache_utils as utils

    cached: Any = engine.pool.cached_block_hash_to_block._cache
    named: Any = utils.maybe_convert_block_hash
    return {(named(utils.get_block_hash(key)), utils.get_group_id(key)) for key in cached}


def hashes_of_several_blocks(engine: Any) -> int:
    """How many hashes in the prefix cache have more than one block."""
    cached = engine.pool.cached_block_hash_to_block._cache
    return sum(isinstance(blocks, dict) and len(blocks) > 1 for blocks in cached.values())


def watch_evictions(engine: Any) -> set[int]:
    """Grows by the blocks that a scheduler of ours takes out of the prefix cache."""
    gone: set[int] = set()
    evict = engine.pool.evict_blocks

    def watched(block_ids: set[int]) -> None:
        gone.update(block_ids)
        evict(block_ids)

    engine.pool.evict_blocks = watched
    return gone


def let_quiet_steps_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a step that should need nothing does."""
    from vllm_kvx.cache.decode_fast_path import DecodeFastPath

    monkeypatch.setattr(DecodeFastPath, "_check", lambda *_: None)


def watch_quiet_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the requests that are known to need nothing, as often as it turns out to be true."""
    from vllm_kvx.cache.decode_fast_path import DecodeFastPath

    quiet, check = list[str](), DecodeFastPath._check

    def watched(self: Any, request: Any, ask: Callable[[], Any]) -> None:
        check(self, request, ask)
        quiet.append(request.request_id)

    monkeypatch.setattr(DecodeFastPath, "_check", watched)
    return quiet


def ask_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is known to need nothing."""
    from vllm_kvx.cache.decode_fast_path import DecodeFastPath

    monkeypatch.setattr(DecodeFastPath, "_remember", lambda *_: None)


def forecast_more_room(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Requests are believed to have room for so many tokens more than they have."""
    from vllm_kvx.cache.managers import PolicyKVCacheManager

    stock = PolicyKVCacheManager.fast_path_until

    def fast_path_until(self: Any, request_id: str, num_tokens: int) -> tuple[int, int]:
        room, full_at = stock(self, request_id, num_tokens)
        return room + tokens, full_at + tokens

    monkeypatch.setattr(PolicyKVCacheManager, "fast_path_until", fast_path_until)


def limit_prefix_hits(engine: Any, tokens: int) -> bool:
    """vLLM takes no more than `tokens` of any prefix; False where it has no such limit: 0.32."""
    stock = engine.scheduler._get_local_prefix_cache_hit
    from vllm.v1.core.sched.scheduler import Scheduler

    if "max_cache_hit_length" not in signature(Scheduler._get_local_prefix_cache_hit).parameters:
        return False

    def limited(request: Any, limit: int | None) -> Any:
        assert limit is None, "vLLM has a limit of its own in this server"
        return stock(request, tokens)

    engine.scheduler._get_local_prefix_cache_hit = limited
    return True


def watch_chunks(engine: Any) -> dict[str, list[int]]:
    """By request, in the order of arrival, where its chunks begin."""
    chunks: dict[str, list[int]] = {}
    admission = _admission(engine)
    clip = admission.clip

    def watched(request: Any, start: int, num_new_tokens: int) -> int:
        count = clip(request, start, num_new_tokens)
        if count:
            chunks.setdefault(request.request_id, []).append(start)
        return count

    admission.clip = watched
    return chunks


def watch_stash(engine: Any) -> list[int]:
    """Grows by the stash pages in use after every schedule."""
    used: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        used.append(used_stash_pages(engine))
        return output

    engine.scheduler.schedule = watched
    return used


# The worker's side.


def _state(engine: Any) -> Any:
    """The worker's model state; a stock one has nothing of ours."""
    return engine.runner.model_state


def _centrality(engine: Any) -> Any:
    """Scores summed over layers, of prompts that are coming in."""
    return _state(engine).memory.centrality


def assert_worker_forgot(engine: Any, windows: int) -> None:
    """No prompt, slot of a window (of `windows`) or stashed token is held by the worker."""
    state = getattr(engine.runner, "model_state", None)
    if hasattr(state, "requests"):
        assert not state.requests.prompts and not state.requests.index
        assert len(state.requests.free_windows) == windows
        assert state.stash is None or state.stash.used_tokens == 0


def assert_no_prompt(engine: Any) -> None:
    """The worker of a server with a stash holds no prompt and no stashed token."""
    state = _state(engine)
    assert not state.requests.prompts and state.stash.used_tokens == 0


def assert_no_centrality(engine: Any) -> None:
    """No prompt's centrality, and no prompt's ranked blocks, are left."""
    centrality = _centrality(engine)
    assert not centrality._sums and not centrality._blocks and not centrality.metrics


def worker(engine: Any) -> Any:
    """The worker of an engine of one rank."""
    return engine.core.model_executor.driver_worker.worker


def plan_for_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention metadata is built for every KV group, as vLLM does."""
    from vllm_kvx.worker import shared_attn_metadata as alike

    monkeypatch.setattr(alike, "_take_over", lambda first, groups: False)


def discard_memory(engine: Any) -> int:
    """Overwrites all that was allocated as the model loaded, as sleep of level 2 does.

    The model's buffers, which vLLM saves, stay, and so does what is bound with the KV cache.
    Returns the number of tensors.
    """
    later = {"passes", "block_tables", "kv_cache_config", "_groups", "_stages", "views", "_writer"}
    found: dict[int, Tensor] = {}

    def gather(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found[thing.data_ptr()] = thing
        elif isinstance(thing, (list, tuple)):
            for item in thing:
                gather(item)
        elif type(thing).__module__.startswith("vllm_kvx") and id(thing) not in seen:
            seen.add(id(thing))
            if not isinstance(thing, torch.nn.Module):
                for name, value in vars(thing).items():
                    if name not in later:
                        gather(value)

    seen: set[int] = set()
    gather(_state(engine))
    for tensor in [*found.values(), *engine.runner.model.parameters()]:
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
    return len(found)


def tickets(engine: Any) -> Tensor:
    """Scratch of retrieval that is zero between its ops, flat."""
    scratch = _state(engine).retrieval.scratch
    return torch.cat([scratch.histogram.flatten(), scratch.tickets.flatten()])


def profiled_scratch(engine: Any) -> int:
    """The most bytes that a layer's hook takes at once while vLLM profiles memory.

    Layers are as they were before vLLM formed its KV groups, which comes after profiling.
    """
    hooks, runner = _state(engine).hooks, engine.runner
    sizes: list[int] = []
    take = hooks._take_scratch

    def counted(device: torch.device) -> None:
        sizes.append(hooks.scratch_bytes)
        take(device)

    hooks._take_scratch, hooks.is_bound = counted, False
    try:
        runner.profile_run()
    finally:
        del hooks._take_scratch
        hooks.is_bound = True
    return max(sizes, default=0)


def runs_compiled_ranges(engine: Any) -> bool:
    """Whether prompts run the stock decoder's compiled pieces."""
    return _state(engine).hooked.compiled_ranges is not None


def limit_pass(engine: Any, tokens: int) -> None:
    """Passes of selected tokens run so many at most."""
    _state(engine).passes.max_tokens = tokens


def watch_passes(engine: Any) -> list[int]:
    """Grows by the number of passes of selected tokens with every forward pass."""
    counts: list[int] = []
    state = _state(engine)
    begin_step, resumed = state.hooked.begin_step, state.passes.resumed

    def began(plan: Any) -> None:
        if plan.passes is None:
            counts.append(0)
        begin_step(plan)

    def made(*args: Any) -> list[Any]:
        passes = resumed(*args)
        counts.append(len(passes))
        return passes

    state.hooked.begin_step, state.passes.resumed = began, made
    return counts


def watch_rows(engine: Any, cutoff: int) -> tuple[list[int], list[int]]:
    """Rows that the layers below and above `cutoff` run, per step; 0 where they do not run."""
    rows: tuple[list[int], list[int]] = ([], [])
    layers = engine.runner.model.model.layers
    for part, layer in enumerate((layers[0], layers[cutoff])):
        forward = layer.forward

        def counted(positions, *args, part=part, forward=forward, **kwargs):  # type: ignore[no-untyped-def]
            if part == 0:
                rows[0].append(positions.shape[0])
                rows[1].append(0)
            # A layer of which entries are projected ends where its attention is called.
            out = forward(positions, *args, **kwargs)
            if part:
                rows[1][-1] = positions.shape[0]
            return out

        layer.forward = counted
    return rows


def watch_mlp_rows(engine: Any) -> list[int]:
    """By layer, rows that its MLP has run."""
    layers = engine.runner.model.model.layers
    rows = [0] * len(layers)
    for number, layer in enumerate(layers):
        forward = layer.mlp.forward

        def counted(states: Tensor, number: int = number, forward: Any = forward) -> Tensor:
            rows[number] += states.shape[0]
            out: Tensor = forward(states)
            return out

        layer.mlp.forward = counted
    return rows


def entries_of(engine: Any, request_id: str, layer: int, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values (G, count, D) in a request's first slots of one layer."""
    hook = _state(engine).hooks.layers[layer]
    paged = hook.paged()
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[hook.group]
    blocks = torch.tensor([block.block_id for block in manager.req_to_blocks[request_id]])
    slots = torch.arange(count)
    index = blocks[slots // paged.block_size], slice(None), slots % paged.block_size
    return paged.keys[index].transpose(0, 1), paged.values[index].transpose(0, 1)


# The model.


def is_stock(engine: Any) -> bool:
    """Whether scheduler and model are vLLM's own Llama."""
    stock_scheduler = type(engine.scheduler).__module__.startswith("vllm.")
    return stock_scheduler and type(engine.runner.model).__name__ == "LlamaForCausalLM"


class Decoders:
    """The two decoders of a model with a cutoff: what a forward pass runs, and with which plan."""

    def __init__(self, engine: Any) -> None:
        self._model = engine.runner.model
        self._config = engine.llm.llm_engine.vllm_config
        self._cutoff = _state(engine).passes.segments[0][1]

    def replace_first_segment(self, forward: Callable[..., Any]) -> None:
        self._model.segments.all[0].forward = forward

    def begin_without_drops(self, *, is_dummy: bool = False) -> None:
        """A batch that drops nothing; a dummy is vLLM's own, as it warms up and captures."""
        from vllm_kvx.models.passes import StepPlan

        self._model.begin_step(StepPlan(is_dummy=is_dummy))

    def begin_middle_chunk(self) -> None:
        """A batch of which no row goes on above the cutoff."""
        from vllm_kvx.models.passes import BatchRows, Pass, StepPlan

        self._model.begin_step(StepPlan(iter([Pass(0, self._cutoff, BatchRows())])))

    def run(self, size: int, mode: Any) -> None:
        """A forward pass of `size` tokens in a CUDA graph mode."""
        from vllm.forward_context import set_forward_context

        with set_forward_context({}, self._config, num_tokens=size, cudagraph_runtime_mode=mode):
            self._model(torch.zeros(size, dtype=torch.long), torch.arange(size))


# Retrieval.


def room_for_scores(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """The scores of so many entries have room in CUDA graphs."""
    from vllm_kvx.worker.decode import retrieval

    monkeypatch.setattr(retrieval, "capacity_of", lambda *_: entries)


def watch_graphs(engine: Any) -> list[tuple[bool, int, int]]:
    """Grows by each step's: needs Python, entries of the segment that scores most, batches."""
    from vllm_kvx.ops.retrieval.rows import room_of

    state = _state(engine)
    needs_python, eager_pass = state.needs_python, state.retrieval.eager_pass
    seen: list[tuple[bool, int, int]] = []
    decided: list[bool] = []

    def decides(*args: Any) -> bool:
        decided.append(needs_python(*args))
        return decided[-1]

    def runs(step: Any, *args: Any) -> Any:
        now = eager_pass(step, *args)
        most = max(len(batches) for batches in now.batches) if now is not None else 0
        seen.append((decided[-1], int(room_of(step.lens, 1).sum(axis=1).max()), most))
        return now

    state.needs_python, state.retrieval.eager_pass = decides, runs
    return seen


def count_graph_replays(engine: Any) -> dict[str, int]:
    """Counts FULL replays (`full`) against all forward passes of real batches (`steps`)."""
    return _count_graphs(engine, {"full": 0, "steps": 0}, lambda: "full")


def count_retrieval_graphs(engine: Any) -> dict[str, int]:
    """Counts decode steps by what their FULL graph does, and all real steps (`steps`)."""
    retrieval = _state(engine).retrieval
    return _count_graphs(
        engine, {"steps": 0}, lambda: "+".join(mode.value for mode in retrieval.graph)
    )


def count_waiting_graphs(engine: Any) -> dict[str, int]:
    """Counts FULL replays that keep queries (`keeps`), others (`full`), and all real steps."""
    waiting = _state(engine).waiting
    counts = {"keeps": 0, "full": 0, "steps": 0}
    return _count_graphs(engine, counts, lambda: "keeps" if waiting.keeps else "full")


@contextmanager
def waiting_without_graphs(engine: Any) -> Iterator[None]:
    """Inside, steps in which requests wait for generated tokens run without FULL graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_state(engine).waiting, "in_graphs", False)
        yield


def replay_waiting_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Two of three steps that may replay a graph which keeps queries do what it has in it.

    Counts those that do (`True`), and the others that may.
    """
    from vllm.config.compilation import CUDAGraphMode

    from vllm_kvx.worker.model_state import PolicyModelState

    stock, counts = PolicyModelState.prepare_attn, Counter[bool]()

    def prepare_attn(self: Any, batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step is not None and self._step.chunks and batch.num_tokens == batch.num_reqs:
            tokens = batch.num_computed_tokens_np, batch.num_scheduled_tokens
            if not self.needs_python(batch.idx_mapping_np, *tokens):
                replays = counts.total() % 3 > 0
                counts[replays] += 1
                mode = CUDAGraphMode.FULL if replays else mode
        return stock(self, batch, mode, *args, **kwargs)

    monkeypatch.setattr(PolicyModelState, "prepare_attn", prepare_attn)
    return counts


@contextmanager
def replaying_drafts(
    engine: Any, sizes: Sequence[int], plans: bool = False
) -> Iterator[Counter[int]]:
    """Inside, passes that draft replay "graphs" of these numbers of rows; see ``Replays``.

    Yields how often, by number of rows, as they grow.

    plans: attention is planned within them, as some backends of GPUs do.
    """
    from support.replays import Replays
    from vllm_kvx.worker import row_graphs

    runner = engine.runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_graphs, "CudaGraphManager", Replays)
        patch.setattr(row_graphs, "sizes_of", lambda *_: list(sizes))
        if plans:
            _plan_in_graphs(patch)
        platform = type(row_graphs.current_platform)
        patch.setattr(platform, "graph_pool_handle", lambda *_: None, raising=False)
        (graphs,) = row_graphs.graphs_of(runner, _state(engine).settings)
        with torch.inference_mode():
            graphs.capture()
        patch.setattr(runner.cudagraph_manager, "kvx_row_graphs", [graphs], raising=False)
        counts: Counter[int] = graphs.manager.counts
        yield counts


def _plan_in_graphs(patch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU attention plans a batch again by lengths that changed in place."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    def plan(self: Any, metadata: Any) -> None:
        metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(metadata.seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=metadata.seq_lens,
            dtype=self.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=False,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    patch.setattr(Builder, "supports_draft_decode_metadata_update", True)
    patch.setattr(Builder, "update_draft_decode_metadata", plan)


@contextmanager
def drafting_without_graphs(engine: Any) -> Iterator[None]:
    """Inside, passes that draft run without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner.cudagraph_manager, "kvx_row_graphs", [])
        yield


def count_draft_replays(engine: Any) -> Counter[int]:
    """Counts passes that draft by replaying a graph, by its number of rows; 0: steps without."""
    from vllm_kvx.worker import row_passes

    counts: Counter[int] = Counter()
    for graphs in row_passes.row_graphs_of(engine.runner):
        name = "draft" if isinstance(graphs, row_passes.DraftGraphs) else "run"
        run, replay = getattr(graphs, name), graphs.manager.run_fullgraph

        def counted(desc: Any, replay: Any = replay) -> Any:
            counts[desc.num_tokens] += 1
            return replay(desc)

        def ran(ids: Any, now: Any, run: Any = run) -> Any:
            found = run(ids, now)
            counts[0] += found is None
            return found

        setattr(graphs, name, ran)
        graphs.manager.run_fullgraph = counted
    return counts


def _count_graphs(
    engine: Any, counts: dict[str, int], name_of: Callable[[], str]
) -> dict[str, int]:
    manager, state = engine.runner.cudagraph_manager, _state(engine)
    run, preprocess = manager.run_fullgraph, state.preprocess_state

    def run_fullgraph(desc: Any) -> Any:
        name = name_of()
        counts[name] = counts.get(name, 0) + 1
        return run(desc)

    def preprocess_state(*args: Any) -> None:
        counts["steps"] += 1
        preprocess(*args)

    manager.run_fullgraph, state.preprocess_state = run_fullgraph, preprocess_state
    return counts


def poison_free_blocks(engine: Any) -> None:
    """From now on, what nobody holds and nobody may read is overwritten after every schedule."""
    schedule, pool = engine.scheduler.schedule, engine.pool

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        idle = [b.block_id for b in pool.blocks if not (b.ref_cnt or b.block_hash or b.is_null)]
        for hook in _state(engine).hooks.layers:
            hook.layer.kv_cache[idle] = 1e4
        return output

    engine.scheduler.schedule = poisoned


def fill_free_blocks(engine: Any, byte: int) -> None:
    """Overwrites every byte of all free blocks of an idle engine with an 8-bit KV cache."""
    free = [b.block_id for b in engine.pool.blocks if not (b.ref_cnt or b.is_null)]
    for hook in _state(engine).hooks.layers:
        hook.layer.kv_cache.view(torch.uint8)[free] = byte


# Operators.


def copy_blocks_of(monkeypatch: pytest.MonkeyPatch, bytes_at_a_time: int) -> None:
    """Blocks are copied in pieces of this size."""
    from vllm_kvx.ops.prompt import move

    monkeypatch.setattr(move, "_COPY_BYTES", bytes_at_a_time)


def copy_states_of(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Hidden states are copied in pieces of so many tokens."""
    from vllm_kvx.worker.prefill import prefix_states

    monkeypatch.setattr(prefix_states, "MOST_TOKENS", tokens)


def use_dense_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and selects by the kernels' torch references: the engine around them is tested.

    Interpreted, the kernels take a second per prompt; tests/ops compares them, and engine tests
    without this run them.
    """
    from vllm_kvx.ops.prompt import attention_metrics as metrics
    from vllm_kvx.ops.prompt import move, pool, saliency, select, two_stages, value_norms
    from vllm_kvx.scores import value_weighted_attention, window_attention
    from vllm_kvx.worker.prefill import centrality, score_and_move

    def window_saliency(*args: Any, **options: Any) -> Tensor:
        sizes, scale = args[:-3], args[-1]
        return saliency.window_saliency_reference(*sizes, scale, **options)  # type: ignore[call-arg]

    def pool_per_kv_head(*args: Any) -> Tensor:
        *sizes, kernels, _, unpooled, reduction = args
        if unpooled is not None:
            ones = torch.ones_like(kernels)
            reduced = pool.pool_per_kv_head_reference(*sizes, ones, reduction)
            unpooled[:, : reduced.shape[1]] = reduced
        return pool.pool_per_kv_head_reference(*sizes, kernels, reduction)

    def select_kept(scores: Tensor, *args: Any, unpooled: Tensor | None = None) -> Tensor:
        kept = select.select_kept_reference(scores, *args[:4], unpooled)
        return torch.cat(kept, dim=1).int()

    def select_moves(
        scores: Tensor, *args: Any, unpooled: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        *sizes, offsets, total = args
        moves = select.select_moves_reference(scores, *sizes, unpooled)
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
        tables: Tensor,
        sources: Tensor,
        targets: Tensor,
        counts: Tensor,
        offsets: Tensor,
        _: int,
        target_tables: Tensor | None = None,
    ) -> None:
        moves = [
            [
                (sources[head, first : first + n].long(), targets[head, first : first + n].long())
                for head, n in enumerate(counts[:, f].tolist())
            ]
            for f, first in enumerate(offsets[: counts.shape[1]].tolist())
        ]
        move.move_entries_reference(paged, tables, moves, target_tables)

    def window_metrics(
        queries: Tensor,
        paged: Any,
        tables: Tensor,
        num_keys: Tensor,
        windows: Tensor,
        _: int,
        scale: float,
        **options: Any,
    ) -> Tensor:
        return metrics.window_metrics_reference(
            queries, paged, tables, num_keys, windows, scale, **options
        )

    def norms_of_values(*args: Any) -> Tensor:
        return value_norms.value_norms_reference(*args[:5])

    norms_of_values.__name__ = "value_norms"

    def two_stage_scores(*args: Any, group: int) -> Tensor:
        return two_stages.two_stage_scores_reference(*args, group)

    kernels = (
        norms_of_values,
        two_stage_scores,
        window_saliency,
        window_metrics,
        pool_per_kv_head,
        select_kept,
        select_moves,
        move_entries,
    )
    for replacement in kernels:
        for module in (
            window_attention,
            value_weighted_attention,
            score_and_move,
            centrality,
        ):
            if hasattr(module, replacement.__name__):
                monkeypatch.setattr(module, replacement.__name__, replacement)


# Rules of choice, broken on purpose. They need the dense ops, whose scores may have any sign.


def keep_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest scores are chosen in the place of the highest."""
    _change_scores(monkeypatch, _lowest_first)


def shift_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every KV head chooses by the scores of the head before it."""
    _change_scores(monkeypatch, lambda scores: scores.roll(1, dims=0))


def _lowest_first(scores: Tensor) -> Tensor:
    # What is read always has infinity, and has it still.
    return torch.where(scores.isinf(), scores, -scores)


def _change_scores(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Everything is chosen by `change` of its scores, (heads, n)."""

    def changed(select: Callable[..., Any]) -> Callable[..., Any]:
        def by_others(scores: Tensor, *args: Any, **further: Any) -> Any:
            # Further scores may break ties.
            others = {name: None if s is None else change(s) for name, s in further.items()}
            return select(change(scores), *args, **others)

        return by_others

    def changed_blocks(top_blocks: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda sums, **sizes: top_blocks(change(sums[None])[0], **sizes)

    _wrap_choices(monkeypatch, changed, changed_blocks)
    _wrap_retrieval(monkeypatch, change)


def drop_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last tokens go first, where they stay always; so does what is newest in decode."""
    from vllm_kvx.worker.prefill import score_and_move

    def last(scores: Tensor, ends: list[int], windows: list[int]) -> Tensor:
        scores = scores.clone()
        for end, window in zip(ends, windows, strict=True):
            scores[..., end - window : end] = -1.0
        return scores

    def without(select: Callable[..., Any]) -> Callable[..., Any]:
        def no_window(
            scores: Tensor,
            num_keys: Tensor,
            windows: Tensor,
            caps: Tensor,
            offsets: Tensor,
            *args: Any,
            **further: Any,
        ) -> Any:
            ends = (offsets[: len(num_keys)] + num_keys).tolist()
            worst = [
                None if s is None else last(s, ends, windows.tolist())
                for s in (scores, *further.values())
            ]
            return select(
                worst[0],
                num_keys,
                torch.zeros_like(windows),
                caps,
                offsets,
                *args,
                **dict(zip(further, worst[1:], strict=True)),
            )

        return no_window

    def blocks_without(top_blocks: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def no_window(sums: Tensor, *, window: int, **sizes: int) -> Tensor:
            return top_blocks(last(sums, [len(sums)], [window]), window=0, **sizes)

        return no_window

    _wrap_choices(monkeypatch, without, blocks_without)
    _wrap_retrieval(monkeypatch, lambda scores: torch.where(scores.isinf(), -scores, scores))
    # Without moves the first entries stay, in the place of the last.
    monkeypatch.setattr(score_and_move.PassWork, "_moves_of", lambda *_: None)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def _wrap_choices(monkeypatch: pytest.MonkeyPatch, of_keys: Wrapper, of_blocks: Wrapper) -> None:
    """Wraps what chooses tokens and entries, and what chooses blocks."""
    from vllm_kvx.worker.prefill import centrality, score_and_move

    monkeypatch.setattr(score_and_move, "select_kept", of_keys(score_and_move.select_kept))
    monkeypatch.setattr(score_and_move, "select_moves", of_keys(score_and_move.select_moves))
    monkeypatch.setattr(centrality, "select_kept", of_keys(centrality.select_kept))
    monkeypatch.setattr(centrality, "top_blocks", of_blocks(centrality.top_blocks))


def _wrap_retrieval(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """A decode step reads by `change` of its scores, (heads, units)."""
    from vllm_kvx.indexes.table import INDEXES

    def changed(score: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: change(score(*args))

    for index in INDEXES.values():
        monkeypatch.setattr(index, "score_in_torch", changed(index.score_in_torch))


def tile_keys(monkeypatch: pytest.MonkeyPatch, keys: int, splits: int) -> None:
    """Window kernels take so many keys at once, in so many splits at the least and the most."""
    from vllm_kvx.ops.prompt import window_tiles

    monkeypatch.setattr(window_tiles, "_BLOCK_KEYS", {"cpu": keys, "cuda": keys})
    monkeypatch.setattr(window_tiles, "_SPLITS", (splits, splits))


def tile_window_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A tile of the window kernels has so many rows at most."""
    from vllm_kvx.ops.prompt import window_tiles

    monkeypatch.setattr(window_tiles, "_MAX_ROWS", rows)


def tile_metrics(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """The kernel that measures a row takes so many keys at once."""
    from vllm_kvx.ops.prompt import attention_metrics

    monkeypatch.setattr(attention_metrics, "_ROW_BLOCK", keys)


def tile_pool(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """The kernel that pools takes so many keys at once."""
    from vllm_kvx.ops.prompt import pool

    monkeypatch.setattr(pool, "_POOL_BLOCK", {"cpu": keys, "cuda": keys})


def tile_norms(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """The kernel that scores by key norms takes so many keys at once."""
    from vllm_kvx.ops.prompt import key_norms

    monkeypatch.setattr(key_norms, "_BLOCK_KEYS", {"cpu": keys, "cuda": keys})


def tile_value_norms(monkeypatch: pytest.MonkeyPatch, keys: int, out_bytes: int) -> None:
    """The kernel that measures values takes so many keys and bytes of a factor's rows."""
    from vllm_kvx.ops.prompt import value_norms

    monkeypatch.setattr(value_norms, "_BLOCK_KEYS", {"cpu": keys, "cuda": keys})
    monkeypatch.setattr(value_norms, "_BLOCK_OUT_BYTES", out_bytes)


def slice_chosen_rows(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    """Attention of chosen rows in plain torch holds so many scores at once."""
    from vllm_kvx.ops.prompt import chosen_rows

    monkeypatch.setattr(chosen_rows, "_MOST_SCORES", scores)


def bound_metrics_scratch(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[int]:
    """The measured logits may take so many bytes; grows by requests x heads of each launch."""
    from vllm_kvx.ops.prompt import attention_metrics, metrics_scratch

    sizes: list[int] = []
    launch = attention_metrics._rows_metrics

    def counted(turn: Any, queries: Tensor, *rest: Any) -> None:
        sizes.append(queries.shape[0] * queries.shape[2])
        launch(turn, queries, *rest)

    monkeypatch.setattr(attention_metrics, "_rows_metrics", counted)
    monkeypatch.setattr(metrics_scratch, "SCRATCH_BYTES", num_bytes)
    return sizes


def retention_kernels() -> tuple[Any, ...]:
    """The Triton kernels that a retaining prompt launches."""
    from vllm_kvx.ops.prompt import key_norms, move, pool, saliency, select, window_tiles

    return (
        window_tiles.row_sums_kernel,
        saliency._window_sums_kernel,
        key_norms._key_scores_kernel,
        pool._pool_kernel,
        select._select_kernel,
        move._move_kernel,
    )


def find_nvcc() -> str:
    """The compiler that builds the CUDA operators."""
    from vllm_kvx.ops import build

    return build._find_nvcc()


# Start-up and tools.


def ops_problems() -> list[str]:
    """Why the retrieval operators that were asked for cannot be had."""
    from vllm_kvx.server import validate

    return validate._ops_problems()


def block_size_problems(config: Any, group: int, stock: int) -> list[str]:
    """Why blocks cannot be whole groups; the `stock` size is changed so that they are."""
    from vllm_kvx.server import validate

    return validate._block_size_problems(config, group, stock)


def slice_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The dense decoder runs so many rows at once."""
    from vllm_kvx.tools.checkpoint import dense_decoder

    monkeypatch.setattr(dense_decoder, "_SLICE", rows)


def run_in_full(request: Any, why: str) -> None:
    """Has the scheduler run a request under `full`, which it says in the log."""
    from vllm_kvx.cache import scheduler

    scheduler._run_in_full(request, why)


def value_factors(engine: Any) -> list[Tensor]:
    """Of each layer's output projection, (H, D, D) float32, as criticalkv reads it."""
    from vllm_kvx.models.attention import attention_layers, output_projections
    from vllm_kvx.worker.prefill.projections import value_factors as read

    runner = engine.runner
    layers = attention_layers(runner.vllm_config)
    heads, size = layers[0].num_heads, layers[0].head_size
    return [
        read(each, heads, size, runner.dtype).float()
        for each in output_projections(runner.model, layers)
    ]


def draft_from(engine: Any, tokens: int) -> None:
    """The model drafts for itself in steps whose requests have at least so many tokens."""
    from vllm_kvx.worker.self_drafter import _token_bytes

    engine.runner.speculator.least_bytes = tokens * _token_bytes(_state(engine).hooks)


# Who says policies.


def naming(settings: Any, tell: Callable[[str], None], original: Callable[..., Any]) -> Any:
    """What takes the place of ``InputProcessor.process_inputs``, of a server of `settings`."""
    from types import SimpleNamespace

    from vllm_kvx.server.outputs import _naming

    processor = SimpleNamespace(_kvx_settings=settings)
    wrapped = _naming(tell, original)
    return lambda *args, **kwargs: wrapped(processor, *args, **kwargs)
