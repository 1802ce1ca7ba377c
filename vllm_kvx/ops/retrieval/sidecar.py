"""The copy of a layer's keys that retrieval scores: in the tail of every KV cache page.

FIER's holds 1-bit codes and, for each group of tokens and channel, a scale and a zero; Quest's the
scales and zeros alone, of pages. It lives and dies with its block: sharing, eviction and reuse of
blocks need no bookkeeping. Only full groups are ever read, so only those are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.buffer_utils import _load_ptr

from vllm_kvx.equations.retrieval import quantize_keys
from vllm_kvx.ops.paged import PagedKV

# A kernel turns two bits into two float16 by one shift and one mask where they lie 16 apart, so
# channels 2j and 2j + 1 of a word's 32 are bits 15 - j and 31 - j.
WORD = 32


def channel_bits(head_dim: int) -> Tensor:
    """(D,) int64: the bit within its word (channel // 32) that holds a channel's sign."""
    channel = torch.arange(head_dim) % WORD
    return 15 - channel // 2 + 16 * (channel % 2)


@dataclass(frozen=True)
class SidecarLayout:
    """Shape of the sidecar of one page.

    group: tokens that share a scale and a zero; has_codes: whether there are 1-bit keys too.
    """

    num_kv_heads: int
    block_size: int
    head_dim: int
    group: int
    has_codes: bool

    def __post_init__(self) -> None:
        if self.block_size % self.group:
            raise ValueError(
                f"groups of {self.group} tokens do not divide KV blocks of {self.block_size}: set "
                f"--block-size to a multiple of {self.group}, or a smaller group"
            )
        if self.has_codes and self.head_dim % WORD:
            raise ValueError(
                f"1-bit keys need a head dimension that is a multiple of {WORD}, this model has "
                f"{self.head_dim}: serve it without fier"
            )

    @property
    def code_bytes(self) -> int:
        """Bytes of one head's codes in a page."""
        return self.block_size * self.head_dim // 8 if self.has_codes else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a page."""
        return self.code_bytes + self.block_size // self.group * 2 * self.head_dim * 2

    @property
    def page_bytes(self) -> int:
        """Bytes that the sidecar adds to a page."""
        return self.num_kv_heads * self.head_bytes


@dataclass(frozen=True)
class Sidecar:
    """One layer's sidecar, as strided views of the pages' tails; nothing is copied.

    Attributes:
        layout: its shape.
        codes: (num_blocks, G, block_size, D / 32) int32; empty without codes.
        scales: (num_blocks, G, block_size / group, 2, D) float16: scales, then zeros.
    """

    layout: SidecarLayout
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, kv_cache: Tensor, layout: SidecarLayout) -> "Sidecar":
        """Views of the bytes that follow each page of `kv_cache`, (num_blocks, G, block_size, C).

        Raises:
            ValueError: the pages have no room.
        """
        raw = kv_cache.view(torch.uint8)
        num_blocks = raw.shape[0]
        page = raw[0].numel()
        # Block strides of one block are arbitrary, and there is nothing to step over.
        stride = raw.stride(0)
        if num_blocks > 1 and stride < page + layout.page_bytes:
            raise ValueError(f"pages of {stride} bytes have no room for {layout.page_bytes} more")
        start = raw.storage_offset() + page
        heads, groups = layout.num_kv_heads, layout.block_size // layout.group
        flat = torch.as_strided(
            raw,
            (num_blocks, heads, layout.head_bytes),
            (stride, layout.head_bytes, 1),
            start,
        )
        codes = flat[..., : layout.code_bytes].view(torch.int32)
        scales = flat[..., layout.code_bytes :].view(torch.float16)
        return cls(
            layout,
            codes.unflatten(2, (layout.block_size, -1)) if layout.has_codes else codes,
            scales.unflatten(2, (groups, 2, layout.head_dim)),
        )

    def dense(self, block_table: Tensor, num_groups: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """One request's first groups, copied out: signs (G, n * group, D) int8 or None, and
        scales and zeros (G, n, D) float16, as ``quantize_keys`` returns them."""
        per_block = self.scales.shape[2]
        group = torch.arange(num_groups, device=self.scales.device)
        blocks = block_table[group // per_block].long()
        scales, zeros = self.scales[blocks, :, group % per_block].permute(2, 1, 0, 3)
        if not self.layout.has_codes:
            return None, scales, zeros
        size = self.layout.group
        token = torch.arange(num_groups * size, device=self.scales.device)
        per_block *= size
        words = self.codes[block_table[token // per_block].long(), :, token % per_block]
        bits = channel_bits(self.layout.head_dim).to(words.device)
        words = words.transpose(0, 1).repeat_interleave(WORD, dim=-1)
        return ((words >> bits & 1) * 2 - 1).to(torch.int8), scales, zeros


def write_groups_reference(
    paged: PagedKV, sidecar: Sidecar, block_table: Tensor, begin: int, end: int
) -> None:
    """Quantises groups [begin, end) of one request in one layer, in plain torch."""
    layout = sidecar.layout
    size, per_block = layout.group, layout.block_size // layout.group
    token = torch.arange(begin * size, end * size, device=paged.keys.device)
    blocks, slots = block_table[token // layout.block_size].long(), token % layout.block_size
    signs, scales, zeros = quantize_keys(paged.keys[blocks, :, slots].transpose(0, 1), size)
    group = torch.arange(begin, end, device=paged.keys.device)
    where = block_table[group // per_block].long(), slice(None), group % per_block
    sidecar.scales[where] = torch.stack([scales, zeros], dim=2).transpose(0, 1)
    if layout.has_codes:
        bits = channel_bits(layout.head_dim).to(signs.device)
        words = ((signs > 0).long() << bits).unflatten(-1, (-1, WORD)).sum(dim=-1)
        words = words - (words >> 31 << 32)  # As signed numbers.
        sidecar.codes[blocks, :, slots] = words.transpose(0, 1).to(torch.int32)


class SidecarWriter:
    """Quantises groups of several layers in one launch.

    The layers' pages must be alike: shape, strides, dtype. Their addresses are fixed once vLLM has
    allocated its cache.
    """

    def __init__(
        self,
        layers: Sequence[tuple[PagedKV, Sidecar]],
        groups: Sequence[int],
        segments: Sequence[int],
    ) -> None:
        """layers: in model order; groups, segments: KV group and segment of each."""
        keys, first = [paged.keys for paged, _ in layers], layers[0]
        for paged, sidecar in layers:
            alike = paged.keys.stride() == first[0].keys.stride()
            if not alike or sidecar.scales.stride() != first[1].scales.stride():
                raise ValueError("layers differ in how their KV cache pages are laid out")
        self.paged, self.sidecar = first
        device = keys[0].device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._key_ptrs = column([k.data_ptr() for k in keys])
        self._code_ptrs = column([s.codes.data_ptr() for _, s in layers])
        self._scale_ptrs = column([s.scales.data_ptr() for _, s in layers])
        self._groups = column(list(groups))
        self._segments = column(list(segments))
        self.num_layers = len(layers)

    def write(
        self,
        jobs: Tensor,
        block_table_ptrs: Tensor,
        block_table_strides: Tensor,
        layer: int | None = None,
    ) -> None:
        """Quantises `jobs` in all layers of their segments, or in one layer.

        Args:
            jobs: (J, 3) int32: segment, row of the block tables, and index of the group. Full
                groups, whose keys are in the cache.
            block_table_ptrs, block_table_strides: (KV groups,), vLLM's block table layout.
        """
        if not jobs.shape[0]:
            return
        layout, keys = self.sidecar.layout, self.paged.keys
        codes, scales = self.sidecar.codes, self.sidecar.scales
        first, count = (0, self.num_layers) if layer is None else (layer, 1)
        dummy = torch.empty(1, dtype=keys.dtype, device=keys.device)
        _write_groups_kernel[(jobs.shape[0], layout.num_kv_heads, count)](
            jobs,
            self._key_ptrs,
            self._code_ptrs,
            self._scale_ptrs,
            self._groups,
            self._segments,
            block_table_ptrs,
            block_table_strides,
            dummy,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            keys.stride(3),
            codes.stride(0),
            codes.stride(1),
            scales.stride(0),
            scales.stride(1),
            first,
            BLOCK_SIZE=layout.block_size,
            GROUP=layout.group,
            D=layout.head_dim,
            HAS_CODES=layout.has_codes,
        )


@triton.jit
def _write_groups_kernel(
    jobs,
    key_ptrs,
    code_ptrs,
    scale_ptrs,
    layer_groups,
    layer_segments,
    block_table_ptrs,
    block_table_strides,
    dummy,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    key_dim_stride,
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
    job = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2) + first_layer
    if tl.load(jobs + job * 3) != tl.load(layer_segments + layer):
        return
    request = tl.load(jobs + job * 3 + 1).to(tl.int64)
    group = tl.load(jobs + job * 3 + 2)
    kv_group = tl.load(layer_groups + layer)
    table = _load_ptr(block_table_ptrs + kv_group, tl.int32)
    table += request * tl.load(block_table_strides + kv_group)
    block = tl.load(table + group * GROUP // BLOCK_SIZE).to(tl.int64)
    slot = group * GROUP % BLOCK_SIZE

    keys = tl.load(key_ptrs + layer).to(tl.pointer_type(dummy.dtype.element_ty))
    keys += block * key_block_stride + head * key_head_stride
    token = tl.arange(0, GROUP)
    WORDS: tl.constexpr = D // 32 if HAS_CODES else 1
    # Word by word, its even and its odd channels apart: a group of 128 tokens with 256 channels
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
