"""What an index is: what a page keeps beside its entries, and how a decode step scores by it.

A new index is a file here and a row in ``table.py``, its ops in ``ops/retrieval``, and the method
that names it (``policy/methods``). The rest of retrieval asks this interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import PageShape
from vllm_kvx.ops.retrieval.scorer import Scorer

# One layer's sidecar: views of what its pages keep beside their entries.
SidecarT = TypeVar("SidecarT")


class Writer(Protocol):
    """Writes full groups of several layers at once; their pages have fixed addresses."""

    def write(
        self,
        full_groups: Tensor,
        block_table_ptrs: Tensor,
        block_table_strides: Tensor,
        layer: int | None = None,
    ) -> None:
        """Writes `full_groups` in all layers of their stages, or in one layer.

        Args:
            full_groups: (n, 3) int32: KV stage, row of the block tables, and index of the group,
                which is full and whose keys are in the cache.
            block_table_ptrs, block_table_strides: (KV groups,), vLLM's block table layout.
        """


class Index(Scorer[SidecarT], ABC):
    """Finds the entries that a decode step reads. Its three scores are those of ``Scorer``.

    name: its row in ``table.py``, and ``IndexSpec.name`` of the methods that use it.
    """

    name: ClassVar[str]

    @abstractmethod
    def unit(self, group: int) -> int:
        """Tokens that are read together: 1, or a whole `group`; as ``IndexSpec.unit`` says."""

    def check(self, shape: PageShape) -> None:
        """Raises ValueError, saying what to change, where pages of `shape` cannot be indexed."""

    @abstractmethod
    def head_bytes(self, shape: PageShape) -> int:
        """Bytes that a page needs for one KV head, beside its entries."""

    def page_bytes(self, shape: PageShape) -> int:
        """Bytes that a page needs beside its entries; ValueError as ``check``."""
        self.check(shape)
        return shape.num_kv_heads * self.head_bytes(shape)

    @abstractmethod
    def view(self, kv_cache: Tensor, shape: PageShape) -> SidecarT:
        """The sidecar in the tails of a layer's pages, kv_cache (num_blocks, G, block_size, C).

        Raises:
            ValueError: the pages have no room.
        """

    @abstractmethod
    def writer(
        self,
        layers: Sequence[tuple[PagedKV, SidecarT]],
        groups: Sequence[int],
        stages: Sequence[int],
    ) -> Writer:
        """Writes by a kernel. layers: in model order; groups, stages: KV group and stage of each.

        Their pages may differ, where some skip a quantized cache.
        """

    @abstractmethod
    def write_in_torch(
        self, paged: PagedKV, sidecar: SidecarT, block_table: Tensor, begin: int, end: int
    ) -> None:
        """Writes full groups [begin, end) of one request in one layer, in plain torch."""


AnyIndex = Index[Any]
