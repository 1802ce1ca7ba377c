"""Quest's index: bounds of each page's keys, which bound its products with the query."""

from collections.abc import Sequence

from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, page_scores, quantize_keys
from vllm_kvx.indexes.base import Index, Writer
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda
from vllm_kvx.ops.retrieval.index_layout import PageShape, Sidecar, keys_of_groups
from vllm_kvx.ops.retrieval.index_writer import SidecarWriter
from vllm_kvx.ops.retrieval.retrieve import splits_of
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.score import score_units, scores_of_row


class PageBounds(Index[Sidecar]):
    """Keeps the middle of the keys and half their range, for each channel of each page.

    A page of the paper is a group here: a page of vLLM's cache holds one or more.
    """

    name = "page_bounds"
    cuda_reductions = tuple(cuda.REDUCTIONS)

    def unit(self, group: int) -> int:
        return group

    def head_bytes(self, shape: PageShape) -> int:
        return Sidecar.head_bytes(shape, words=0)

    def view(self, kv_cache: Tensor, shape: PageShape) -> Sidecar:
        return Sidecar.of(kv_cache, shape, words=0)

    def writer(
        self,
        layers: Sequence[tuple[PagedKV, Sidecar]],
        groups: Sequence[int],
        stages: Sequence[int],
    ) -> Writer:
        return SidecarWriter(layers, groups, stages, has_codes=False)

    def write_in_torch(
        self, paged: PagedKV, sidecar: Sidecar, block_table: Tensor, begin: int, end: int
    ) -> None:
        group = sidecar.shape.group
        keys = keys_of_groups(paged, block_table, begin, end, group)
        _, scales, zeros = quantize_keys(keys, group)
        sidecar.put_scales(block_table, begin, scales, zeros)

    def score_in_cuda(
        self,
        query: Tensor,
        sidecar: Sidecar,
        block_table: Tensor,
        rows: RetrievalRows,
        scores: Tensor,
        histogram: Tensor,
        *,
        reduction: str,
        programs: int,
    ) -> None:
        num_rows, kv_heads = rows.lens.shape[0], sidecar.scales.shape[1]
        # With many rows two waves even out what each CTA gets.
        waves = 2 if num_rows * kv_heads > 16 else 1
        cuda.score_pages(
            query,
            sidecar.scales,
            block_table,
            rows.tokens,
            rows.requests,
            rows.lens,
            rows.offsets,
            scores,
            histogram,
            sidecar.shape.group,
            cuda.REDUCTIONS[reduction],
            splits_of(waves * programs, num_rows, kv_heads),
        )

    def score_in_triton(
        self,
        query: Tensor,
        sidecar: Sidecar,
        block_table: Tensor,
        rows: RetrievalRows,
        scores: Tensor,
        stats: Tensor,
        *,
        reduction: str,
        scale: float,
        splits: int,
    ) -> None:
        score_units(
            query,
            sidecar,
            block_table,
            rows,
            scores,
            stats,
            reduction=reduction,
            scale=scale,
            splits=splits,
            has_codes=False,
        )

    def score_in_torch(
        self,
        query: Tensor,
        sidecar: Sidecar,
        block_table: Tensor,
        length: int,
        reduction: str,
        scale: float,
    ) -> Tensor:
        shape = sidecar.shape
        full = num_full_groups(length, shape.group)
        _, scales, zeros = sidecar.dense(block_table, full)
        scores = page_scores(query, scales, zeros)
        return scores_of_row(scores, shape.num_kv_heads, 1, reduction, scale)
