"""The kernels of prompts, compiled in a thread while vLLM captures its graphs.

Without it the first policy that drops or chooses tokens waits for 10 to 14 seconds at a start with
empty caches. Where the thread fails, or misses a kernel, only time is lost: `warm_up` runs every
policy once, and Triton then compiles what is missing.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.logger import init_logger

from vllm_kvx.ops import radix
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt import chosen_rows
from vllm_kvx.ops.prompt.attention_metrics import window_metrics
from vllm_kvx.ops.prompt.move import move_entries
from vllm_kvx.ops.prompt.select import select_kept, select_moves
from vllm_kvx.ops.triton_precompile import compiling
from vllm_kvx.policy.axes import Retain, ScoreSpec
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.scores.base import KeyScores, ScoredPrompts
from vllm_kvx.scores.table import SCORES
from vllm_kvx.worker.layer_hooks import LayerHook
from vllm_kvx.worker.model_state import PolicyModelState

logger = init_logger("vllm.kvx.worker")

# A start goes on without what is not compiled by then.
_PATIENCE_S = 180
# Of the prompt that stands for all; kernels take lengths from the device, or as they come.
_KEYS = 4096
_KEPT = 512


class PromptKernels:
    """Operators of prompts with the arguments that a server's policies give them.

    Only dtypes, shapes and devices of the arguments count.
    """

    def __init__(
        self, hook: LayerHook, dtype: torch.dtype, max_window: int, device: torch.device
    ) -> None:
        """hook: of a layer that has its cache. dtype: the model's. max_window: W of the server."""
        self._hook, self._dtype, self._device = hook, dtype, device
        self._paged, self._window = hook.paged(), max_window
        self._block_size = self._paged.block_size

    def launch(self, policies: Sequence[KVPolicy], num_layers: int, attends: bool) -> None:
        """Launches all of them.

        attends: whether chosen tokens attend in the layer that chose them.
        """
        for policy in policies:
            propagate, retain = policy.propagate, policy.retain
            by = None if propagate is None else propagate.selects_by
            if by is not None and propagate is not None:
                measures = propagate.online_rule(num_layers) is not None
                rated = self._rate(by, measures)
                self._select(rated, 1, moves=False)
                # A layer that is found as the prompt runs is not split, and who restarts runs none.
                if attends and not measures and not propagate.restarts:
                    self._attend()
                if policy.windows is not None:
                    self._attend_within()
            if retain is not None:
                self._retain(retain)

    def _retain(self, retain: Retain) -> None:
        kept, entries = retain.keeps_by, retain.unit == "entry"
        if isinstance(kept, ScoreSpec):
            rated = self._rate(kept, False)
            if entries:
                self._select(rated, 1 if kept.over_heads else self._paged.num_heads, moves=True)
        if entries:  # Whole blocks are ranked by torch, and stay where they are.
            self._move()

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _query(self, rows: int) -> Tensor:
        impl = self._hook.layer.impl
        return self._new(rows, impl.num_heads, impl.head_size, dtype=self._dtype)

    def _table(self) -> Tensor:
        return self._new(1, -(-_KEYS // self._block_size))

    def _rate(self, spec: ScoreSpec, measures: bool) -> KeyScores:
        prompts = ScoredPrompts(
            block_tables=self._table(),
            num_keys=self._new(1),
            windows=self._new(1),
            kernels=self._new(1),
            caps=self._new(1),
            offsets=self._new(2, dtype=torch.int64),
            max_num_keys=_KEYS,
            total_keys=_KEYS,
            max_window=self._window,
            pools=spec.kernel > 1,
            window_rows=self._new(self._window, dtype=torch.int64),
            early=None,
        )
        query = self._query(max(self._window, 1))
        view = self._hook.view(query, query[None], self._paged)
        if measures:
            window_metrics(
                prompts.window_queries(view),
                self._paged,
                prompts.block_tables,
                prompts.num_keys,
                prompts.windows,
                _KEYS,
                view.scale,
                key_scale=view.key_scale,
                soft_cap=view.soft_cap,
                sinks=view.sinks,
            )
        rated = SCORES[spec.family].score(prompts, view)
        if not spec.over_heads:
            return rated
        first = {name: part[:1] for name, part in rated._asdict().items() if part is not None}
        return SCORES[spec.family].settled(KeyScores(**first), prompts)

    def _select(self, rated: KeyScores, rows: int, moves: bool) -> None:
        """By the one program of a row, and by many, which long prompts take."""
        scores = rated.scores[:rows]
        unpooled = None if rated.unpooled is None else rated.unpooled[:rows]
        sizes = (self._new(1), self._new(1), self._new(1))
        offsets = (self._new(2, dtype=torch.int64), self._new(2, dtype=torch.int64))
        select = select_moves if moves else select_kept
        for splits in (0, radix.splits_of(rows)):
            select(scores, *sizes, *offsets, _KEPT, unpooled=unpooled, splits=splits)

    def _move(self) -> None:
        heads, table = self._paged.num_heads, self._table()
        places = self._new(heads, _KEPT)
        counts, offsets = self._new(heads, 1), self._new(2, dtype=torch.int64)
        move_entries(self._paged, table, places, places, counts, offsets, _KEPT, table)

    def _attend_within(self) -> None:
        """In layers that slide, over the pass's own entries."""
        query, impl = self._query(_KEPT), self._hook.layer.impl
        shape = _KEPT, self._paged.num_heads, impl.head_size
        entries = [self._new(*shape, dtype=self._dtype)[:, :, None] for _ in range(2)]
        view = self._hook.view(query, query[None], self._paged)
        chosen_rows.launch(
            query,
            PagedKV(*entries),
            self._new(_KEPT, dtype=torch.int64),
            self._new(1, _KEPT),
            self._new(3, 4),
            torch.empty_like(query),
            view.scale,
            1.0,
            1.0,
            view.soft_cap,
            view.sinks,
            self._new(_KEPT),
        )

    def _attend(self) -> None:
        query = self._query(_KEPT)
        view = self._hook.view(query, query[None], self._paged)
        chosen_rows.launch(
            query,
            self._paged,
            self._new(_KEPT, dtype=torch.int64),
            self._table(),
            self._new(3, 4),
            torch.empty_like(query),
            view.scale,
            view.key_scale,
            self._hook.value_scale(self._paged),
            view.soft_cap,
            view.sinks,
        )


class CompilesAhead:
    """A thread that compiles; `wait` for it before the kernels are launched.

    names: of the kernels, one for every launch; empty until all are compiled.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        """launch: launches operators, in `compiling`."""
        self._device = device
        self.names: list[str] = []
        self._given_up = False
        self._thread = threading.Thread(
            target=self._run, args=(launch,), name="kvx-compile", daemon=True
        )
        self._thread.start()

    @classmethod
    def of(cls, state: PolicyModelState) -> "CompilesAhead | None":
        """Starts to compile what the worker's policies run; None if Triton compiles nothing there.

        The layers must have their KV caches.
        """
        settings, hooks = state.settings, state.hooks
        window, device = settings.layout.window, state.device
        # One of each dtype, where some layers skip a quantized cache.
        kinds = {hook.layer.kv_cache_dtype: hook for hook in hooks.layers}.values()
        # Without either, the attention backend may have a cache that is not addressed here.
        scores = settings.layout.retain or bool(window)
        if device.type != "cuda" or not (scores or state.retrieval is not None):
            return None
        policies = [policy for policy in settings.policies if not policy.is_full]
        attends = settings.layout.selects and bool(state.cuts.split_layers)
        tables = state.block_tables
        # Nothing may be allocated or copied while graphs are captured: the writer's tensors are
        # made here, and so is the one that torch allocates with a device's first fake tensor.
        writer = None if state.retrieval is None else state.retrieval.sidecars.kernel_writer
        with FakeTensorMode():
            torch.empty(1, device=device)

        def launch() -> None:
            if writer is not None:
                full_groups = torch.empty(1, 3, dtype=torch.int32, device=device)
                writer.write(full_groups, tables.block_table_ptrs, tables.block_table_strides)
            if scores:
                for hook in kinds:
                    kernels = PromptKernels(hook, hooks.dtype, window, device)
                    kernels.launch(policies, settings.num_layers, attends)

        return cls(launch, device)

    def _run(self, launch: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            torch.accelerator.set_device_index(self._device.index or 0)
            with torch.no_grad(), compiling() as compiled:
                launch()
            seconds = time.monotonic() - began
            self.names = compiled.names
            logger.info(
                "Kernels compiled beside the start, or found on disk, in %.1f s: %s.",
                seconds,
                ", ".join(dict.fromkeys(compiled.names)) or "none",
            )
        except Exception:
            logger.warning(
                "Kernels could not be compiled ahead; policies compile them when they first run.",
                exc_info=True,
            )

    def wait(self) -> None:
        """Waits until all is compiled, or has failed, or has taken far too long."""
        self._thread.join(0 if self._given_up else _PATIENCE_S)
        if self._thread.is_alive() and not self._given_up:
            self._given_up = True
            logger.warning(
                "Kernels are still not compiled after %d s more: the start goes on, and policies "
                "compile them when they first run.",
                _PATIENCE_S,
            )
