"""Retrieval in a step: which rows read selected entries only, and what runs beside them.

Planned on the host from lengths alone. A decode step replays one of three CUDA graphs: nobody
retrieves; everybody does, and stock attention is left out of the layers that do; or some do, and
stock attention runs over all rows, those that retrieve cut to one entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvx.cache.kv_cache_specs import sidecar_layout
from vllm_kvx.ops.retrieval.backends import NEVER
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows, pack, room_of
from vllm_kvx.policy import storage as accounting
from vllm_kvx.policy.axes import DENSE_LAYERS, Retrieve
from vllm_kvx.policy.layout import RetrievalLayout
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.recall import RecallSampler
from vllm_kvx.worker.decode.sidecars import Sidecars
from vllm_kvx.worker.rows import SegmentRows

logger = init_logger("vllm.kvx.retrieval")

# Scores are allocated before vLLM sizes the KV pool: in this share of the device's memory, some
# times what one score for every entry of the pool takes (rows that share a prompt have scores of
# their own), and never in more than the second.
SCORE_SHARE = 1 / 1024
MAX_SCORE_BYTES = 256 << 20


class Mode(Enum):
    """What a segment's layers run above the dense ones: stock attention, retrieval, or both."""

    DENSE = "dense"
    ALL = "all"
    MIXED = "mixed"


Modes = tuple[Mode, ...]


@dataclass
class RetrievalPass:
    """What the running pass does, in every segment.

    Attributes:
        modes: by segment.
        batches: by segment, rows in batches whose scores fit.
        block_tables: by KV group, (B, max_blocks) int32.
        writes: groups are quantised beside each layer, as rows of this very pass read them.
        sampled: recall is measured.
    """

    modes: Modes
    batches: Sequence[Sequence[RetrievalRows]]
    block_tables: Sequence[Tensor]
    writes: bool = False
    sampled: bool = False


@dataclass
class RetrievalStep:
    """A real step on the host.

    Attributes:
        lens: (S, R) entries that each request's only row sees, 0 where it does not retrieve.
        chunks: requests, by batch index, several of whose generated tokens run at once.
        budgets, floors: (R,) units to read, and from how many entries on.
        sampled: see ``RetrievalPass``.
    """

    lens: IntArray
    chunks: list[int]
    budgets: IntArray
    floors: IntArray
    sampled: bool

    @property
    def modes(self) -> Modes:
        if self.chunks:
            return (Mode.MIXED,) * len(self.lens)
        return tuple(
            Mode.DENSE if not lens.any() else Mode.ALL if lens.all() else Mode.MIXED
            for lens in self.lens
        )


