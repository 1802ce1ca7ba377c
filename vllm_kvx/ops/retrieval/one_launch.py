"""FIER's layer in one CUDA launch, in the place of three, where that is faster."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.scorer import Scorer

logger = init_logger("vllm.kvx.retrieval")

# Where it has been measured, and was faster than three launches: on an H200, up to so many rows,
# and so many pairs of a row and a KV head, as each gets its part of the multiprocessors
# (benchmarks/results/ops/h200-one-launch-shapes.json). For more rows its first version took two to
# four times as long as three (h200-retrieval-one-launch.json).
CAPABILITY = (9, 0)
MAX_ROWS, MAX_PAIRS = 4, 32
# Of a rank: KV heads, query heads to each, and channels, with which these were, and what lies
# between. With 2 KV heads of 128 channels, 8 query heads to each, one row of up to some 50,000
# entries takes 0.2 to 4.9 us longer than in three, and what has more rows or entries as much less
# (h200-costs-in-a-step.json): a step of one request is then whole or long. With 256 channels it
# gains 2 us of 25 to 60, and with four rows loses one.
KV_HEADS, SHARE, HEAD_DIMS = range(2, 9), 8, (64, 128)
# "0" keeps three launches everywhere.
VARIABLE = "KVX_RETRIEVAL_ONE_LAUNCH"
_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# CTAs of a row and KV head whose parts of the result one of them merges.
MAX_SPLITS = 128


def pays(layer: Any, dtype: torch.dtype) -> bool:
    """Whether a server takes it for such layers: they are like those that were measured.

    layer: vLLM's, with the heads of this rank. dtype: of its queries.

    Raises:
        ValueError: see `_is_on`.
    """
    impl = layer.impl
    heads = impl.num_heads, impl.num_kv_heads, impl.head_size
    return suits(*heads, layer.kv_cache_torch_dtype, dtype, getattr(impl, "logits_soft_cap", None))


def suits(
    heads: int,
    kv_heads: int,
    head_dim: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    soft_cap: float | None,
) -> bool:
    """`pays`, of a layer by its parts. heads, kv_heads: of a rank."""
    # It reads entries of the queries' dtype alone, and knows no soft cap.
    can = cache_dtype == dtype and not soft_cap
    return can and was_faster(heads, kv_heads, head_dim) and _is_on()


def _is_on() -> bool:
    """Whether this environment takes it anywhere.

    Raises:
        ValueError: the variable that turns it off has another value than 0 or 1.
    """
    wanted = os.environ.get(VARIABLE) or "1"
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={wanted}: set it to 0, for three launches a layer, or to 1")
    # A part of the multiprocessors has no room for all CTAs at once.
    return wanted == "1" and os.environ.get(_MPS_SHARE, "100") == "100"


def was_faster(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether it was faster than three launches with so many of a rank, or with neighbours."""
    return kv_heads in KV_HEADS and heads // kv_heads <= SHARE and head_dim in HEAD_DIMS


def does(score: str, reduction: str, scorer: Scorer[Any]) -> bool:
    """Whether it can score so. score: the backend that does, one of ``backends.BACKENDS``."""
    return score == "cuda" and reduction == "max" and scorer.in_one_launch


