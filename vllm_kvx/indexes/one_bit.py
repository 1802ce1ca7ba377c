"""FIER's index: 1-bit keys, whose products with the query score single tokens.

How they lie in the tail of a KV page: ``ops/retrieval/index_layout.py``.
"""

from collections.abc import Sequence

from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, quantize_keys, token_scores
from vllm_kvx.indexes.base import Index, Writer
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda
from vllm_kvx.ops.retrieval.index_layout import WORD, PageShape, Sidecar, keys_of_groups
from vllm_kvx.ops.retrieval.index_writer import SidecarWriter
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.score import score_units, scores_of_row


class OneBit(Index[Sidecar]):
    """A bit for each channel of each key, and a scale and a zero for each channel of each group."""

    name = "one_bit"
    cuda_reductions = tuple(cuda.REDUCTIONS)
    in_one_launch = True

    def unit(self, group: int) -> int:
        return 1

    def check(self, shape: PageShape) -> None:
        if shape.head_dim % WORD:
            raise ValueError(
                f"1-bit keys need a head dimension that is a multiple of {WORD}, this model has "
                f"{shape.head_dim}: serve it without fier"
            )

    def head_bytes(self, shape: PageShape) -> int:
        return Sidecar.head_bytes(shape, _words(shape))

    def view(self, kv_cache: Tensor, shape: PageShape) -> Sidecar:
        return Sidecar.of(kv_cache, shape, _words(shape))

    def writer(
        self,
        layers: Sequence[tuple[PagedKV, Sidecar]],
        groups: Sequence[int],
        stages: Sequence[int],
    ) -> Writer:
        return SidecarWriter(layers, groups, stages, has_codes=True)

    def write_in_torch(
        self, paged: PagedKV, sidecar: Sidecar, block_table: Tensor, begin: int, end: int
    ) -> None:
        group = sidecar.shape.group
        keys = keys_of_groups(paged, block_table, begin, end, group)
        signs, scales, zeros = quantize_keys(keys, group)
        sidecar.put_scales(block_table, begin, scales, zeros)
        sidecar.put_signs(block_table, begin, signs)

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
        cuda.score(
            query,
            sidecar.codes,
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
            programs,
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
            has_codes=True,
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
        signs, scales, zeros = sidecar.dense(block_table, full)
        assert signs is not None
        scores = token_scores(query, signs, scales, zeros)
        newest = length - full * shape.group
        return scores_of_row(scores, shape.num_kv_heads, newest, reduction, scale)


def _words(shape: PageShape) -> int:
    """int32 words of one key's bits."""
    return shape.head_dim // WORD
