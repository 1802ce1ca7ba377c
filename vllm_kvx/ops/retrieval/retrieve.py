"""Retrieval in one layer: score, select, attend; in CUDA where built, else in Triton.

On a CPU plain torch runs instead: Triton's interpreter takes seconds for a context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.attend import ATTEND_PROGRAMS, MAX_SPLITS, attend
from vllm_kvx.ops.retrieval.backends import Backends, choose_backend
from vllm_kvx.ops.retrieval.in_torch import retrieve_in_torch
from vllm_kvx.ops.retrieval.one_launch import OneLaunch, does, rows_in_graphs
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.score import SCORE_PROGRAMS
from vllm_kvx.ops.retrieval.scorer import Scorer
from vllm_kvx.ops.retrieval.topk import FUSED, top_units

# How many programs score and how many attend: in Triton a program is one warp. Its interpreter runs
# programs one after the other.
_PROGRAMS = {"triton": (SCORE_PROGRAMS, ATTEND_PROGRAMS), "torch": (1, 1)}
# In CUDA a program is a CTA of several warps, of which a multiprocessor has room for so many. Fewer
# attend with heads of 256 channels, whose entries take more shared memory.
_CTAS_THAT_SCORE, _CTAS_THAT_ATTEND, _CTAS_THAT_ATTEND_WIDELY = 2, 3, 2
# Where more than 16 CTAs attend to a row, each reads at least so many entries.
_ENTRIES_PER_CTA = 128


def splits_of(programs: int, num_rows: int, kv_heads: int, most: int = 1 << 30) -> int:
    """Programs that share a row and head, so that about `programs` run in all."""
    return max(1, min(programs // (num_rows * kv_heads), most))


def attend_parts(programs: int, max_rows: int, kv_heads: int) -> int:
    """Parts per query head, over all rows, that attention by `programs` may leave to be merged.

    There may be almost twice as many as programs of a KV head, since ``steps`` shares these among
    half of the rows.
    """
    return max(2 * programs // kv_heads, max_rows)


def _programs(backend: str, device: torch.device, head_dim: int) -> tuple[int, int]:
    """How many score and how many attend."""
    if backend != "cuda":
        return _PROGRAMS[backend]
    count = torch.cuda.get_device_properties(device).multi_processor_count
    attend = _CTAS_THAT_ATTEND_WIDELY if head_dim > 128 else _CTAS_THAT_ATTEND
    return _CTAS_THAT_SCORE * count, attend * count


@dataclass(frozen=True)
class Scratch:
    """What the ops write between one another, the same in every layer.

    Attributes:
        scores: (G, capacity) float32. indices: (R, G, K) int32. counts: (R, G) int32.
        stats: flat float32, of the softmax reduction. partial, partial_lse: flat float32.
        histogram: (R, G, 2048) int32 and tickets: (R, G) int32, zero between calls; CUDA ops only.
        unit: tokens per unit. reduction: see ``equations.retrieval``.
        score_programs, attend_programs: how many to share the work between.
        backends: of the ops. scorer: the index, whose sidecar the ops read.
        overlap_rows: see ``cuda.OVERLAP_ROWS``. fused: see ``topk.FUSED``.
        select_ctas: see ``cuda.select``. one_launch: what does it all in one launch where it may;
            None where no launch may.
    """

    scores: Tensor
    indices: Tensor
    counts: Tensor
    stats: Tensor
    partial: Tensor
    partial_lse: Tensor
    histogram: Tensor
    tickets: Tensor
    heads: int
    head_dim: int
    unit: int
    reduction: str
    score_programs: int
    attend_programs: int
    backends: Backends
    scorer: Scorer[Any]
    overlap_rows: int = cuda_ops.OVERLAP_ROWS
    fused: bool = FUSED
    select_ctas: int = 0
    one_launch: OneLaunch | None = None

    @classmethod
    def of(
        cls,
        scorer: Scorer[Any],
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        max_rows: int,
        capacity: int,
        max_units: int,
        unit: int,
        reduction: str,
        device: torch.device,
        backend: str = "",
        dtype: torch.dtype = torch.bfloat16,
        one_launch: bool = True,
    ) -> "Scratch":
        """Scratch for at most `max_rows` rows with `capacity` units in all.

        backend: empty for the one that ``choose_backend`` chooses. dtype: of queries.
        one_launch: whether one launch may do a layer, which keeps no choice for others to read.
        """
        if backend == "cuda" and (missing := cuda_ops.why_not()):
            raise ValueError(missing)
        chosen, reason = (backend, "it was asked for") if backend else choose_backend(device)
        share = num_heads // kv_heads
        backends = Backends.of(
            chosen, reason, dtype, head_dim, share, reduction, scorer.cuda_reductions
        )
        score = attend = 1
        if device.type != "cpu":
            score = _programs(backends.score, device, head_dim)[0]
            attend = _programs(backends.attend, device, head_dim)[1]

        def floats(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        one = None
        if one_launch and does(backends.score, reduction, scorer):
            one = OneLaunch.of(num_heads, kv_heads, head_dim, max_rows, device)
        parts = num_heads * attend_parts(attend, max_rows, kv_heads)
        stats = num_heads * max(score // kv_heads, max_rows) * 2
        shape = (max_rows, kv_heads, max_units)
        return cls(
            scores=floats(kv_heads * capacity).view(kv_heads, capacity),
            indices=ints(*shape),
            counts=ints(*shape[:2]),
            stats=floats(stats if reduction == "softmax" else 1),
            partial=floats(parts * head_dim),
            partial_lse=floats(parts),
            heads=num_heads,
            head_dim=head_dim,
            unit=unit,
            reduction=reduction,
            histogram=ints(*shape[:2], cuda_ops.HISTOGRAM_BINS if backends.score == "cuda" else 0),
            tickets=ints(*shape[:2]),
            score_programs=score,
            attend_programs=attend,
            backends=backends,
            scorer=scorer,
            one_launch=one,
        )

    def parts(self, num_rows: int, splits: int) -> tuple[Tensor, Tensor]:
        """(R, H, splits, D) and (R, H, splits) float32, scratch of attention's parts."""
        heads, head_dim = self.heads, self.head_dim
        count = num_rows * heads * splits
        return (
            self.partial[: count * head_dim].view(num_rows, heads, splits, head_dim),
            self.partial_lse[:count].view(num_rows, heads, splits),
        )

    @property
    def zeroed(self) -> list[Tensor]:
        """What must be zero between calls."""
        one = [] if self.one_launch is None else [self.one_launch.counters]
        return [self.histogram, self.tickets, *one]

    def rows_in_one(self, entries: int, captured: Sequence[int]) -> int:
        """Rows up to which one launch does a step whose requests have at most so many entries.

        captured: sizes of the server's CUDA graphs.
        """
        longest = () if self.one_launch is None else self.one_launch.longest
        return rows_in_graphs(longest, entries, captured)

    @property
    def that_chooses(self) -> "Scratch":
        """The same memory, for calls that leave what they chose in `indices` and `counts`."""
        return self if self.one_launch is None else replace(self, one_launch=None)

    def from_row(self, begin: int) -> "Scratch":
        """The same memory, for calls whose choices go behind those of the first `begin` rows."""
        return replace(self, indices=self.indices[begin:], counts=self.counts[begin:])

    @property
    def capacity(self) -> int:
        """Units that the scores have room for."""
        return self.scores.shape[1]


