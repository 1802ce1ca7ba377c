"""Where the scales of 8-bit entries lie: in the tail of every KV cache page, behind the sidecar.

A page holds, from its first byte on:

1. the entries: G x block_size x 2 D bytes of int8, a key and its value side by side, in the order
   of the attention backend. They begin every 2 D bytes, so that kernels load 16 bytes at a time;
2. the sidecar of retrieval, if there is one (``ops.retrieval.index_layout``);
3. from the next multiple of 16 bytes on, the scales: (G, block_size, 2) float32, contiguous, of
   each token its key's and then its value's;
4. whatever else pads the page. Its size must be a multiple of 16 bytes.

vLLM's own layout has scales between the entries, which then begin every 2 D + 8 bytes: kernels take
up to 3.4 times as long over that (docs/notebook/int8-cache.md).
"""

import torch
from torch import Tensor

SCALE_BYTES = torch.float32.itemsize
ALIGNMENT = 16


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def scales_offset(entry_bytes: int, sidecar_bytes: int = 0) -> int:
    """The byte of a page at which its scales begin.

    entry_bytes: of all entries of the page, G x block_size x 2 D. sidecar_bytes: of the page, see
    ``Index.page_bytes``; 0 without.
    """
    return _aligned(entry_bytes + sidecar_bytes)


def scale_bytes(num_kv_heads: int, block_size: int) -> int:
    """Bytes of a page's scales, a multiple of 16.

    A page of 8-bit entries needs ``scales_offset(...) + scale_bytes(...)`` bytes in all.
    """
    return _aligned(num_kv_heads * block_size * 2 * SCALE_BYTES)


def scales_of(kv_cache: Tensor, sidecar_bytes: int = 0) -> tuple[Tensor, Tensor]:
    """The scales of keys and of values, as strided views of the pages' tails; nothing is copied.

    kv_cache: (num_blocks, G, block_size, 2 D) int8, any strides, as vLLM binds it to the layer.
    sidecar_bytes: as in ``scales_offset``.
    Returns: key scales and value scales, each (num_blocks, G, block_size) float32.

    Raises:
        ValueError: the pages have no room for the scales, or do not begin at multiples of 16 bytes.
    """
    raw = kv_cache.view(torch.uint8)
    num_blocks, heads, block_size, _ = raw.shape
    begin, size = scales_offset(raw[0].numel(), sidecar_bytes), scale_bytes(heads, block_size)
    stride = raw.stride(0)
    if num_blocks == 1:  # Then it is arbitrary, and there is nothing to step over.
        stride = begin + size
    if stride < begin + size:
        raise ValueError(
            f"pages of {stride} bytes have no room for scales of 8-bit entries: give them "
            f"{begin + size}"
        )
    if stride % ALIGNMENT or raw.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"pages of {stride} bytes, of which the first begins at {raw.storage_offset()}: 8-bit "
            f"entries with scales need multiples of {ALIGNMENT}"
        )
    tails = torch.as_strided(raw, (num_blocks, size), (stride, 1), raw.storage_offset() + begin)
    scales = tails.view(torch.float32)[:, : heads * block_size * 2]
    scales = scales.unflatten(1, (heads, block_size, 2))
    return scales[..., 0], scales[..., 1]
