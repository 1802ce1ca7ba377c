"""Ways to prefill a chunk over a context in 8-bit pages, and over 16 bits; for ``int8_cache``."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.int8_pages import LAYOUTS, copied, entry_bytes
from benchmarks.ops.int8_unified import unified
from benchmarks.ops.retrieval_layer import DEVICE, DTYPE, ON_GPU, Call, Heads, Layer
from benchmarks.ops.sparse_prefill_ways import flash
from vllm_kvx.ops.int8.undo import undo_in_triton as undo

# Pages of an undone context, where FlashAttention is to find it by a block table. It copies pages
# of a tile's length as blocks; shorter ones entry by entry.
SCRATCH_PAGE = 128


def attention(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The reference, in float32: outputs (n, H, D), and each one's log-sum-exp (H, n).

    query: (n, H, D). keys, values: (N, G, D). causal: the last query sees all keys, the one before
    it one less.
    """
    q, k, v = (x.transpose(0, 1).float() for x in (query, keys, values))
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    logits = q @ k.mT * query.shape[-1] ** -0.5
    if causal:
        own = len(keys) - len(query) + torch.arange(len(query), device=query.device)
        later = torch.arange(len(keys), device=query.device) > own[:, None]
        logits = logits.masked_fill(later, -torch.inf)
    return (logits.softmax(dim=-1) @ v).transpose(0, 1), logits.logsumexp(dim=-1)


def flash_contiguous(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, out: Tensor
) -> Tensor:
    """FlashAttention 3 over keys and values (N, G, D) that follow one another; see ``attention``.

    Writes `out` (n, H, D) and returns the log-sum-exps (H, n). On a CPU the reference stands for
    it.
    """
    if not ON_GPU:
        found, lse = attention(query, keys, values, causal)
        out.copy_(found)
        return lse
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    n, length = len(query), len(keys)
    _, lse = flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=_starts(n),
        cu_seqlens_k=_starts(length),
        max_seqlen_q=n,
        max_seqlen_k=length,
        softmax_scale=query.shape[-1] ** -0.5,
        causal=causal,
        return_softmax_lse=True,
        fa_version=3,
    )
    return lse


_known_starts: dict[int, Tensor] = {}


def _starts(length: int) -> Tensor:
    """(2,) int32; kept, as a copy to the device would be timed."""
    if length not in _known_starts:
        _known_starts[length] = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    return _known_starts[length]


@dataclass(frozen=True)
class Way:
    """A way to run. scratch: bytes that it needs beside the pages; moved: what undoing moves."""

    run: Call
    scratch: int = 0
    moved: int = 0


