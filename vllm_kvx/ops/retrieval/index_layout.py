"""How 1-bit keys, scales and zeros lie in memory: a sidecar in the tail of every KV cache page.

Retrieval scores them in place of the keys. A sidecar lives and dies with its block: sharing,
eviction and reuse of blocks need no bookkeeping. Only full groups are ever read, so only those are
written (``index_writer``). What a page holds is its index's choice; the `Sidecar` here serves the
indexes that keep a scale and a zero for each group of tokens and channel (Quest's pages), and those
that keep a bit for each channel of each key too (FIER).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV

# A kernel turns two bits into two float16 by one shift and one mask where they lie 16 apart, so
# channels 2j and 2j + 1 of a word's 32 are bits 15 - j and 31 - j.
WORD = 32


def channel_bits(head_dim: int) -> Tensor:
    """(D,) int64: the bit within its word (channel // 32) that holds a channel's sign."""
    channel = torch.arange(head_dim) % WORD
    return 15 - channel // 2 + 16 * (channel % 2)


@dataclass(frozen=True)
class PageShape:
    """What a page's sidecar has to cover on this rank.

    group: tokens that are quantised together; a block holds whole groups.
    """

    num_kv_heads: int
    block_size: int
    head_dim: int
    group: int

    def __post_init__(self) -> None:
        if self.block_size % self.group:
            raise ValueError(
                f"groups of {self.group} tokens do not divide KV blocks of {self.block_size}: set "
                f"--block-size to a multiple of {self.group}, or a smaller group"
            )

    @property
    def num_groups(self) -> int:
        """The number of groups in a block."""
        return self.block_size // self.group


def page_tails(kv_cache: Tensor, num_kv_heads: int, head_bytes: int) -> Tensor:
    """The bytes that follow each page of `kv_cache`, as strided views; nothing is copied.

    kv_cache (num_blocks, G, block_size, C) -> (num_blocks, G, head_bytes) uint8.

    Raises:
        ValueError: the pages have no room.
    """
    raw = kv_cache.view(torch.uint8)
    num_blocks = raw.shape[0]
    page, tail = raw[0].numel(), num_kv_heads * head_bytes
    # Block strides of one block are arbitrary, and there is nothing to step over.
    stride = raw.stride(0)
    if num_blocks > 1 and stride < page + tail:
        raise ValueError(f"pages of {stride} bytes have no room for {tail} more")
    return torch.as_strided(
        raw,
        (num_blocks, num_kv_heads, head_bytes),
        (stride, head_bytes, 1),
        raw.storage_offset() + page,
    )


@dataclass(frozen=True)
class Sidecar:
    """One layer's sidecar, as strided views of the pages' tails; nothing is copied.

    Attributes:
        shape: of its pages.
        codes: (num_blocks, G, block_size, D / 32) int32; empty without codes.
        scales: (num_blocks, G, block_size / group, 2, D) float16: scales, then zeros.
    """

    shape: PageShape
    codes: Tensor
    scales: Tensor

    @staticmethod
    def head_bytes(shape: PageShape, words: int) -> int:
        """Bytes of one head in a page. words: int32 words of codes for each token."""
        return shape.block_size * words * 4 + shape.num_groups * 2 * shape.head_dim * 2

    @classmethod
    def of(cls, kv_cache: Tensor, shape: PageShape, words: int) -> "Sidecar":
        """Views of the tails of `kv_cache`'s pages; see ``page_tails`` and ``head_bytes``."""
        tails = page_tails(kv_cache, shape.num_kv_heads, cls.head_bytes(shape, words))
        code_bytes = shape.block_size * words * 4
        codes = tails[..., :code_bytes].view(torch.int32)
        scales = tails[..., code_bytes:].view(torch.float16)
        return cls(
            shape,
            codes.unflatten(2, (shape.block_size, words)) if words else codes,
            scales.unflatten(2, (shape.num_groups, 2, shape.head_dim)),
        )

    def dense(self, block_table: Tensor, num_groups: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Copies out what one request's first `num_groups` groups (n) keep.

        block_table: (blocks,) integers, the request's blocks.
        Returns: signs (G, n * group, D) int8, None without codes; scales and zeros (G, n, D)
            float16. All are as ``quantize_keys`` returns them.
        """
        per_block = self.shape.num_groups
        group = torch.arange(num_groups, device=self.scales.device)
        blocks = block_table[group // per_block].long()
        scales, zeros = self.scales[blocks, :, group % per_block].permute(2, 1, 0, 3)
        if not self.codes.shape[-1]:
            return None, scales, zeros
        token = torch.arange(num_groups * self.shape.group, device=self.scales.device)
        per_block = self.shape.block_size
        words = self.codes[block_table[token // per_block].long(), :, token % per_block]
        bits = channel_bits(self.shape.head_dim).to(words.device)
        words = words.transpose(0, 1).repeat_interleave(WORD, dim=-1)
        return ((words >> bits & 1) * 2 - 1).to(torch.int8), scales, zeros

    def put_scales(self, block_table: Tensor, begin: int, scales: Tensor, zeros: Tensor) -> None:
        """Stores one request's scales and zeros (G, n, D) of the groups from `begin` on."""
        per_block = self.shape.num_groups
        group = torch.arange(begin, begin + scales.shape[1], device=self.scales.device)
        where = block_table[group // per_block].long(), slice(None), group % per_block
        self.scales[where] = torch.stack([scales, zeros], dim=2).transpose(0, 1)

    def put_signs(self, block_table: Tensor, begin: int, signs: Tensor) -> None:
        """Stores one request's signs (G, n * group, D) of the groups from `begin` on."""
        first, size = begin * self.shape.group, self.shape.block_size
        token = torch.arange(first, first + signs.shape[1], device=self.codes.device)
        blocks, slots = block_table[token // size].long(), token % size
        bits = channel_bits(self.shape.head_dim).to(signs.device)
        words = ((signs > 0).long() << bits).unflatten(-1, (-1, WORD)).sum(dim=-1)
        words = words - (words >> 31 << 32)  # As signed numbers.
        self.codes[blocks, :, slots] = words.transpose(0, 1).to(torch.int32)


def keys_of_groups(paged: PagedKV, block_table: Tensor, begin: int, end: int, group: int) -> Tensor:
    """Copies out one request's keys in the n groups [begin, end): (G, n * group, D).

    block_table: (blocks,) integers, the request's blocks. group: keys in a group. Keys of 8-bit
    integers come as what they stand for.
    """
    token = torch.arange(begin * group, end * group, device=paged.keys.device)
    return paged.keys_at(block_table, token).transpose(0, 1)