class Retrieval:
    """Retrieval of a server: its scratch and the rows of the running step."""

    def __init__(
        self,
        layout: RetrievalLayout,
        layers: Sequence[Any],
        graph_modes: Sequence[Modes],
        vllm_config: VllmConfig,
        recall_every: int,
        device: torch.device,
    ) -> None:
        """layers: ``taps.LayerTap``. graph_modes: those of the CUDA graphs, most special first."""
        max_reqs = vllm_config.scheduler_config.max_num_seqs
        impl, model = layers[0].layer.impl, vllm_config.model_config
        self.layout, self.layers, self.graph_modes = layout, layers, tuple(graph_modes)
        self.max_num_reqs, self._device = max_reqs, device
        self._vllm_config = vllm_config
        num_segments = len(self.graph_modes[0])
        # By request state.
        self.budgets = np.zeros(max_reqs, dtype=np.int64)
        self.floors = np.zeros(max_reqs, dtype=np.int64)
        # Rows of a CUDA graph, by segment, at fixed addresses.
        self._fields = torch.zeros(num_segments, 4, max_reqs, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(num_segments, max_reqs, dtype=torch.int64, device=device)
        # What stock attention sees of a row, where it shares a step with retrieval.
        self.stock_lens = torch.zeros(num_segments, max_reqs, dtype=torch.int32, device=device)
        self.scratch = Scratch.of(
            num_heads=impl.num_heads,
            kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            max_rows=max_reqs,
            capacity=capacity_of(
                max_reqs,
                model.max_model_len,
                layout.unit,
                impl.num_kv_heads,
                score_bytes(device),
            ),
            max_units=layout.max_units,
            unit=layout.unit,
            reduction=layout.reduction,
            device=device,
            dtype=cast(torch.dtype, model.dtype),
        )
        self.backends = self.scratch.backends
        logger.info("Ops of retrieval: %s (%s)", self.backends, self.backends.reason)
        dtype = layers[0].layer.kv_cache_torch_dtype
        entry_bytes = impl.num_kv_heads * 2 * impl.head_size * dtype.itemsize
        self.crossover = self.backends.crossover_for(entry_bytes)
        if self.crossover >= model.max_model_len:
            pays = f"from {self.crossover} tokens on" if self.crossover < NEVER else "at no length"
            build = (
                ", CUDA ops pay earlier than Triton ones (`python -m vllm_kvx.ops.build`)"
                if self.backends.score == "triton"
                else ""
            )
            logger.warning(
                "Policies with dense_below=auto read every context of this server whole: with "
                "these ops retrieval pays %s%s, and max_model_len is %d. To retrieve all the same, "
                "set dense_below=<tokens> in the policy",
                pays,
                build,
                model.max_model_len,
            )
        self.sidecars = Sidecars(layers, max_reqs, self.backends.score == "torch", device)
        self.sampler = RecallSampler(recall_every, device)
        # The modes whose graph the running step replays, or is captured.
        self.graph: Modes = (Mode.DENSE,) * num_segments
        self._stock_groups: list[list[AttentionGroup]] | None = None

    def bind(self, spec: AttentionSpec, block_tables: BlockTables) -> None:
        """vLLM has allocated a KV cache, its pages as in `spec`."""
        self.sidecars.bind(sidecar_layout(spec, self.layout), block_tables)
        self._stock_groups = None

    def add_request(self, req_index: int, policy: Retrieve | None) -> None:
        """policy: what the request retrieves by, or None."""
        self.budgets[req_index] = policy.budget_units if policy is not None else 0
        self.floors[req_index] = policy.floor(self.crossover) if policy is not None else 0
        self.sidecars.add_request(req_index)

    def needs_python(
        self, requests: np.ndarray, ends: IntArray, prompt_lens: IntArray, stored_lens: IntArray
    ) -> bool:
        """Whether a decode step cannot replay a graph: scores do not fit, recall is measured, or a
        request that resumes may read what this very step computes.

        Args: see ``lens_of``.
        """
        may = self.budgets[requests] > 0
        if not may.any():
            return False
        if (self.sidecars.is_fresh(requests) & may).any():
            return True
        lens = self.lens_of(requests, ends, prompt_lens, stored_lens)
        return not self._fits(lens) or (self.sampler.is_due and bool(lens.any()))

    def lens_of(
        self, requests: np.ndarray, ends: IntArray, prompt_lens: IntArray, stored_lens: IntArray
    ) -> IntArray:
        """(S, R) entries that each request's last token sees, 0 where it does not retrieve.

        Args:
            requests: (R,) request states. ends, prompt_lens: (R,) logical lengths.
            stored_lens: (S, R) entries seen by each request's last token.
        """
        generates = (ends > prompt_lens) & (self.budgets[requests] > 0)
        return np.where(generates & (stored_lens >= self.floors[requests]), stored_lens, 0)

    def _fits(self, lens: IntArray) -> bool:
        """Whether the scores of (S, R) entries have room at once, segment by segment."""
        room = room_of(lens, self.layout.unit).sum(axis=1)
        return bool((room <= self.scratch.capacity).all())

    def plan(
        self,
        requests: np.ndarray,
        begins: IntArray,
        counts: IntArray,
        prompt_lens: IntArray,
        stored_lens: IntArray,
        is_fresh: np.ndarray,
    ) -> RetrievalStep:
        """A real step.

        Args:
            requests: (R,) request states. begins, counts: (R,) tokens. prompt_lens: (R,).
            stored_lens: (S, R) entries seen by each request's last token.
            is_fresh: (R,) bool, requests that have run no step yet.
        """
        budgets, floors = self.budgets[requests], self.floors[requests]
        ends = begins + counts
        lens = self.lens_of(requests, ends, prompt_lens, stored_lens)
        # One that resumes may read, of a prefix, what another request computes in this step.
        several = (ends > prompt_lens) & (budgets > 0) & ((counts > 1) | is_fresh)
        lens[:, several] = 0
        sampled = self.sampler.takes_step(bool(lens.any()))
        return RetrievalStep(lens, np.flatnonzero(several).tolist(), budgets, floors, sampled)

    def graph_pass(
        self, step: RetrievalStep | None, num_reqs: int, block_tables: Sequence[Tensor]
    ) -> RetrievalPass | None:
        """The pass of a CUDA graph: `graph` is set, and the rows that it reads are written.

        step: None captures the graph that `graph` says; its rows do nothing.
        """
        num_segments = len(self.graph)
        fields = np.zeros((num_segments, 4, num_reqs), dtype=np.int32)
        offsets = np.zeros((num_segments, num_reqs), dtype=np.int64)
        if step is not None:
            wanted = step.modes
            assert self._fits(step.lens), "scores of a CUDA graph do not fit"
            covered = [m for m in self.graph_modes if _covers(m, wanted)]
            self.graph = covered[0]
            index = np.arange(step.lens.shape[1])
            for segment, lens in enumerate(step.lens):
                fields[segment, :, : len(index)], offsets[segment, : len(index)] = pack(
                    index, index, lens, step.budgets, self.layout.unit
                )
        if all(mode is Mode.DENSE for mode in self.graph):
            return None
        self._fields[:, :, :num_reqs].copy_(async_tensor_h2d(fields, device=self._device))
        self._offsets[:, :num_reqs].copy_(async_tensor_h2d(offsets, device=self._device))
        batches = [
            [RetrievalRows.of_fields(f, o).first(num_reqs)]
            for f, o in zip(self._fields, self._offsets, strict=True)
        ]
        return RetrievalPass(self.graph, batches, block_tables)

    def eager_pass(
        self,
        step: RetrievalStep,
        counts: IntArray,
        plan: Sequence[SegmentRows | None],
        ends: IntArray,
        prompt_lens: IntArray,
        gaps: tuple[IntArray, IntArray],
        block_tables: Sequence[Tensor],
    ) -> RetrievalPass | None:
        """The pass of a step that runs in Python.

        Args:
            counts: (R,) scheduled tokens; plan: by segment, the rows that it runs, if not all.
            ends, prompt_lens: (R,) logical lengths. gaps: (S, R) starts and sizes.
        """
        modes = step.modes
        if all(mode is Mode.DENSE for mode in modes):
            return None
        batches = [
            self._batches(
                step,
                lens,
                counts if rows is None else rows.counts,
                ends - counts,
                ends,
                prompt_lens,
                (starts, sizes),
            )
            for lens, rows, starts, sizes in zip(step.lens, plan, *gaps, strict=True)
        ]
        return RetrievalPass(modes, batches, block_tables, bool(step.chunks), step.sampled)

    def _batches(
        self,
        step: RetrievalStep,
        row_lens: IntArray,
        run: IntArray,
        begins: IntArray,
        ends: IntArray,
        prompt_lens: IntArray,
        gaps: tuple[IntArray, IntArray],
    ) -> list[RetrievalRows]:
        """One segment's rows. run: (R,) rows that it runs of each request, the last ones."""
        row_ends = np.cumsum(run)
        requests = np.flatnonzero(row_lens)
        tokens, lens = row_ends[requests] - 1, row_lens[requests]
        for i in step.chunks:
            length = np.arange(max(begins[i], prompt_lens[i]), ends[i]) + 1
            seen = accounting.stored_lens(length, gaps[0][i], gaps[1][i])
            retrieves = seen >= step.floors[i]
            tokens = np.append(tokens, (row_ends[i] - 1 - (ends[i] - length))[retrieves])
            lens = np.append(lens, seen[retrieves])
            requests = np.append(requests, np.full(int(retrieves.sum()), i))
        batches, begin = [], 0
        room = np.cumsum(room_of(lens, self.layout.unit))
        while begin < len(lens):
            before = room[begin - 1] if begin else 0
            end = int(np.searchsorted(room, before + self.scratch.capacity, side="right"))
            part = slice(begin, min(end, begin + self.max_num_reqs))
            index = requests[part]
            batches.append(
                RetrievalRows.of(
                    tokens[part],
                    index,
                    lens[part],
                    step.budgets[index],
                    self.layout.unit,
                    self._device,
                )
            )
            begin = part.stop
        return batches

    def stock_batch(
        self,
        step: RetrievalStep | None,
        segment: int,
        batch: InputBatch,
        attn_groups: list[list[AttentionGroup]],
        all_groups: list[list[AttentionGroup]],
    ) -> tuple[InputBatch, list[list[AttentionGroup]]]:
        """A segment's batch with the rows that retrieve cut to one entry, for stock attention, and
        the attention groups of its retrieving layers.

        Args:
            batch: lengths as stored.
            attn_groups: by KV group, the segment's; all_groups: the model's.
        """
        groups = [
            theirs if mine else []
            for theirs, mine in zip(self.own_groups(all_groups), attn_groups, strict=True)
        ]
        num_reqs = batch.num_reqs_after_padding
        lens = self.stock_lens[segment, :num_reqs]
        bounds = batch.seq_lens_cpu_upper_bound
        if step is None:
            lens.copy_(batch.seq_lens[:num_reqs])
        else:
            cut = np.zeros(num_reqs, dtype=bool)
            cut[: step.lens.shape[1]] = step.lens[segment] > 0
            mask = async_tensor_h2d(cut, device=self._device)
            lens.copy_(torch.where(mask, 1, batch.seq_lens[:num_reqs]))
            assert bounds is not None
            bounds = torch.where(torch.from_numpy(cut), 1, bounds[:num_reqs])
        return replace(batch, seq_lens=lens, seq_lens_cpu_upper_bound=bounds), groups

    def own_groups(self, attn_groups: list[list[AttentionGroup]]) -> list[list[AttentionGroup]]:
        """Attention groups of the retrieving layers, with builders of their own: a builder keeps
        the metadata of one batch. By KV group, as `attn_groups`, all of the model's."""
        if self._stock_groups is None:
            dense = {tap.layer.layer_name for tap in self.layers[:DENSE_LAYERS]}
            self._stock_groups = []
            for groups in attn_groups:
                self._stock_groups.append([])
                for group in groups:
                    names = [name for name in group.layer_names if name not in dense]
                    own = AttentionGroup(
                        group.backend, names, group.kv_cache_spec, group.kv_cache_group_id
                    )
                    own.create_metadata_builders(
                        self._vllm_config, self._device, group.kv_cache_spec.block_size
                    )
                    self._stock_groups[-1].append(own)
        return self._stock_groups

    def stats(self) -> dict[str, Any]:
        """JSON-able figures of this rank."""
        return {
            "ops": str(self.backends),
            "seconds_in_sidecar_writes": self.sidecars.timer.seconds,
            "recall": self.sampler.recall,
            "recall_samples": self.sampler.samples,
        }

    def run(self, now: RetrievalPass, tap: Any, query: Tensor, out: Tensor) -> None:
        """One layer: rows of `query` that retrieve, into their rows of `out`, (N, H, D) both.

        tap: the layer's ``taps.LayerTap``.
        """
        layer = tap.layer
        out = out.view(out.shape[0], *query.shape[1:])
        paged, sidecar = self.sidecars.view(tap.index)
        is_fp8 = paged.keys.dtype.itemsize == 1
        scales = dict(
            key_scale=layer._k_scale_float if is_fp8 else 1.0,
            value_scale=layer._v_scale_float if is_fp8 else 1.0,
        )
        if now.writes:
            self.sidecars.write(tap.index)
        table = now.block_tables[tap.group]
        for rows in now.batches[tap.stage]:
            retrieve(
                query,
                paged,
                sidecar,
                table,
                rows,
                self.scratch,
                out,
                scale=layer.impl.scale,
                **scales,
            )
            if now.sampled:
                scale = layer.impl.scale * scales["key_scale"]
                self.sampler.measure(query, paged, table, rows, self.scratch, scale)


def graph_modes(policy: KVPolicy, segment_starts: Sequence[int]) -> tuple[Modes, ...]:
    """The CUDA graphs that a server captures, most special first; the last one fits any step.

    The second is for long contexts under the server's own policy: SPEED's upper layers hold too
    few entries to choose from.
    """
    dense = (Mode.DENSE,) * len(segment_starts)
    long = tuple(
        Mode.DENSE
        if accounting.gap_of(policy, 1 << 30, start).size
        else Mode.ALL
        for start in segment_starts
    )
    return dense, long, (Mode.MIXED,) * len(segment_starts)


def _covers(graph: Modes, wanted: Modes) -> bool:
    return all(g is w or g is Mode.MIXED for g, w in zip(graph, wanted, strict=True))


def score_bytes(device: torch.device) -> int:
    """Memory for scores on `device`."""
    if device.type == "cpu":
        return MAX_SCORE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return min(int(total * SCORE_SHARE), MAX_SCORE_BYTES)


def capacity_of(
    max_num_reqs: int, max_model_len: int, unit: int, kv_heads: int, num_bytes: int
) -> int:
    """Units that scores have room for: all there can be, or what tokens fit into the memory, but
    two of the longest in any case. A multiple of four, as ``room_of``.
    """
    longest = int(room_of(np.array([max_model_len]), unit)[0])
    tokens = num_bytes // (4 * kv_heads)
    return min(max_num_reqs * longest, max(2 * longest, tokens // unit // 4 * 4))
