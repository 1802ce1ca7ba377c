"""Which blocks of keys a block of prompt queries would read, and attention over those alone.

Queries and keys are cut into blocks, aligned to positions. A block of queries reads, for each KV
head and with all query heads of that one together, the first block of keys, those that it lies in
itself, and as few others as an estimate of its attention needs to reach a share, `cover`.

Four estimates: `antidiagonal`, XAttention's (arXiv 2503.16428); `pooled`, the query-aware pattern
of FlexPrefill (arXiv 2502.20766); `one_bit`, pooled queries against FIER's 1-bit keys, which a
server that retrieves has in its cache; and `oracle`, the attention itself. None looks at a token
after the block of queries.

Shapes: H query heads, G KV heads (heads of one group are neighbours), D channels; n queries at
positions `first` to m - 1 of m keys; Q blocks of these queries, K blocks of keys. `first` is at the
beginning of a block.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_kvx.equations import retrieval

METHODS = ("dense", "antidiagonal", "pooled", "one_bit", "oracle")
# Tokens of a quantisation group of 1-bit keys.
GROUP = 32
# Elements of a matrix of products that is held at once; and queries of one call of attention.
PRODUCTS, ROWS = 1 << 28, 2048


@dataclass(frozen=True)
class Setting:
    """How blocks are chosen.

    method: one of METHODS; `dense` reads all. cover: the share of the estimated attention.
    stride: of antidiagonals. pool: how many queries are pooled into one. by: how a block's 1-bit
    keys make a score, `sum` of their softmax or `max` of their products. heads: `mean` covers the
    mean of the query heads' attention, `union` covers each head's. block, key_block: tokens of a
    block of queries and of keys. tail: how many of the prompt's last blocks of queries read all.
    """

    method: str
    cover: float = 1.0
    stride: int = 16
    pool: int = 128
    by: str = "sum"
    heads: str = "mean"
    block: int = 128
    key_block: int = 128
    tail: int = 0

    def __post_init__(self) -> None:
        whole = self.block % self.key_block or self.block % self.pool or self.block % self.stride
        for wrong, what in (
            (self.method not in METHODS, f"method {self.method!r} is none of {', '.join(METHODS)}"),
            (not 0 < self.cover <= 1, f"cover={self.cover}: give more than 0 and at most 1"),
            (self.by not in ("sum", "max"), f"by={self.by}: give sum or max"),
            (self.heads not in ("mean", "union"), f"heads={self.heads}: give mean or union"),
            (whole, f"block={self.block} is no multiple of key_block, pool and stride"),
            (self.key_block % GROUP, f"key_block={self.key_block} is no multiple of {GROUP}"),
        ):
            if wrong:
                raise ValueError(what)

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """`method:name=value,...` as in `antidiagonal:cover=0.95,stride=8`.

        Raises:
            ValueError: there is no such method or parameter, or no such value of it.
        """
        method, _, rest = text.partition(":")
        kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(cls)[1:]}
        given: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ValueError(f"{text}: no parameter {name!r}; there are {', '.join(kinds)}")
            given[name] = kinds[name](value)
        return cls(method, **given)


def read_blocks(
    query: Tensor, keys: Tensor, codes: Tensor | None, first: int, scaling: float, setting: Setting
) -> Tensor:
    """(G, Q, K) bool: what blocks of the queries (H, n, D) read of keys (G, m, D), m = first + n.

    codes: (G, >= m, D), the 1-bit keys as `one_bit_keys` gives them; for that method alone.
    """
    if setting.method == "dense":
        blocks = -(-query.shape[1] // setting.block)
        seen = _seen(blocks, keys.shape[1], first, setting, keys.device)
        return seen.expand(len(keys), -1, -1)
    shares = estimate(query, keys, codes, first, scaling, setting)
    return cover(shares, len(keys), first, keys.shape[1], setting)


def estimate(
    query: Tensor, keys: Tensor, codes: Tensor | None, first: int, scaling: float, setting: Setting
) -> Tensor:
    """(H, Q, K) float32: the share of each block of keys in a head's attention, by the method.

    Products are made in the inputs' dtype. See `read_blocks`.
    """
    assert keys.shape[1] == first + query.shape[1] and first % setting.block == 0
    if setting.method == "antidiagonal":
        return _antidiagonal(query, keys, first, scaling, setting)
    if setting.method == "pooled":
        return _pooled(query, keys, first, scaling, setting)
    if setting.method == "one_bit":
        assert codes is not None
        return _one_bit(query, codes[:, : keys.shape[1]], first, scaling, setting)
    return _oracle(query, keys, first, scaling, setting)


def cover(shares: Tensor, kv_heads: int, first: int, length: int, setting: Setting) -> Tensor:
    """(G, Q, K) bool: the fewest blocks of keys whose shares (H, Q, K) reach the cover.

    length: m. The first block and those that the queries lie in are always read, and count.
    """
    grouped = shares.unflatten(0, (kv_heads, -1))
    if setting.heads == "mean":
        grouped = grouped.mean(dim=1, keepdim=True)
    seen = _seen(shares.shape[1], length, first, setting, shares.device)
    forced = seen & ~_earlier(shares.shape[1], length, first, setting, shares.device)
    forced[:, 0] = True
    best = (grouped + 2 * forced).masked_fill(~seen, -1).sort(dim=-1, descending=True, stable=True)
    inside = grouped.gather(-1, best.indices)
    # A block is needed if those before it do not reach the cover.
    needed = inside.cumsum(dim=-1) - inside < setting.cover
    reads = torch.zeros_like(needed).scatter_(-1, best.indices, needed)
    return (reads | forced).any(dim=1) & seen


def one_bit_keys(keys: Tensor) -> Tensor:
    """Keys (G, m, D) as their 1-bit codes read, in the same dtype; the last group may be short."""
    short = -keys.shape[1] % GROUP
    whole = torch.cat([keys, keys[:, -1:].expand(-1, short, -1)], dim=1)
    signs, *halves = retrieval.quantize_keys(whole, GROUP)
    scales, zeros = (x.float().repeat_interleave(GROUP, dim=1) for x in halves)
    return (zeros + scales * signs)[:, : keys.shape[1]].to(keys.dtype)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reads: Tensor,
    first: int,
    scaling: float,
    setting: Setting,
) -> Tensor:
    """Causal attention (H, n, D) of the queries to the blocks that they read; masked, not skipped.

    keys, values: (G, m, D). reads: (G, Q, K) bool.
    """
    kv_heads, length = keys.shape[:2]
    out = torch.empty_like(query)
    step = max(ROWS // setting.block, 1)
    positions = torch.arange(length, device=query.device)
    for begin in range(0, reads.shape[1], step):
        rows = slice(begin * setting.block, min((begin + step) * setting.block, query.shape[1]))
        end = first + rows.stop
        mask = reads[:, begin : begin + step].repeat_interleave(setting.block, dim=1)
        mask = mask[:, : rows.stop - rows.start].repeat_interleave(setting.key_block, dim=2)
        mask = mask[..., :end] & (positions[:end] <= positions[first + rows.start : end, None])
        of_group = query[:, rows].unflatten(0, (kv_heads, -1))
        # Every query head with keys of its own, which kernels that take a mask need.
        k, v = (x[:, None, :end].expand(-1, of_group.shape[1], -1, -1) for x in (keys, values))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            found = F.scaled_dot_product_attention(
                of_group, k, v, attn_mask=mask[:, None], scale=scaling
            )
        out[:, rows] = found.flatten(0, 1)
    return out


def causal_blocks(reads: Tensor, first: int, length: int, setting: Setting) -> tuple[int, int]:
    """How many blocks are read, and how many causal attention would, of all KV heads."""
    seen = _seen(reads.shape[1], length, first, setting, reads.device)
    return int(reads.sum()), int(seen.sum()) * len(reads)


def block_means(values: Tensor, unit: int) -> Tensor:
    """Means of (..., N, D) over `unit` rows each, of those that there are, in the same dtype."""
    sums = _cut(values, unit).sum(dim=-2, dtype=torch.float32)
    counts = torch.full((sums.shape[-2], 1), float(unit), device=values.device)
    counts[-1] -= -values.shape[-2] % unit
    return (sums / counts).to(values.dtype)


def _bounds(
    blocks: int, length: int, first: int, setting: Setting, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(Q, 1) positions where blocks of queries begin, and (K,) where those of keys do."""
    rows = first + torch.arange(blocks, device=device)[:, None] * setting.block
    return rows, torch.arange(0, length, setting.key_block, device=device)


