"""One layer's paged keys and values, whatever the attention backend's memory layout."""

from dataclasses import dataclass

import torch
from torch import Tensor

# vLLM's attention backends whose caches are addressed here, by their names.
ATTENTION_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "CPU_ATTN")
# Of these, whose pages have no room for retrieval's sidecar.
NO_SIDECAR = ("FLASHINFER",)
# Whose metadata builder holds the plan of one batch, in pinned memory that copies still to run
# read: a second plan of the same step could take the place of the first.
ONE_PLAN = ("FLASHINFER",)
# vLLM's portable CPU attention kernels; the other ones interleave keys for matrix instructions.
_TRANSPOSED_KEYS = ("vec", "vec16")


@dataclass(frozen=True)
class PagedKV:
    """One layer's keys and values as strided views of vLLM's cache; nothing is copied.

    Attributes:
        keys, values: (num_blocks, G, block_size, D), the cache's dtype, any strides.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, kv_cache: Tensor, head_dim: int, *, cpu_isa: str | None = None) -> "PagedKV":
        """Views of a layer's cache as vLLM binds it to the layer.

        Args:
            kv_cache: (num_blocks, G, block_size, 2 * D), any strides. An fp8 cache may be passed
                as stored (uint8; then only moved) or viewed as its float8 dtype.
            head_dim: D.
            cpu_isa: None for the GPU backends, which store an entry's key and value side by side.
                For CPU_ATTN, `isa` of the attention layer: a block of one head holds all keys,
                transposed to (D, block_size), then all values.

        Raises:
            ValueError: the last dimension is not 2 * D, or keys of this ISA are interleaved.
        """
        num_blocks, heads, block_size, width = kv_cache.shape
        if width != 2 * head_dim:
            raise ValueError(
                f"a cache of width {width} does not hold keys and values of {head_dim}"
            )
        if cpu_isa is None:
            return cls(kv_cache[..., :head_dim], kv_cache[..., head_dim:])
        if cpu_isa not in _TRANSPOSED_KEYS:
            raise ValueError(
                f"CPU_ATTN interleaves the keys for {cpu_isa!r}; only {_TRANSPOSED_KEYS} can be "
                "addressed entry by entry (float32 uses them on x86)"
            )
        keys = kv_cache.view(num_blocks, heads, 2, head_dim, block_size)[:, :, 0]
        values = kv_cache.view(num_blocks, heads, 2, block_size, head_dim)[:, :, 1]
        return cls(keys.transpose(-1, -2), values)

    @property
    def num_heads(self) -> int:
        """The number of KV heads, G."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """The number of entries in a block."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """D, the channels of a key or a value."""
        return self.keys.shape[3]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one head's key and value."""
        return 2 * self.head_dim * self.keys.element_size()

    def dense_keys(self, block_table: Tensor, num_keys: int) -> Tensor:
        """Copies out one request's first `num_keys` keys, in order.

        block_table: (blocks,) integers, the request's blocks.
        Returns: (G, num_keys, D), the cache's dtype.
        """
        return self._dense(self.keys, block_table, num_keys)

    def dense_values(self, block_table: Tensor, num_keys: int) -> Tensor:
        """Copies out one request's first values, as `dense_keys` its keys: (G, num_keys, D)."""
        return self._dense(self.values, block_table, num_keys)

    def _dense(self, cache: Tensor, block_table: Tensor, num_keys: int) -> Tensor:
        index = torch.arange(num_keys, device=cache.device)
        blocks = block_table[index // self.block_size].long()
        return cache[blocks, :, index % self.block_size].transpose(0, 1)
