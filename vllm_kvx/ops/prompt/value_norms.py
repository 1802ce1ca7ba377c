"""Norms of values after the layer's output projection, without projecting them: CriticalKV's.

The output projection W_h (hidden, D) of query head h turns a value v into W_h v. Its L2 norm needs
no vector as long as the hidden state: where R_h (D, D) is the factor of W_h's QR decomposition,
||W_h v|| = ||R_h v||, since R_h^T R_h = W_h^T W_h. So N values cost N * H * D * D multiplications
instead of N * H * D * hidden. The factor is used rather than the Gram matrix W_h^T W_h, because its
rounding disturbs a norm relatively to R_h, and that of the Gram matrix its square.

The batch is ragged as in `saliency`. Lengths are read on the device, so nothing here waits for it.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.paged import PagedKV

# Keys per program; half as many where a head is wider than 128 channels. An interpreted program
# costs the same whatever its size.
_BLOCK_KEYS = {"cuda": 128, "cpu": 1024}
# Rows of a factor that a program takes at a time, in bytes.
_BLOCK_OUT_BYTES = 128


def factors_of(weight: Tensor) -> Tensor:
    """R_h of every head: (H, hidden, D) floats -> (H, D, D) float32."""
    num_heads, hidden, head_dim = weight.shape
    factors = weight.new_zeros(num_heads, head_dim, head_dim, dtype=torch.float32)
    factors[:, : min(hidden, head_dim)] = torch.linalg.qr(weight.float(), mode="r").R
    return factors


def value_norms(
    paged: PagedKV,
    factors: Tensor,
    block_tables: Tensor,
    num_keys: Tensor,
    offsets: Tensor,
    max_num_keys: int,
    total_keys: int,
) -> Tensor:
    """The L2 norm of each key's projected value, the mean over the KV head's query heads.

    What a request gets does not depend on the others in its batch, bit for bit.

    Args:
        paged: the layer's values as stored, any float dtype; an fp8 cache viewed as its float8
            dtype. Its scale is left out, as one factor of all norms of the layer. Entries past
            num_keys[f] are not read.
        factors: (H, D, D), contiguous, as from `factors_of`. Values are rounded to its dtype.
        block_tables: (F, max_blocks) int32, unit stride along a row.
        num_keys: (F,) int32, on the device as is the next one; 0 for padding.
        offsets: (F + 1,) int64, exclusive cumulative sum of `num_keys`.
        max_num_keys: at least the largest of `num_keys`.
        total_keys: columns of the result, at least offsets[F].

    Returns:
        (G, total_keys) float32; columns from offsets[F] on are not written.
    """
    values, head_dim = paged.values, paged.head_dim
    norms = torch.empty(paged.num_heads, total_keys, dtype=torch.float32, device=values.device)
    if not (num_keys.shape[0] and max_num_keys and total_keys):
        return norms
    assert factors.is_contiguous()
    padded_dim = max(triton.next_power_of_2(head_dim), 16)
    block_keys = _BLOCK_KEYS[values.device.type]
    if values.is_cuda and padded_dim > 128:
        block_keys //= 2
    grid = (triton.cdiv(max_num_keys, block_keys), paged.num_heads, num_keys.shape[0])
    _value_norms_kernel[grid](
        values,
        *values.stride(),
        factors,
        block_tables,
        block_tables.stride(0),
        num_keys,
        offsets,
        norms,
        total_keys,
        GROUP=factors.shape[0] // paged.num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=paged.block_size,
        BLOCK_KEYS=block_keys,
        BLOCK_OUT=min(padded_dim, _BLOCK_OUT_BYTES // factors.element_size()),
        INTERPRETED=values.device.type == "cpu",  # Its dot knows no bfloat16.
        num_stages=1 if padded_dim > 128 else 2,
    )
    return norms


@triton.jit(
    do_not_specialize=["block_tables", "table_stride", "num_keys", "offsets", "total_keys"],
)
def _value_norms_kernel(
    values,
    value_block_stride,
    value_head_stride,
    value_entry_stride,
    value_channel_stride,
    factors,
    block_tables,
    table_stride,
    num_keys,
    offsets,
    norms,
    total_keys,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
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
    pointer = values + head * value_head_stride + block * value_block_stride
    pointer += (key % BLOCK_SIZE) * value_entry_stride
    channel = tl.arange(0, PADDED_DIM)
    within = channel < HEAD_DIM
    value = tl.load(
        pointer[:, None] + channel[None, :] * value_channel_stride,
        mask=exists[:, None] & within[None, :],
        other=0.0,
    )
    value = value.to(tl.float32).to(factors.dtype.element_ty)
    if INTERPRETED:
        value = value.to(tl.float32)
    total = tl.zeros((BLOCK_KEYS,), dtype=tl.float32)
    for member in range(GROUP):
        factor = factors + (head * GROUP + member) * HEAD_DIM * HEAD_DIM
        squares = tl.zeros((BLOCK_KEYS,), dtype=tl.float32)
        for begin in range(0, PADDED_DIM, BLOCK_OUT):
            out = begin + tl.arange(0, BLOCK_OUT)
            # (channels, rows of the factor): transposed for the product.
            part = tl.load(
                factor + out[None, :] * HEAD_DIM + channel[:, None],
                mask=within[:, None] & (out < HEAD_DIM)[None, :],
                other=0.0,
            )
            if INTERPRETED:
                part = part.to(tl.float32)
            projected = tl.dot(value, part, input_precision="ieee")
            squares += tl.sum(projected * projected, axis=1)
        total += tl.sqrt(squares)
    row = norms + head * total_keys + tl.load(offsets + request)
    tl.store(row + key, total / GROUP, mask=exists)


def value_norms_reference(
    paged: PagedKV, factors: Tensor, block_tables: Tensor, num_keys: Tensor, offsets: Tensor
) -> Tensor:
    """`value_norms` in plain torch, one request after the other; (G, offsets[F])."""
    norms = torch.zeros(paged.num_heads, int(offsets[-1]), device=paged.values.device)
    by_head = factors.float().unflatten(0, (paged.num_heads, -1))  # (G, H / G, D, D)
    for f, length in enumerate(num_keys.tolist()):
        values = paged.dense_values(block_tables[f], length).to(factors.dtype).float()
        projected = values[:, None] @ by_head.transpose(-1, -2)  # (G, H / G, length, D)
        columns = slice(int(offsets[f]), int(offsets[f]) + length)
        norms[:, columns] = projected.norm(dim=-1).mean(dim=1)
    return norms