def _seen(blocks: int, length: int, first: int, setting: Setting, device: torch.device) -> Tensor:
    """(Q, K) bool: blocks of keys that begin before the end of the block of queries."""
    rows, columns = _bounds(blocks, length, first, setting, device)
    return columns < rows + setting.block


def _earlier(
    blocks: int, length: int, first: int, setting: Setting, device: torch.device
) -> Tensor:
    """(Q, K) bool: blocks of keys before the block of queries."""
    rows, columns = _bounds(blocks, length, first, setting, device)
    return columns < rows


def _cut(values: Tensor, unit: int) -> Tensor:
    """(..., N, D) -> (..., N / unit, unit, D), filled up with zeros."""
    return F.pad(values, (0, 0, 0, -values.shape[-2] % unit)).unflatten(-2, (-1, unit))


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """(H, n, m) float32 of (H, n, D) and (G, m, D)."""
    grouped = query.unflatten(0, (len(keys), -1))
    found = grouped.flatten(1, 2) @ keys.mT
    return found.unflatten(1, grouped.shape[1:3]).flatten(0, 1).float()


def _by_block(values: Tensor, unit: int) -> Tensor:
    """Sums of (..., N) over `unit` columns each."""
    return F.pad(values, (0, -values.shape[-1] % unit)).unflatten(-1, (-1, unit)).sum(dim=-1)


