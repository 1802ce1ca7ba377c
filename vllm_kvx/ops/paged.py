"""One layer's paged keys and values, whatever the attention backend's memory layout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvx.ops.int8.layout import scales_of
from vllm_kvx.ops.int8.numbers import undone

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
        key_scales, value_scales: (num_blocks, G, block_size) float32, any strides, where entries
            are 8-bit integers: a stored number times its token's scale is what it stands for. None
            for all other dtypes.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

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

    @classmethod
    def of_int8(cls, kv_cache: Tensor, head_dim: int, sidecar_bytes: int = 0) -> "PagedKV":
        """Views of a layer's cache of 8-bit integers, with the scales in its pages' tails.

        Args:
            kv_cache: (num_blocks, G, block_size, 2 * D) int8, any strides, as vLLM binds it to the
                layer: an entry's key and value side by side.
            head_dim: D.
            sidecar_bytes: bytes of a page that retrieval's sidecar takes, which lies before the
                scales; 0 without. See ``int8.layout``.

        Raises:
            ValueError: other dtypes or widths, or pages without room for the scales.
        """
        if kv_cache.dtype != torch.int8:
            raise ValueError(f"8-bit entries with scales are int8, not {kv_cache.dtype}")
        entries = cls.of(kv_cache, head_dim)
        return cls(entries.keys, entries.values, *scales_of(kv_cache, sidecar_bytes))

    def of_head(self, head: int) -> "PagedKV":
        """The entries of one KV head alone, as views with G = 1."""
        one = slice(head, head + 1)
        keys, values = self.keys[:, one], self.values[:, one]
        if self.key_scales is None or self.value_scales is None:
            return PagedKV(keys, values)
        return PagedKV(keys, values, self.key_scales[:, one], self.value_scales[:, one])

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
    def is_fp8(self) -> bool:
        """Whether entries are multiplied by a layer's scales: 8-bit integers have their own."""
        return self.keys.dtype.itemsize == 1 and self.key_scales is None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one head's key and value, with their scales."""
        scales = 0 if self.key_scales is None else 2 * self.key_scales.element_size()
        return 2 * self.head_dim * self.keys.element_size() + scales

    def dense_keys(self, block_table: Tensor, num_keys: int) -> Tensor:
        """Copies out one request's first `num_keys` keys, in order.

        block_table: (blocks,) integers, the request's blocks.
        Returns: (G, num_keys, D), the cache's dtype; float32 of 8-bit integers, what they stand
            for.
        """
        index = torch.arange(num_keys, device=self.keys.device)
        return self.keys_at(block_table, index).transpose(0, 1)

    def dense_values(self, block_table: Tensor, num_keys: int) -> Tensor:
        """Copies out one request's first values, as `dense_keys` its keys: (G, num_keys, D)."""
        index = torch.arange(num_keys, device=self.values.device)
        return self.values_at(block_table, index).transpose(0, 1)

    def keys_at(self, block_table: Tensor, index: Tensor) -> Tensor:
        """Copies out one request's keys at entries `index` (n,) integers: (n, G, D).

        block_table and the result's dtype: see `dense_keys`.
        """
        return self._at(self.keys, self.key_scales, block_table, index)

    def values_at(self, block_table: Tensor, index: Tensor) -> Tensor:
        """Copies out one request's values, as `keys_at` its keys: (n, G, D)."""
        return self._at(self.values, self.value_scales, block_table, index)

    def _at(
        self, cache: Tensor, scales: Tensor | None, block_table: Tensor, index: Tensor
    ) -> Tensor:
        at = block_table[index // self.block_size].long(), slice(None), index % self.block_size
        return cache[at] if scales is None else undone(cache[at], scales[at])
