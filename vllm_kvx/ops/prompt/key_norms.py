"""Scores by which keys of small norm stay: Knorm's, from paged keys.

The batch is ragged as in `saliency`; no query is asked, so there is no window and every key of a
prompt has a score. Lengths are read on the device, so nothing here waits for it.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.paged import PagedKV

# Keys per program. An interpreted program costs the same whatever its size.
_BLOCK_KEYS = {"cuda": 64, "cpu": 1024}
# Bits of the largest finite float32.
_LARGEST_BITS: tl.constexpr = tl.constexpr(0x7F7FFFFF)


def key_scores(
    paged: PagedKV,
    block_tables: Tensor,
    num_keys: Tensor,
    offsets: Tensor,
    max_num_keys: int,
    total_keys: int,
) -> Tensor:
    """A score of each key for its KV head, larger where the key's squared L2 norm is smaller.

    The score is the float32 whose bits are those of the largest finite float32 minus those of the
    squared norm, a float32 sum. Bits of floats that are not negative order as the floats do, so
    different norms have different scores, in the opposite order. A norm that is infinite or NaN
    scores 0. What a request gets does not depend on the others in its batch, bit for bit.

    Args:
        paged: the layer's keys as stored, any float dtype; an fp8 cache viewed as its float8 dtype.
            Its scale is left out: with it, the order is the same. Entries past num_keys[f] are not
            read.
        block_tables: (F, max_blocks) int32, unit stride along a row.
        num_keys: (F,) int32, on the device as is the next one; 0 for padding.
        offsets: (F + 1,) int64, exclusive cumulative sum of `num_keys`.
        max_num_keys: at least the largest of `num_keys`.
        total_keys: columns of the result, at least offsets[F].

    Returns:
        (G, total_keys) float32, at least 0 and finite; columns from offsets[F] on are not written.
    """
    keys = paged.keys
    scores = torch.empty(paged.num_heads, total_keys, dtype=torch.float32, device=keys.device)
    if not (num_keys.shape[0] and max_num_keys and total_keys):
        return scores
    block_keys = _BLOCK_KEYS[keys.device.type]
    grid = (triton.cdiv(max_num_keys, block_keys), paged.num_heads, num_keys.shape[0])
    _key_scores_kernel[grid](
        keys,
        *keys.stride(),
        block_tables,
        block_tables.stride(0),
        num_keys,
        offsets,
        scores,
        total_keys,
        HEAD_DIM=paged.head_dim,
        PADDED_DIM=triton.next_power_of_2(paged.head_dim),
        BLOCK_SIZE=paged.block_size,
        BLOCK_KEYS=block_keys,
    )
    return scores


@triton.jit(
    do_not_specialize=["block_tables", "table_stride", "num_keys", "offsets", "total_keys"],
)
def _key_scores_kernel(
    keys,
    key_block_stride,
    key_head_stride,
    key_entry_stride,
    key_channel_stride,
    block_tables,
    table_stride,
    num_keys,
    offsets,
    scores,
    total_keys,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    length = tl.load(num_keys + request)
    first = tl.program_id(0) * BLOCK_KEYS
    if first >= length:
        return
    key = first + tl.arange(0, BLOCK_KEYS)
    exists = key < length
    table = block_tables + request.to(tl.int64) * table_stride
    block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    pointer = keys + head * key_head_stride + block * key_block_stride
    pointer += (key % BLOCK_SIZE) * key_entry_stride
    channel = tl.arange(0, PADDED_DIM)
    mask = exists[:, None]
    if HEAD_DIM != PADDED_DIM:
        mask = mask & (channel < HEAD_DIM)[None, :]
    tile = tl.load(pointer[:, None] + channel[None, :] * key_channel_stride, mask=mask, other=0.0)
    tile = tile.to(tl.float32)
    bits = tl.sum(tile * tile, axis=1).to(tl.int32, bitcast=True)
    # NaN may have its sign set, and its bits are then a negative integer.
    finite = (bits >= 0) & (bits <= _LARGEST_BITS)
    score = tl.where(finite, _LARGEST_BITS - bits, 0).to(tl.float32, bitcast=True)
    row = scores + head * total_keys + tl.load(offsets + request)
    tl.store(row + key, score, mask=exists)


def key_scores_reference(
    paged: PagedKV, block_tables: Tensor, num_keys: Tensor, offsets: Tensor
) -> Tensor:
    """`key_scores` in plain torch, one request after the other; (G, offsets[F]).

    It may add a norm's squares in another order, which can change the last bits.
    """
    scores = torch.zeros(paged.num_heads, int(offsets[-1]), device=paged.keys.device)
    for f, length in enumerate(num_keys.tolist()):
        norms = paged.dense_keys(block_tables[f], length).float().square().sum(dim=-1)
        reversed_bits = _LARGEST_BITS.value - norms.view(torch.int32)
        columns = slice(int(offsets[f]), int(offsets[f]) + length)
        scores[:, columns] = reversed_bits.where(norms.isfinite(), 0).view(torch.float32)
    return scores
