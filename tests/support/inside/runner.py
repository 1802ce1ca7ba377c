"""The worker's side: its state, the model's passes and rows, what lies in its blocks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def as_rank(first: int, total: int) -> Iterator[None]:
    """What is made meanwhile has layers of a model with `total`, from number `first` on."""
    from vllm_kvx.worker import stages
    from vllm_kvx.worker.pipeline import RankLayers

    stock = stages.layers_of_rank
    stages.layers_of_rank = lambda *_: RankLayers(first, total)
    try:
        yield
    finally:
        stages.layers_of_rank = stock


def model_state(engine: Any) -> Any:
    """The worker's model state; a stock one has nothing of ours."""
    return engine.runner.model_state


def _centrality(engine: Any) -> Any:
    """Scores summed over layers, of prompts that are coming in."""
    return model_state(engine).memory.centrality


def assert_worker_forgot(engine: Any, windows: int) -> None:
    """No prompt, slot of a window (of `windows`) or stashed token is held by the worker."""
    state = getattr(engine.runner, "model_state", None)
    if hasattr(state, "requests"):
        assert not state.requests.prompts and not state.requests.index
        assert len(state.requests.free_windows) == windows
        assert state.stash is None or state.stash.used_tokens == 0


def assert_no_prompt(engine: Any) -> None:
    """The worker of a server with a stash holds no prompt and no stashed token."""
    state = model_state(engine)
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
    gather(model_state(engine))
    for tensor in [*found.values(), *engine.runner.model.parameters()]:
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
    return len(found)


def profiled_scratch(engine: Any) -> int:
    """The most bytes that a layer's hook takes at once while vLLM profiles memory.

    Layers are as they were before vLLM formed its KV groups, which comes after profiling.
    """
    hooks, runner = model_state(engine).hooks, engine.runner
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
    return model_state(engine).hooked.compiled_ranges is not None


def limit_pass(engine: Any, tokens: int) -> None:
    """Passes of selected tokens run so many at most."""
    model_state(engine).passes.max_tokens = tokens


def watch_passes(engine: Any) -> list[int]:
    """Grows by the number of passes of selected tokens with every forward pass."""
    counts: list[int] = []
    state = model_state(engine)
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
    hook = model_state(engine).hooks.layers[layer]
    paged = hook.paged()
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[hook.group]
    blocks = torch.tensor([block.block_id for block in manager.req_to_blocks[request_id]])
    slots = torch.arange(count)
    index = blocks[slots // paged.block_size], slice(None), slots % paged.block_size
    return paged.keys[index].transpose(0, 1), paged.values[index].transpose(0, 1)


def is_stock(engine: Any) -> bool:
    """Whether scheduler and model are vLLM's own Llama."""
    stock_scheduler = type(engine.scheduler).__module__.startswith("vllm.")
    return stock_scheduler and type(engine.runner.model).__name__ == "LlamaForCausalLM"


class Decoders:
    """The two decoders of a model with a cutoff: what a forward pass runs, and with which plan."""

    def __init__(self, engine: Any) -> None:
        self._model = engine.runner.model
        self._config = engine.llm.llm_engine.vllm_config
        self._cutoff = model_state(engine).passes.segments[0][1]

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


def poison_free_blocks(engine: Any) -> None:
    """From now on, blocks are overwritten once nobody holds them and nobody may read them.

    After the schedule that finds them so: writing all idle blocks in every step takes longer than
    the step.
    """
    schedule, pool = engine.scheduler.schedule, engine.pool
    overwritten: set[int] = set()

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        idle = {b.block_id for b in pool.blocks if not (b.ref_cnt or b.block_hash or b.is_null)}
        if found := list(idle - overwritten):
            for hook in model_state(engine).hooks.layers:
                hook.layer.kv_cache[found] = 1e4
        overwritten.clear()
        overwritten.update(idle)
        return output

    engine.scheduler.schedule = poisoned


def fill_free_blocks(engine: Any, byte: int) -> None:
    """Overwrites every byte of all free blocks of an idle engine with an 8-bit KV cache.

    Of what lies beside the entries, scales are overwritten: by NaN.
    """
    free = [b.block_id for b in engine.pool.blocks if not (b.ref_cnt or b.is_null)]
    for hook in model_state(engine).hooks.layers:
        hook.layer.kv_cache.view(torch.uint8)[free] = byte
        paged = hook.paged()
        for scales in (paged.key_scales, paged.value_scales):
            if scales is not None:
                scales[free] = torch.nan


def cache_dtypes(engine: Any) -> list[torch.dtype]:
    """Of each policy layer's KV cache, as vLLM has allocated it."""
    return [hook.layer.kv_cache.dtype for hook in engine.runner.model_state.hooks.layers]


def set_cache_scales(engine: Any, key: float, value: float) -> None:
    """The scales that a checkpoint may bring for an fp8 cache, in every policy layer."""
    for hook in engine.runner.model_state.hooks.layers:
        hook.layer._k_scale_float, hook.layer._v_scale_float = key, value


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