def retrieve(
    query: Tensor,
    paged: PagedKV,
    sidecar: Any,
    block_table: Tensor,
    rows: RetrievalRows,
    scratch: Scratch,
    out: Tensor,
    *,
    scale: float,
    key_scale: float,
    value_scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chosen: bool = False,
) -> None:
    """Attention of `rows` to the entries that they select; other rows of `out` stay as they are.

    Args:
        query, out: (N, H, D). block_table: (B, max_blocks) int32.
        sidecar: of the layer, as `scratch.scorer` keeps it.
        scale: of the softmax. key_scale, value_scale: what an fp8 cache's entries stand for.
        soft_cap, sinks: of the softmax, see ``attend``. Scores, which only rank, know neither.
        chosen: `scratch` has the choice of an earlier layer for these rows, which is read by.
    """
    scales = (scale, key_scale, value_scale)
    if scratch.backends.score == "torch":
        retrieve_in_torch(
            scratch.scorer,
            scratch.reduction,
            scratch.unit,
            scratch.indices,
            scratch.counts,
            query,
            paged,
            sidecar,
            block_table,
            rows,
            out,
            *scales,
            soft_cap,
            sinks,
            chosen,
        )
        return
    one, num_rows = scratch.one_launch, rows.lens.shape[0]
    if one and one.takes(query, paged, block_table, num_rows, soft_cap):
        assert not chosen, "one launch keeps no choice"
        parts, max_units = scratch.parts(num_rows, one.splits), scratch.indices.shape[2]
        one.run(query, paged, sidecar, block_table, rows, parts, out, *scales, max_units, sinks)
        return
    for step in steps(
        query,
        paged,
        sidecar,
        block_table,
        rows,
        scratch,
        out,
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        soft_cap=soft_cap,
        sinks=sinks,
        chosen=chosen,
    ).values():
        step()


