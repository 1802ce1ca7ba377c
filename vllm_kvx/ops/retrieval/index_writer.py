"""Writes what retrieval scores, in one launch for the groups of layers whose pages are alike."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.buffer_utils import _load_ptr

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import Sidecar


class SidecarWriter:
    """Quantises groups of several layers in one launch, or in one for each kind of page.

    Layers may skip a quantized KV cache, and have pages of another dtype and size. Of keys in 8-bit
    integers, what they stand for is quantised. The pages' addresses are fixed once vLLM has
    allocated its cache.
    """

    def __init__(
        self,
        layers: Sequence[tuple[PagedKV, Sidecar]],
        groups: Sequence[int],
        stages: Sequence[int],
        *,
        has_codes: bool,
    ) -> None:
        """layers: in model order; groups, stages: KV group and KV stage of each.

        has_codes: keys get 1-bit codes beside the scales and zeros of their groups.
        """
        kinds: dict[Hashable, list[int]] = {}
        for number, (paged, sidecar) in enumerate(layers):
            keys = paged.keys
            kind = keys.dtype, keys.stride(), sidecar.codes.stride(), sidecar.scales.stride()
            of_keys = paged.key_scales
            kinds.setdefault((*kind, None if of_keys is None else of_keys.stride()), []).append(
                number
            )
        self._writers = [
            _AlikeWriter(
                [layers[number] for number in numbers],
                [groups[number] for number in numbers],
                [stages[number] for number in numbers],
                has_codes,
            )
            for numbers in kinds.values()
        ]
        # By layer, its writer and its place among that one's layers.
        self._places = {
            number: (writer, place)
            for writer, numbers in zip(self._writers, kinds.values(), strict=True)
            for place, number in enumerate(numbers)
        }

    def write(
        self,
        full_groups: Tensor,
        block_table_ptrs: Tensor,
        block_table_strides: Tensor,
        layer: int | None = None,
    ) -> None:
        """Quantises `full_groups` in all layers of their stages, or in one: see ``base.Writer``."""
        if not full_groups.shape[0]:
            return
        where = full_groups, block_table_ptrs, block_table_strides
        if layer is None:
            for writer in self._writers:
                writer.write(*where, 0, writer.num_layers)
        else:
            writer, place = self._places[layer]
            writer.write(*where, place, 1)


class _AlikeWriter:
    """Quantises groups of layers whose pages are alike: shape, strides, dtype."""

    def __init__(
        self,
        layers: Sequence[tuple[PagedKV, Sidecar]],
        groups: Sequence[int],
        stages: Sequence[int],
        has_codes: bool,
    ) -> None:
        keys = [paged.keys for paged, _ in layers]
        self.paged, self.sidecar = layers[0]
        device = keys[0].device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._key_ptrs = column([k.data_ptr() for k in keys])
        of_keys = [paged.key_scales for paged, _ in layers]
        self._key_scale_ptrs = None
        if of_keys[0] is not None:
            self._key_scale_ptrs = column([s.data_ptr() for s in of_keys if s is not None])
        self._code_ptrs = column([s.codes.data_ptr() for _, s in layers])
        self._scale_ptrs = column([s.scales.data_ptr() for _, s in layers])
        self._groups = column(list(groups))
        self._stages = column(list(stages))
        self.num_layers, self._has_codes = len(layers), has_codes

    def write(
        self,
        full_groups: Tensor,
        block_table_ptrs: Tensor,
        block_table_strides: Tensor,
        first: int,
        count: int,
    ) -> None:
        """Quantises `full_groups` in the `count` layers from the one at place `first` on."""
        shape, keys = self.sidecar.shape, self.paged.keys
        codes, scales = self.sidecar.codes, self.sidecar.scales
        dummy = torch.empty(1, dtype=keys.dtype, device=keys.device)
        key_scales = self.paged.key_scales
        _write_groups_kernel[(full_groups.shape[0], shape.num_kv_heads, count)](
            full_groups,
            self._key_ptrs,
            self._key_scale_ptrs,
            self._code_ptrs,
            self._scale_ptrs,
            self._groups,
            self._stages,
            block_table_ptrs,
            block_table_strides,
            dummy,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            keys.stride(3),
            *((0, 0, 0) if key_scales is None else key_scales.stride()),
            codes.stride(0),
            codes.stride(1),
            scales.stride(0),
            scales.stride(1),
            first,
            BLOCK_SIZE=shape.block_size,
            GROUP=shape.group,
            D=shape.head_dim,
            HAS_CODES=self._has_codes,
        )


# The first layer is 0, or any where a request resumes: by value it would be three kernels.
@triton.jit(do_not_specialize=["first_layer"])
def _write_groups_kernel(
    full_groups,
    key_ptrs,
    key_scale_ptrs,
    code_ptrs,
    scale_ptrs,
    layer_groups,
    layer_stages,
    block_table_ptrs,
    block_table_strides,
    dummy,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    key_dim_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    key_scale_slot_stride,
    code_block_stride,
    code_head_stride,
    scale_block_stride,
    scale_head_stride,
    first_layer,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HAS_CODES: tl.constexpr,
):
    entry = full_groups + tl.program_id(0) * 3
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2) + first_layer
    if tl.load(entry) != tl.load(layer_stages + layer):
        return
    request = tl.load(entry + 1).to(tl.int64)
    group = tl.load(entry + 2)
    kv_group = tl.load(layer_groups + layer)
    table = _load_ptr(block_table_ptrs + kv_group, tl.int32)
    table += request * tl.load(block_table_strides + kv_group)
    block = tl.load(table + group * GROUP // BLOCK_SIZE).to(tl.int64)
    slot = group * GROUP % BLOCK_SIZE

    keys = tl.load(key_ptrs + layer).to(tl.pointer_type(dummy.dtype.element_ty))
    keys += block * key_block_stride + head * key_head_stride
    token = tl.arange(0, GROUP)
    if key_scale_ptrs is not None:
        of_keys = tl.load(key_scale_ptrs + layer).to(tl.pointer_type(tl.float32))
        of_keys += block * key_scale_block_stride + head * key_scale_head_stride
        key_scale = tl.load(of_keys + (slot + token) * key_scale_slot_stride)
    WORDS: tl.constexpr = D // 32 if HAS_CODES else 1
    # Word by word, its even and its odd channels apart: a group of 256 tokens with 256 channels
    # would not fit into registers.
    CHANNELS: tl.constexpr = D // WORDS
    pair = tl.arange(0, CHANNELS // 2)
    scales = tl.load(scale_ptrs + layer).to(tl.pointer_type(tl.float16))
    scales += block * scale_block_stride + head * scale_head_stride
    scales += (slot // GROUP) * (2 * D)
    for word in tl.static_range(WORDS):
        code = tl.zeros((GROUP,), dtype=tl.int32)
        for odd in tl.static_range(2):
            channel = word * CHANNELS + pair * 2 + odd
            at = (slot + token)[:, None] * key_slot_stride + channel[None, :] * key_dim_stride
            key = tl.load(keys + at).to(tl.float32)
            if key_scale_ptrs is not None:
                key = key * key_scale[:, None]
            high = tl.max(key, axis=0)
            low = tl.min(key, axis=0)
            zero = (high + low) / 2
            scale = (high - low) / 2
            if HAS_CODES:
                bit = (key >= zero[None, :]).to(tl.int32)
                code += tl.sum(bit << (15 - pair + 16 * odd)[None, :], axis=1)
            tl.store(scales + channel, tl.minimum(tl.maximum(scale, -65504.0), 65504.0))
            tl.store(scales + D + channel, tl.minimum(tl.maximum(zero, -65504.0), 65504.0))
        if HAS_CODES:
            codes = tl.load(code_ptrs + layer).to(tl.pointer_type(tl.int32))
            codes += block * code_block_stride + head * code_head_stride
            tl.store(codes + (slot + token) * WORDS + word, code)