class Prefill:
    """One layer's attention of a chunk of a prompt: `context` entries come before it.

    query, out: (chunk, H, D). key, value: (chunk, G, D), the chunk's own, as they were computed.
    layer, pages: all entries in 16 bits, and in 8 by layout, in blocks anywhere.
    """

    def __init__(
        self, shape: Heads, context: int, chunk: int, layouts: tuple[str, ...] = LAYOUTS
    ) -> None:
        self.context, self.chunk, self.length = context, chunk, context + chunk
        self.layer = Layer(shape, self.length, 1)
        self.pages = {layout: copied(self.layer, layout) for layout in layouts}
        self.table = self.layer.table[0]
        self.query = torch.randn(chunk, shape.heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.query)
        self.key, self.value = (x[context:].clone() for x in self.exact())

    def exact(self) -> tuple[Tensor, Tensor]:
        """Copies of all keys and values (N, G, D)."""
        paged, length = self.layer.paged, self.length
        keys, values = (x(self.table, length) for x in (paged.dense_keys, paged.dense_values))
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

    def scratch(self, length: int) -> tuple[Tensor, Tensor]:
        """Room for keys and for values (length, G, D)."""
        shape = self.layer.shape
        size = length, shape.kv_heads, shape.head_dim
        keys, values = (torch.empty(size, dtype=DTYPE, device=DEVICE) for _ in range(2))
        return keys, values

    def moved(self, length: int) -> int:
        """Bytes that undoing so many entries reads and writes."""
        shape = self.layer.shape
        each = entry_bytes(shape.head_dim) + self.layer.entry_bytes
        return length * shape.kv_heads * each

    def stock(self) -> Way:
        """FlashAttention 3 over the pages of 16 bits, as vLLM calls it."""
        keys, values = (x.transpose(1, 2) for x in (self.layer.paged.keys, self.layer.paged.values))
        return Way(self._by_table(keys, values, self.table))

    def unified(self, layout: str) -> Way:
        """vLLM's Triton attention over the pages of 8 bits: without scratch."""
        lens = torch.tensor([self.length], dtype=torch.int32, device=DEVICE)
        longest, starts = (self.chunk, self.length), _starts(self.chunk)
        where = (self.table[None], starts, lens, longest, self.out)
        return Way(unified(self.query, self.pages[layout].paged, *where))

    def _by_table(self, keys: Tensor, values: Tensor, table: Tensor) -> Call:
        """keys, values: (pages, page, G, D)."""
        lens = torch.tensor([self.length], dtype=torch.int32, device=DEVICE)
        longest, starts = (self.chunk, self.length), _starts(self.chunk)
        where = (table[None], starts, lens, longest, self.out)
        return partial(flash, self.query, keys, values, *where, splits=0)

    def contiguous(self) -> Way:
        """FlashAttention 3 over 16 bits that follow one another: as if undoing took no time."""
        return Way(partial(flash_contiguous, self.query, *self.exact(), True, self.out))

    def whole(self, layout: str, by_table: bool = False, own: str = "pages") -> Way:
        """The whole context undone, then FlashAttention 3 over it.

        by_table: it has a block table, as where decoding requests are in one call with prompts.
        own: whether the chunk's own entries are read from the `pages`, rounded as every later chunk
        will read them, so that outputs do not depend on where chunks end, or `exact`.
        """
        page = SCRATCH_PAGE if by_table else 1
        keys, values = self.scratch(-(-self.length // page) * page)
        paged, length, context = self.pages[layout].paged, self.length, self.context
        end = length if own == "pages" else context
        out = self.out
        if own == "exact" and not context:
            return Way(partial(flash_contiguous, self.query, self.key, self.value, True, out))
        if by_table:
            # It reads whole pages, and what lies behind the last entry is multiplied by 0.
            for x in (keys, values):
                x[length:] = 0
            table = torch.arange(len(keys) // page, dtype=torch.int32, device=DEVICE)
            k, v = (x.unflatten(0, (-1, page)) for x in (keys, values))
            attends = self._by_table(k, v, table)
        else:
            attends = partial(flash_contiguous, self.query, keys, values, True, out)

        def run() -> None:
            undo(paged, self.table[None], 0, _starts(end), end, keys, values)
            if own == "exact":
                keys[context:], values[context:] = self.key, self.value
            attends()

        copied = 2 * self.layer.entry_bytes * self.layer.shape.kv_heads * (length - end)
        return Way(run, _size(keys, values), self.moved(end) + copied)

    def undoing(self, layout: str) -> Way:
        """Undoing the whole context, alone."""
        keys, values = self.scratch(self.length)
        all_of_it = self.table[None], 0, _starts(self.length), self.length
        where = (self.pages[layout].paged, *all_of_it, keys, values)
        return Way(partial(undo, *where), _size(keys, values), self.moved(self.length))

    def sliced(self, layout: str, size: int) -> Way:
        """The context undone by `size` entries at a time, so that scratch is bounded.

        Attention to the chunk's own entries, which are exact, and to each slice is merged by the
        log-sum-exps: vLLM's merge_attn_states.
        """
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

        query, context, paged = self.query, self.context, self.pages[layout].paged
        if not context:
            return self.whole(layout, own="exact")
        keys, values = self.scratch(min(size, context))
        first_out, spare, of_slice = (torch.empty_like(query) for _ in range(3))
        lses = torch.empty(2, query.shape[1], self.chunk, dtype=torch.float32, device=DEVICE)

        def run() -> None:
            now, other = first_out, spare
            lse = flash_contiguous(query, self.key, self.value, True, now)
            for number, first in enumerate(range(0, context, size)):
                end = min(first + size, context)
                count = end - first
                undo(paged, self.table[None], first, _starts(count), count, keys, values)
                some = slice(0, count)
                found = flash_contiguous(query, keys[some], values[some], False, of_slice)
                to, to_lse = (self.out if end == context else other), lses[number % 2]
                merge_attn_states(to, now, lse, of_slice, found, to_lse)
                now, other, lse = to, now, to_lse

        scratch = _size(keys, values, first_out, spare, of_slice, lses, lses[0], lses[0])
        merges = -(-context // size)
        merged = merges * (3 * _size(query) + 3 * _size(lses[0]))
        return Way(run, scratch, self.moved(context) + merged)


def _size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.itemsize for x in tensors)