def steps(
    query: Tensor,
    paged: PagedKV,
    sidecar: Any,
    block_table: Tensor,
    rows: RetrievalRows,
    scratch: Scratch,
    out: Tensor,
    *,
    scale: float,
    key_scale: float,
    value_scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    chosen: bool = False,
) -> dict[str, Callable[[], None]]:
    """The ops of ``retrieve`` by name, as they run: three, or one if `chosen`."""
    num_rows, kv_heads, unit = rows.lens.shape[0], paged.num_heads, scratch.unit
    # One program merges the parts of a row: many small parts take it longer than few.
    most = MAX_SPLITS
    if scratch.backends.attend == "cuda":
        most = min(max(scratch.indices.shape[2] * unit // _ENTRIES_PER_CTA, 16), most)
    # A CUDA graph's rows may be almost twice those that have something to do.
    fewest = num_rows // 2 + 1 if scratch.backends.attend == "cuda" else num_rows
    attend_splits = splits_of(scratch.attend_programs, fewest, kv_heads, most)
    overlap = num_rows <= scratch.overlap_rows
    where = (block_table, rows.tokens, rows.requests, rows.lens)

    def score_in_cuda() -> None:
        scratch.scorer.score_in_cuda(
            query,
            sidecar,
            block_table,
            rows,
            scratch.scores,
            scratch.histogram,
            reduction=scratch.reduction,
            programs=scratch.score_programs,
        )

    def select_in_cuda() -> None:
        cuda_ops.select(
            scratch.scores,
            scratch.histogram,
            rows.lens,
            rows.budgets,
            rows.offsets,
            scratch.indices,
            scratch.counts,
            unit,
            overlap,
            scratch.select_ctas,
        )

    def attend_in_cuda() -> None:
        cuda_ops.attend(
            query,
            paged.keys,
            paged.values,
            *where,
            scratch.indices,
            scratch.counts,
            *scratch.parts(num_rows, attend_splits),
            scratch.tickets,
            out,
            scale,
            key_scale,
            value_scale,
            unit,
            attend_splits,
            scratch.attend_programs,
            # What comes before it waits for the scores by itself.
            overlap and scratch.backends.score == "cuda" and not chosen,
            soft_cap,
            sinks,
            paged.key_scales,
            paged.value_scales,
        )

    def score_in_triton() -> None:
        scratch.scorer.score_in_triton(
            query,
            sidecar,
            block_table,
            rows,
            scratch.scores,
            scratch.stats,
            reduction=scratch.reduction,
            scale=scale * key_scale,
            splits=splits_of(scratch.score_programs, num_rows, kv_heads),
        )

    def select_in_triton() -> None:
        top_units(
            scratch.scores,
            rows,
            scratch.indices,
            scratch.counts,
            unit=unit,
            fused=scratch.fused,
        )

    def attend_in_triton() -> None:
        attend(
            query,
            paged,
            block_table,
            rows,
            scratch.indices,
            scratch.counts,
            *scratch.parts(num_rows, attend_splits),
            out,
            unit=unit,
            scale=scale,
            key_scale=key_scale,
            value_scale=value_scale,
            splits=attend_splits,
            soft_cap=soft_cap,
            sinks=sinks,
        )

    attends = attend_in_cuda if scratch.backends.attend == "cuda" else attend_in_triton
    if chosen:
        return {"attend": attends}
    scores_in_cuda = scratch.backends.score == "cuda"
    return {
        "score": score_in_cuda if scores_in_cuda else score_in_triton,
        "select": select_in_cuda if scores_in_cuda else select_in_triton,
        "attend": attends,
    }
