"""Retrieval of a server: it owns the ops' scratch and the rows that a step's layers read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_kvx.cache.kv_cache_specs import page_shape
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.retrieval.costs import Begins, alone_from, step_costs
from vllm_kvx.ops.retrieval.one_launch import pays
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.policy.axes import Retrieve
from vllm_kvx.policy.layout import RetrievalLayout
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.announce import announce, figures
from vllm_kvx.worker.decode.device_rows import on_device
from vllm_kvx.worker.decode.graph_rows import GraphRows
from vllm_kvx.worker.decode.mixed_step import AttentionGroups, BesideStock
from vllm_kvx.worker.decode.recall import RecallSampler
from vllm_kvx.worker.decode.room import capacity_of, entry_bytes, fits, score_bytes, surely_fits
from vllm_kvx.worker.decode.sidecars import Sidecars
from vllm_kvx.worker.decode.step import (
    HookedLayer,
    HostRows,
    Mode,
    Modes,
    RetrievalPass,
    RetrievalStep,
    Rules,
    graph_for,
    retrieving_lens,
    still_unknown,
)
from vllm_kvx.worker.rows import SegmentRows
from vllm_kvx.worker.timing import PhaseTimer


class Retrieval:
    """Retrieval of a server.

    rules: by request state.
    policy_rows: (max requests,) by request state: its row in the counters.
    crossover: entries from which on retrieval pays for one request on this machine.
    costs: of a layer of a step, which say when it pays for a batch.
    graph_modes: of the CUDA graphs; the last ones fit any step, unless there are only the first.
    max_rows: that retrieve at once.
    graph: the modes whose CUDA graph the running step replays, or which is captured.
    unknown: (max requests,) by request state: tokens drafted in its last step, where the next one
        is planned before it is known whether they stay; else 0.
    """

    def __init__(
        self,
        settings: KVSettings,
        layout: RetrievalLayout,
        layers: Sequence[HookedLayer],
        graph_modes: Sequence[Modes],
        vllm_config: VllmConfig,
        device: torch.device,
        num_policies: int,
        num_layers: int,
    ) -> None:
        """graph_modes: see ``step.graph_modes``. num_policies: rows.

        num_layers: policy layers of the model, of which `layers` are this worker's.
        """
        max_reqs = vllm_config.scheduler_config.max_num_seqs
        impl, model = layers[0].layer.impl, vllm_config.model_config
        dtype = cast(torch.dtype, model.dtype)
        self.layout, self.graph_modes = layout, tuple(graph_modes)
        self._device = device
        num_stages, self._stages = len(self.graph_modes[0]), [layer.stage for layer in layers]
        budgets, least, floors = np.zeros((3, max_reqs), dtype=np.int64)
        self.rules = Rules(budgets, least, floors, layout.unit)
        self.policy_rows, self.unknown = np.zeros((2, max_reqs), dtype=np.int64)
        self.drafts_ahead = settings.layout.drafts_ahead
        self.graph_rows = GraphRows(layout, num_stages, vllm_config, device)
        drafts, rule = vllm_config.num_speculative_tokens, layout.retrieving
        # Where layers read by another's choice, those of all rows that decode at once are kept.
        self.max_rows = self.graph_rows.max_rows if rule.reuse == 1 else max_reqs * (1 + drafts)
        self.above = [layer for layer in layers if rule.retrieves(layer.index)]
        self.beside_stock = BesideStock(self.above, num_stages, max_reqs, vllm_config, device)
        index = INDEXES[layout.index]
        self.scratch = Scratch.of(
            index,
            num_heads=impl.num_heads,
            kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            max_rows=self.max_rows,
            capacity=capacity_of(
                max_reqs,
                model.max_model_len,
                layout.unit,
                impl.num_kv_heads,
                score_bytes(device),
                drafts,
                at_once=rule.reuse > 1,
            ),
            max_units=layout.max_units,
            unit=layout.unit,
            reduction=layout.reduction,
            device=device,
            dtype=dtype,
            # Not where other layers read what one chose.
            one_launch=rule.reuse == 1 and all(pays(e.layer, dtype) for e in self.above or layers),
        )
        self.backends = self.scratch.backends
        machine = (self.backends.score, layout.reduction, impl.num_kv_heads, entry_bytes(layers))
        first, states = layers[0].index, model.is_hybrid
        share, invariant = rule.share_that_chooses(num_layers), envs.VLLM_BATCH_INVARIANT
        self.crossover = alone_from(*machine, keeps_state=states, choosing=share)
        captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
        few = self.scratch.rows_in_one(model.max_model_len, captured)
        self.costs = step_costs(*machine, states, invariant, share, few_rows=few)
        # Where only policies of `kv_layout` retrieve, the one that needs the longest contexts.
        self.policy = settings.policy.retrieve or layout.largest
        # By place.
        self._chooses = [rule.chooses(layer.index, first) for layer in layers]
        own = self.policy
        lengths = own.floor(self.crossover), own.floor(0), own.budget
        self.begins = Begins.of(*lengths, self.costs, max_reqs)
        announce(self.policy, self.begins, self.backends, model.max_model_len)
        in_torch, loads = self.backends.score == "torch", vllm_config.kv_transfer_config is not None
        self.sidecars = Sidecars(index, layers, max_reqs, in_torch, loads, device)
        self.sampler = RecallSampler(settings.recall_every, device, num_policies)
        self.graph: Modes = (Mode.DENSE,) * num_stages

    def bind(self, spec: AttentionSpec, block_tables: BlockTables) -> None:
        """vLLM has allocated a KV cache, its pages as in `spec`."""
        self.sidecars.bind(page_shape(spec, self.layout), block_tables)
        self.beside_stock.bind()

    def add_request(self, req_index: int, policy: Retrieve | None, row: int) -> None:
        """policy: what the request retrieves by, or None. row: its policy's in the counters."""
        self.policy_rows[req_index], self.unknown[req_index] = row, 0
        rules = self.rules
        rules.budgets[req_index] = policy.budget_units if policy is not None else 0
        rules.least[req_index] = policy.floor(0) if policy is not None else 0
        rules.floors[req_index] = policy.floor(self.crossover) if policy is not None else 0
        self.sidecars.add_request(req_index)

    @property
    def kept_buffers(self) -> list[Tensor]:
        """Device memory that has to outlive vLLM's sleep: see ``SleepingBuffers``."""
        return [
            *self.graph_rows.buffers,
            self.beside_stock.lens,
            self.sampler.mass,
            *self.scratch.zeroed,
        ]

    def needs_python(
        self,
        requests: np.ndarray,
        begins: IntArray,
        counts: IntArray,
        prompt_lens: IntArray,
        stored_lens: Callable[[], IntArray],
    ) -> bool:
        """Whether a decode step cannot replay a graph: scores do not fit, recall is measured, or a
        request that resumes may read what this very step computes. See `plan`.

        stored_lens: those of `plan`, which most steps do not ask for.
        """
        may = self.rules.budgets[requests] > 0
        if not may.any():
            return False
        if (self.sidecars.is_fresh(requests) & may).any():
            return True
        if (counts > 1).any():
            if (counts != counts[0]).any():
                return False  # vLLM replays graphs of requests with as many tokens each alone.
            none = np.zeros_like(may)
            unknown = still_unknown(self.unknown[requests], begins, prompt_lens)
            step = self._step(requests, unknown, begins, counts, prompt_lens, stored_lens(), none)
            return bool(step.some.any()) and not self._replays(step.each_row[1])
        ends, replays = begins + counts, len(self.graph_modes) > 1
        if (
            surely_fits(ends, self.layout.unit, self.scratch.capacity)
            and not self.sampler.is_due
            and replays
        ):
            return False
        lens = self.lens_of(requests, ends, prompt_lens, stored_lens())
        return bool(lens.any()) and not self._replays(lens)

    def _step(self, requests: np.ndarray, *of_step: Any) -> RetrievalStep:
        return RetrievalStep.of(self.rules.of(requests), self.costs, *of_step)

    def _replays(self, lens: IntArray) -> bool:
        """Whether a step some of whose (S, N) rows retrieve may replay a graph."""
        if self.sampler.is_due or len(self.graph_modes) == 1:
            return False
        return lens.shape[1] <= self.graph_rows.max_rows and self.fits(lens)

    def lens_of(
        self, requests: np.ndarray, ends: IntArray, prompt_lens: IntArray, stored_lens: IntArray
    ) -> IntArray:
        """(S, R) entries that each request's last token sees, 0 where it does not retrieve.

        Args:
            requests: (R,) request states. ends, prompt_lens: (R,) logical lengths.
            stored_lens: (S, R) entries seen by each request's last token.
        """
        rules = self.rules.of(requests)
        generates = (ends > prompt_lens) & (rules.budgets > 0)
        return retrieving_lens(rules, self.costs.of(len(requests)), generates, stored_lens)

    def fits(self, lens: IntArray) -> bool:
        """Whether scores of (S, R) rows have room at once, stage by stage."""
        return fits(lens, self.layout.unit, self.scratch.capacity)

    def plan(
        self,
        requests: np.ndarray,
        begins: IntArray,
        counts: IntArray,
        prompt_lens: IntArray,
        stored_lens: IntArray,
        is_fresh: np.ndarray | None,
        unknown: IntArray,
        drafts: np.ndarray | None,
    ) -> RetrievalStep:
        """Plans which rows of a real step retrieve.

        Args:
            requests: (R,) request states. begins, counts: (R,) tokens. prompt_lens: (R,).
            stored_lens: (S, R) entries seen by each request's last token.
            is_fresh: (R,) bool, requests that have run no step yet; None if all have. unknown: see
                ``RetrievalStep``.
            drafts: (R,) tokens among `counts` that were drafted; None for none.
        """
        step = self._step(requests, unknown, begins, counts, prompt_lens, stored_lens, is_fresh)
        if self.drafts_ahead:
            self.unknown[requests] = 0 if drafts is None else drafts
        if self.sampler.takes_step(bool(step.some.any())):
            step.sampled = self.policy_rows[requests]
        if step.chunks and step.some.any():
            several = np.array(step.chunks)
            step.filled = self.sidecars.groups_of_decodes(
                requests[several], step.sees[:, several], (step.counts + step.unknown)[several]
            )
        return step

    def graph_pass(
        self,
        step: RetrievalStep | None,
        size: tuple[int, int],
        block_tables: Sequence[Tensor],
        keeps: bool = False,
        late: Tensor | None = None,
    ) -> RetrievalPass | None:
        """The pass of a CUDA graph; sets `graph`, and writes what the graph reads.

        Args:
            step: None while `graph` is captured: its rows do nothing.
            size: the graph's rows and requests.
            keeps: whether the graph keeps queries; those that do fit any step.
            late: (R,) int32, how many of the tokens that `step` counts were rejected; None where
                they are known.
        """
        if step is not None:
            modes = self.graph_modes[-1:] if keeps else self.graph_modes
            self.graph = graph_for(modes, step.modes)
        if all(mode is Mode.DENSE for mode in self.graph):
            return None
        assert step is None or self.fits(step.each_row[1]), "rows of a CUDA graph do not fit"
        (num_rows, num_reqs), graphs = size, self.graph_rows
        graphs.set(step, num_rows, num_reqs, late)
        batches, groups = graphs.batches(num_rows), graphs.full_groups(num_reqs)
        return RetrievalPass(self.graph, batches, block_tables, full_groups=groups)

    def eager_pass(
        self,
        step: RetrievalStep,
        counts: IntArray,
        plan: Sequence[SegmentRows | None],
        ends: IntArray,
        prompt_lens: IntArray,
        gaps: tuple[IntArray, IntArray],
        block_tables: Sequence[Tensor],
        split_layers: Mapping[int, SegmentRows | None],
        late: Tensor | None = None,
    ) -> RetrievalPass | None:
        """The pass of a step that runs in Python.

        Args:
            counts: (R,) scheduled tokens; plan: by stage, the rows that it runs, if not all.
            ends, prompt_lens: (R,) logical lengths. gaps: (S, R) starts and sizes.
            split_layers: by layer that is split, the rows that it runs, if not all.
            late: see `graph_pass`.
        """
        modes = step.modes
        if all(mode is Mode.DENSE for mode in modes):
            return None

        def batches_of(stage: int, rows: SegmentRows | None) -> list[RetrievalRows]:
            run, gap = counts if rows is None else rows.counts, (gaps[0][stage], gaps[1][stage])
            found = step.rows(stage, run, ends - counts, ends, prompt_lens, gap)
            floors = None if late is None else step.floors_of(found.requests, found.lens)
            return self.on_device(found, step.budgets, late, floors)

        return RetrievalPass(
            modes,
            [batches_of(stage, rows) for stage, rows in enumerate(plan)],
            block_tables,
            bool(step.chunks),
            step.sampled,
            {layer: batches_of(self._stages[layer], rows) for layer, rows in split_layers.items()},
            most_chosen=self.max_rows if self.layout.retrieving.reuse > 1 else 0,
        )

    def on_device(
        self,
        rows: HostRows,
        budgets: IntArray,
        late: Tensor | None = None,
        floors: IntArray | None = None,
    ) -> list[RetrievalRows]:
        """A stage's rows in batches whose scores fit; see ``device_rows.on_device``."""
        batches = rows.batches(self.layout.unit, self.scratch.capacity, self.max_rows)
        return on_device(batches, budgets, self.layout.unit, self._device, late, floors)

    def stock_batch(
        self,
        step: RetrievalStep | None,
        stage: int,
        batch: InputBatch,
        attn_groups: AttentionGroups,
        all_groups: AttentionGroups,
    ) -> tuple[InputBatch, AttentionGroups]:
        """A stage's batch with the rows that retrieve cut to one entry, for stock attention, and
        the attention groups of its retrieving layers.

        Args:
            batch: lengths as stored.
            attn_groups: by KV group, the stage's; all_groups: the model's.
        """
        return self.beside_stock.batch(step, stage, batch, attn_groups, all_groups)

    def stats(self) -> dict[str, Any]:
        """JSON-able figures of this rank."""
        return figures(self.policy, self.begins, self.backends, self.crossover) | {
            "seconds_in_sidecar_writes": self.sidecars.timer.seconds,
            "recall": self.sampler.recall,
            "recall_samples": int(self.sampler.samples.sum()),
        }

    def reset_counters(self) -> None:
        """Measures recall and the time of sidecar writes anew."""
        self.sampler.reset()
        self.sidecars.timer = PhaseTimer(self._device)

    def run(self, now: RetrievalPass, hook: HookedLayer, query: Tensor, out: Tensor) -> None:
        """Attends for one layer's rows that retrieve; query (N, H, D), and out of that size."""
        layer = hook.layer
        out = out.view(out.shape[0], *query.shape[1:])
        paged, sidecar = self.sidecars.view(hook.place)
        scales = dict(key_scale=hook.key_scale(paged), value_scale=hook.value_scale(paged))
        if now.full_groups is not None:
            self.sidecars.write_groups(now.full_groups, hook.place)
        elif now.writes:
            self.sidecars.write(hook.place)
        table, batches = now.block_tables[hook.group], now.rows_of(hook)
        are_kept = now.are_kept(batches)
        chosen = are_kept and not self._chooses[hook.place]
        whole = self.scratch if now.sampled is None else self.scratch.that_chooses
        begin = 0
        for rows in batches:
            scratch = whole.from_row(begin) if are_kept and begin else whole
            begin += len(rows.lens)
            retrieve(
                query,
                paged,
                sidecar,
                table,
                rows,
                scratch,
                out,
                scale=layer.impl.scale,
                soft_cap=hook.soft_cap,
                sinks=hook.sinks,
                chosen=chosen,
                **scales,
            )
            if now.sampled is not None:
                scale = layer.impl.scale * scales["key_scale"]
                self.sampler.measure(
                    query, paged, table, rows, scratch, scale, now.sampled, hook.soft_cap
                )
