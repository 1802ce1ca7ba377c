"""What the ops ask of an index in a decode step."""

from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor

from vllm_kvx.ops.retrieval.rows import RetrievalRows

# One layer's sidecar, as the index keeps it.
SidecarT_contra = TypeVar("SidecarT_contra", contravariant=True)


class Scorer(Protocol[SidecarT_contra]):
    """Scores the units of a layer, one score per KV head and unit; see ``equations.retrieval``.

    Units of the newest group get infinity, since they are always read.

    cuda_reductions: the reductions that `score_in_cuda` knows; empty if there is no CUDA op.
    in_one_launch: whether ``cuda.fused`` scores by its sidecar.
    """

    cuda_reductions: ClassVar[Collection[str]] = ()
    in_one_launch: ClassVar[bool] = False

    def score_in_cuda(
        self,
        query: Tensor,
        sidecar: SidecarT_contra,
        block_table: Tensor,
        rows: RetrievalRows,
        scores: Tensor,
        histogram: Tensor,
        *,
        reduction: str,
        programs: int,
    ) -> None:
        """Writes the rows' scores by a CUDA op; called only if `cuda_reductions` has `reduction`.

        Args:
            query: (N, H, D). block_table: (B, max_blocks) int32.
            scores: (G, capacity) float32, written at each row's offset.
            histogram: (R, G, 2048) int32, zero; gets how many scores there are by the top 11 bits.
            programs: CTAs that the GPU runs at once; rows share them, or a multiple of them.
        """
        raise NotImplementedError

    @abstractmethod
    def score_in_triton(
        self,
        query: Tensor,
        sidecar: SidecarT_contra,
        block_table: Tensor,
        rows: RetrievalRows,
        scores: Tensor,
        stats: Tensor,
        *,
        reduction: str,
        scale: float,
        splits: int,
    ) -> None:
        """Writes the rows' scores by Triton.

        Args:
            query, block_table, scores: see ``score_in_cuda``.
            stats: (R, H, splits, 2) float32, scratch of the softmax reduction.
            scale: of the softmax reduction. splits: programs that share a row.
        """

    @abstractmethod
    def score_in_torch(
        self,
        query: Tensor,
        sidecar: SidecarT_contra,
        block_table: Tensor,
        length: int,
        reduction: str,
        scale: float,
    ) -> Tensor:
        """Scores one row in plain torch.

        Args:
            query: (H, D). block_table: (max_blocks,) int32, the row's own.
            length: entries that the row sees. scale: of the softmax reduction.

        Returns:
            (G, units): the newest group's or page's are infinite.
        """