def _antidiagonal(
    query: Tensor, keys: Tensor, first: int, scaling: float, setting: Setting
) -> Tensor:
    """XAttention: softmax over tiles of stride x stride, each by the mean of its antidiagonal."""
    stride = setting.stride
    rows = _cut(query, stride).flip(-2).flatten(-2)
    columns = _cut(keys, stride).flatten(-2)
    tiles = rows.shape[1]
    # Queries that each tile has: the last one may be short.
    counts = torch.full((tiles, 1), float(stride), device=query.device)
    counts[-1] -= -query.shape[1] % stride
    own = first // stride + torch.arange(tiles, device=query.device)[:, None]
    later = torch.arange(columns.shape[1], device=query.device) > own
    found = []
    of_block, step = setting.block // stride, _step(query, columns.shape[1], setting, stride)
    for begin in range(0, tiles, step * of_block):
        part = slice(begin, begin + step * of_block)
        logits = _products(rows[:, part], columns) * (scaling / counts[part])
        probs = logits.masked_fill_(later[part], -torch.inf).softmax(dim=-1)
        shares = _by_block(probs, setting.key_block // stride)
        found.append(block_means(shares, of_block))
    return torch.cat(found, dim=1)


def _pooled(query: Tensor, keys: Tensor, first: int, scaling: float, setting: Setting) -> Tensor:
    """FlexPrefill: softmax over blocks of mean queries times mean keys."""
    rows = block_means(query, setting.pool)
    logits = _products(rows, block_means(keys, setting.key_block)) * scaling
    ends = first + (torch.arange(rows.shape[1], device=query.device)[:, None] + 1) * setting.pool
    begins = torch.arange(logits.shape[-1], device=query.device) * setting.key_block
    probs = logits.masked_fill_(begins >= ends, -torch.inf).softmax(dim=-1)
    return block_means(probs, setting.block // setting.pool)


def _one_bit(query: Tensor, codes: Tensor, first: int, scaling: float, setting: Setting) -> Tensor:
    """Softmax of mean queries times 1-bit keys, with retrieval's factor, summed by block."""
    rows = block_means(query, setting.pool)
    tokens = torch.arange(codes.shape[1], device=query.device)
    ends = first + (torch.arange(rows.shape[1], device=query.device)[:, None] + 1) * setting.pool
    of_block = setting.block // setting.pool
    step = _step(query, codes.shape[1], setting, setting.pool) * of_block
    found = []
    for begin in range(0, rows.shape[1], step):
        part = slice(begin, begin + step)
        logits = _products(rows[:, part], codes) * (scaling * retrieval.SOFTMAX_FACTOR)
        logits.masked_fill_(tokens >= ends[part], -torch.inf)
        if setting.by == "max":
            short = -logits.shape[-1] % setting.key_block
            best = F.pad(logits, (0, short), value=-torch.inf)
            best = best.unflatten(-1, (-1, setting.key_block)).amax(dim=-1)
            shares = best.softmax(dim=-1)
        else:
            shares = _by_block(logits.softmax(dim=-1), setting.key_block)
        found.append(block_means(shares, of_block))
    return torch.cat(found, dim=1)


def _oracle(query: Tensor, keys: Tensor, first: int, scaling: float, setting: Setting) -> Tensor:
    """The attention itself, a mean over the queries of a block."""
    positions = torch.arange(keys.shape[1], device=query.device)
    found = []
    step = _step(query, keys.shape[1], setting, 1) * setting.block
    for begin in range(0, query.shape[1], step):
        rows = slice(begin, min(begin + step, query.shape[1]))
        end = first + rows.stop
        logits = _products(query[:, rows], keys[:, :end]) * scaling
        logits.masked_fill_(positions[:end] > positions[first + rows.start : end, None], -torch.inf)
        shares = _by_block(logits.softmax(dim=-1), setting.key_block)
        shares = F.pad(shares, (0, -(-keys.shape[1] // setting.key_block) - shares.shape[-1]))
        found.append(block_means(shares, setting.block))
    return torch.cat(found, dim=1)


def _step(query: Tensor, columns: int, setting: Setting, unit: int) -> int:
    """Blocks of queries whose products with so many columns are held at once."""
    of_block = query.shape[0] * (setting.block // unit) * columns
    return max(PRODUCTS // of_block, 1)
