"""Quantises keys and values and writes them to pages of 8-bit entries."""

from torch import Tensor

from vllm_kvx.ops.int8.numbers import quantized
from vllm_kvx.ops.paged import PagedKV


def store(paged: PagedKV, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Quantises keys and values and writes them with their scales.

    On a GPU by vLLM's own kernel, on a CPU in plain torch. Neither waits for the device.

    Args:
        paged: of 8-bit integers, see ``PagedKV.of_int8``.
        key, value: (n, G, D), any float dtype, contiguous in D.
        slots: (m,) int64, block x block_size + place; below 0 for tokens that are not stored. Of
            keys and values the first m are; a CUDA graph pads these.
    """
    (store_in_torch if paged.keys.device.type == "cpu" else store_in_triton)(
        paged, key, value, slots
    )


def store_in_torch(paged: PagedKV, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """The reference of ``store``."""
    key_scales, value_scales = _scales(paged)
    stored = (slots >= 0).nonzero()[:, 0]
    at = slots[stored]
    where = at // paged.block_size, slice(None), at % paged.block_size
    paged.keys[where], key_scales[where] = quantized(key[stored])
    paged.values[where], value_scales[where] = quantized(value[stored])


def store_in_triton(paged: PagedKV, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """``store`` by vLLM's own kernel, which takes any strides of entries and scales."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode

    count = slots.shape[0]
    if not count:
        return
    key_scales, value_scales = _scales(paged)
    triton_reshape_and_cache_flash_per_token_head_quant(
        key[:count],
        value[:count],
        paged.keys.transpose(1, 2),
        paged.values.transpose(1, 2),
        key_scales.transpose(1, 2),
        value_scales.transpose(1, 2),
        slots,
        KVQuantMode.INT8_PER_TOKEN_HEAD,
    )


def _scales(paged: PagedKV) -> tuple[Tensor, Tensor]:
    assert paged.key_scales is not None and paged.value_scales is not None
    return paged.key_scales, paged.value_scales