@dataclass(frozen=True)
class OneLaunch:
    """What one launch needs beside the scratch of the three, and where it may be taken.

    No two launches may run at a time, as they share `state`; layers run one after the other, in
    one stream, as vLLM's microbatches are refused.

    Attributes:
        state: (R G, FUSED_STATE) int32, see ``cuda.fused``.
        multiprocessors: of the GPU. splits: CTAs of a row and KV head at most.
        longest: entries that rows may have at most, for their scores to fit in shared memory, by
            the number of rows, from one on.
    """

    state: Tensor
    multiprocessors: int
    splits: int
    longest: tuple[int, ...]

    @classmethod
    def of(
        cls, heads: int, kv_heads: int, head_dim: int, max_rows: int, device: torch.device
    ) -> "OneLaunch | None":
        """For at most `max_rows` rows; None where it cannot do them. See also `pays`.

        heads, kv_heads: of a layer. The CUDA operators take such queries.
        """
        count, splits, longest = longest_of(heads, kv_heads, head_dim, max_rows, device)
        if not longest:
            return None
        rows = len(longest)
        room = ", ".join(f"{most:,} for {n}" for n, most in enumerate(longest, 1))
        logger.info(
            "Retrieval: a layer is one launch where a step has at most %d rows, and its block "
            "table room for no more entries than %s (%s=0: never).",
            *(rows, room, VARIABLE),
        )
        size = (rows * kv_heads, cuda_ops.FUSED_STATE)
        return cls(torch.zeros(size, dtype=torch.int32, device=device), count, splits, longest)

    @property
    def counters(self) -> Tensor:
        """The part of `state` that is zero between launches."""
        return self.state[:, : cuda_ops.FUSED_LIST]

    def takes(
        self,
        query: Tensor,
        paged: PagedKV,
        block_table: Tensor,
        num_rows: int,
        soft_cap: float | None,
    ) -> bool:
        """Whether it does a layer of so many rows, whatever these are.

        All that it goes by a CUDA graph fixes: rows may have as many entries as the block table has
        room for, of which vLLM makes it as wide as the longest context that the server takes.
        """
        return (
            0 < num_rows <= len(self.longest)
            and block_table.shape[1] * paged.block_size <= self.longest[num_rows - 1]
            and paged.keys.dtype == query.dtype
            and soft_cap is None
        )

    def run(
        self,
        query: Tensor,
        paged: PagedKV,
        sidecar: Any,
        block_table: Tensor,
        rows: RetrievalRows,
        parts: tuple[Tensor, Tensor],
        out: Tensor,
        scale: float,
        key_scale: float,
        value_scale: float,
        max_units: int,
        sinks: Tensor | None,
    ) -> None:
        """See ``retrieve``; what was chosen is kept nowhere.

        sidecar: of 1-bit keys. parts: see ``Scratch.parts``, of `splits`. max_units: most that a
        row may select.
        """
        cuda_ops.fused(
            query,
            sidecar.codes,
            sidecar.scales,
            paged.keys,
            paged.values,
            block_table,
            rows.tokens,
            rows.requests,
            rows.lens,
            rows.budgets,
            self.state,
            *parts,
            out,
            sidecar.shape.group,
            scale,
            key_scale,
            value_scale,
            max_units,
            self.splits,
            self.multiprocessors,
            sinks,
        )


def longest_of(
    heads: int, kv_heads: int, head_dim: int, max_rows: int, device: torch.device
) -> tuple[int, int, tuple[int, ...]]:
    """Multiprocessors, CTAs of a row and KV head at most, and what `OneLaunch.longest` is.

    That is empty where one launch can do no row. Args: see `OneLaunch.of`.
    """
    rows = min(max_rows, MAX_ROWS, MAX_PAIRS // kv_heads)
    if rows < 1 or heads // kv_heads > cuda_ops.FUSED_MAX_SHARE:
        return 0, 0, ()
    # It loads the operators, which another process may have chosen.
    if torch.cuda.get_device_capability(device) != CAPABILITY or cuda_ops.why_not():
        return 0, 0, ()
    count = torch.cuda.get_device_properties(device).multi_processor_count
    splits = min(count // kv_heads, MAX_SPLITS)
    shape = (head_dim, heads // kv_heads, kv_heads)
    longest = tuple(
        cuda_ops.fused_longest(device, *shape, num_rows, splits, count)
        for num_rows in range(1, rows + 1)
    )
    return count, splits, longest


def rows_in_graphs(longest: tuple[int, ...], entries: int, captured: Sequence[int]) -> int:
    """Rows up to which it does a step whose requests have at most so many entries.

    A step replays the smallest CUDA graph with as many rows or more, and that has to be one that
    it does; beyond all graphs it runs as it is.

    longest: see `OneLaunch`. captured: sizes of the server's graphs.
    """
    most = sum(entries <= each for each in longest)

    def replayed(rows: int) -> int:
        return min((size for size in captured if size >= rows), default=rows)

    return max((rows for rows in range(1, most + 1) if replayed(rows) <= most), default=0)
