"""Dense reference for FIER and Quest: a decode step reads a few of the entries that are stored.

A prompt runs and is stored as the other references say: all of it, or what retention and SPEED
leave. Every generated token is stored too. A layer's entries, in the order of their slots, form
groups; from the third layer on, a step scores the full groups by 1-bit keys (FIER, token by token)
or by bounds (Quest, page by page), and attends exactly to the best of them and to the newest group.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import fastkv, speed, structkv, swiftkv
from .fastkv import Keep, KeptResult, load
from .masked import run_row
from .structkv import Struct
from .swiftkv import Swift

FULL = Keep()
# [layer][KV head] -> prompt positions in the order of their slots.
Slots = list[list[list[int]]]
# Relative difference of keys and queries that two float32 implementations may have.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Retrieve:
    """How many entries a step reads, and by which score."""

    budget: int  # tokens per KV head; no more stored entries than that are all read
    group: int = 32  # tokens that share a scale and a zero; Quest's page
    pages: bool = False  # Quest: whole groups are scored and read
    reduction: str = "max"  # over the query heads of a KV head: max, sum or softmax
    dense_below: int = 0  # fewer stored entries than that are all read
    dense_layers: int = 2
    reuse_layers: int = 1  # layers that read what the first of so many that retrieve chose

    def __post_init__(self) -> None:
        if self.reduction not in ("max", "sum", "softmax"):
            raise ValueError(f"reduction={self.reduction} is none of max, sum, softmax")
        if self.budget < 1 or self.group < 1 or (self.pages and self.budget < self.group):
            raise ValueError(f"{self}: nothing fits into the budget")


@dataclass(frozen=True)
class Choice:
    """What one KV head reads in one step of one layer."""

    entries: list[int]  # ascending indices of stored entries
    positions: list[int]  # of their tokens, ascending
    # Score of the worst unit read less that of the best one left out; inf without a choice.
    margin: float
    # The same of the lowest and the highest scores that keys and queries off by ROUNDING could
    # have: above 0 the choice is certain. Such a difference may flip a bit or a float16.
    slack: float


@dataclass(frozen=True)
class ReadResult(KeptResult):
    """A result with the choices behind it. Those of retention are the fields of `KeptResult`."""

    slots: Slots  # where retention left the prompt
    # [step][layer][KV head]; step i runs output token i, so the last token has none.
    choices: list[list[list[Choice]]]

    @property
    def clear_steps(self) -> int:
        """How many of the output tokens follow from choices that are all certain."""
        for step, layers in enumerate(self.choices):
            if min(choice.slack for layer in layers for choice in layer) <= 0:
                return step + 1
        return len(self.tokens)


def generate(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    retrieve: Retrieve,
    keep: Keep | Struct | Swift = FULL,
    *,
    slots: Slots | None = None,
    max_tokens: int,
    ignore_eos: bool = True,
) -> ReadResult:
    """At least one greedy token under `retrieve`, the prompt propagated and retained by `keep`.

    `slots` are the prompt's entries if they are not what `compacted` says: any order, and any part
    of what `keep` retains, as many for each KV head of a layer.
    """
    model = load(model)
    eos = model.config.eos_token_id
    stop = set() if ignore_eos or eos is None else {eos} if isinstance(eos, int) else set(eos)
    store, row = prefill(model, prompt, keep, slots)
    rows, tokens = [row], [int(row.argmax())]
    while len(tokens) < max_tokens and tokens[-1] not in stop:
        rows.append(store.step(model, tokens[-1], retrieve))
        tokens.append(int(rows[-1].argmax()))
    return store.result(tokens, rows)


def score(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    retrieve: Retrieve,
    keep: Keep | Struct | Swift = FULL,
    *,
    slots: Slots | None = None,
) -> ReadResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    store, row = prefill(model, prompt, keep, slots)
    rows = [row, *(store.step(model, token, retrieve) for token in generated[:-1])]
    return store.result(list(generated), rows)


def prefill(
    model: PreTrainedModel,
    prompt: list[int],
    keep: Keep | Struct | Swift,
    slots: Slots | None = None,
) -> tuple["Store", Tensor]:
    """The entries after `prompt`, and the log-softmax (1, V) of its last token."""
    runs: dict[type, Any] = {Struct: structkv.prefill, Swift: swiftkv.prefill}
    context, row = runs.get(type(keep), fastkv.prefill)(model, prompt, keep)
    if slots is None:
        slots = context.retained if isinstance(keep, Swift) else compacted(context, keep)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer, heads in enumerate(slots):
        rows = [
            [retained.index(position) for position in order]
            for retained, order in zip(context.retained[layer], heads, strict=True)
        ]
        for stored, by_layer in zip(context.stored[layer], (keys, values), strict=True):
            by_layer.append(torch.stack([x[r] for x, r in zip(stored, rows, strict=True)]))
    return Store(context, slots, keys, values, []), row


def compacted(context: fastkv.Context, keep: Keep | Struct) -> Slots:
    """Where retention leaves a prompt: an entry that stays does not move if its slot stays too.

    The others fill the slots that became free, both in ascending order. Before retention a layer's
    entries are in the order of their positions. Whole blocks keep their order.
    """
    total = context.length
    last = keep.pivot if isinstance(keep, Struct) else keep.tsp_layer
    slots: Slots = []
    for layer, heads in enumerate(context.retained):
        computed = list(range(total))
        if last is not None and layer > last:
            computed = context.propagated
        if isinstance(keep, Keep) and keep.cutoff is not None and layer >= keep.cutoff:
            full_depth = speed.full_depth(total, keep.anchors, keep.tail)
            computed = [position for position in computed if full_depth[position]]
        by_block = isinstance(keep, Struct) and keep.block_size is not None
        slots.append([head if by_block else fill_holes(head, computed) for head in heads])
    return slots


def fill_holes(retained: list[int], computed: list[int]) -> list[int]:
    """`retained` of the `computed` positions, both ascending, in the order of their slots."""
    count, kept = len(retained), set(retained)
    late = iter([position for position in computed[count:] if position in kept])
    return [position if position in kept else next(late) for position in computed[:count]]


@dataclass
class Store:
    """What decode steps see, and what they chose so far."""

    context: fastkv.Context
    slots: Slots
    # Per layer (G, stored, D), keys rotated: the prompt's entries, then the generated tokens'.
    keys: list[Tensor]
    values: list[Tensor]
    choices: list[list[list[Choice]]]
    # By layer and head, the copies of its full groups, which stay what they are.
    copies: dict[tuple[int, int], "Copies"] = field(default_factory=dict)

    def result(self, tokens: list[int], rows: list[Tensor]) -> ReadResult:
        kept = self.context
        return ReadResult(
            tokens,
            torch.cat(rows),
            kept.retained,
            kept.propagated,
            kept.slack,
            self.slots,
            self.choices,
        )

    def sees(self, index: int, query: Tensor, scale: float) -> None:
        """What a subclass makes of a layer's query (H, 1, D), whose key is stored."""

    @torch.no_grad()
    def step(self, model: PreTrainedModel, token: int, retrieve: Retrieve) -> Tensor:
        """Run and store a generated token; its log-softmax (1, V)."""
        start, position = len(self.choices), self.context.length + len(self.choices)
        self.choices.append([])
        chosen: dict[int, Tensor] = {}

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            self.keys[index] = torch.cat([self.keys[index], key], dim=1)
            self.values[index] = torch.cat([self.values[index], value], dim=1)
            self.sees(index, query, scale)
            mixed = []
            self.choices[-1].append([])
            for head, queries in enumerate(query[:, 0].chunk(key.shape[0])):
                keys, values = self.keys[index][head], self.values[index][head]
                budgeted = retrieve if index >= retrieve.dense_layers else None
                above = index - retrieve.dense_layers
                if above > 0 and above % retrieve.reuse_layers:
                    # The margins of a choice count once, where it is made.
                    read, margin, slack = chosen[head], float("inf"), float("inf")
                else:
                    copies = self.copies.setdefault((index, head), {})
                    read, margin, slack = choose(queries, keys, budgeted, scale, copies)
                    chosen[head] = read
                of = self.slots[index][head] + list(range(position - start, position + 1))
                positions = sorted(of[entry] for entry in read.tolist())
                self.choices[-1][-1].append(Choice(read.tolist(), positions, margin, slack))
                probs = (queries @ keys[read].T * scale).softmax(dim=-1)
                mixed.append(probs @ values[read])
            return torch.cat(mixed)[:, None]

        return run_row(model, token, position, attend)


def choose(
    query: Tensor,
    keys: Tensor,
    retrieve: Retrieve | None,
    scaling: float,
    copies: "Copies | None" = None,
) -> tuple[Tensor, float, float]:
    """Entries that the query heads (h, D) of one KV head read of `keys` (n, D), ascending.

    Also `Choice`'s margin and slack. Without `retrieve` all are read. The newest key is the step's
    own. Its group is always read and counts; a page counts as a whole one, however full.
    copies: keeps those of the first keys for steps to come, which have the same.
    """
    length, certain = len(keys), float("inf")
    if retrieve is None or length <= retrieve.budget or length < retrieve.dense_below:
        return torch.arange(length), certain, certain
    size, unit = retrieve.group, retrieve.group if retrieve.pages else 1
    newest = (length - 1) // size * size  # The first entry of the newest group.
    count = retrieve.budget // unit - (1 if retrieve.pages else length - newest)
    copies = {} if copies is None else copies
    if newest not in copies:
        copies.clear()
        copies[newest] = (bounds_of if retrieve.pages else copies_of)(keys[:newest], size)
    products = (by_bounds if retrieve.pages else by_copies)(query, copies[newest])
    low, scores, high = reduced(products, retrieve.reduction, scaling)
    # Of equal ones the lower index.
    order = scores.argsort(descending=True, stable=True)
    best, others = order[: max(count, 0)], order[max(count, 0) :]
    margin = slack = certain
    if len(best) and len(others):
        margin = float(scores[best].min() - scores[others].max())
        slack = float(low[best].min() - high[others].max())
    read = (best[:, None] * unit + torch.arange(unit)).flatten()
    return torch.cat([read.sort().values, torch.arange(newest, length)]), margin, slack


# The least, the actual and the greatest value, float64: what rounding may make of it.
Bounds = tuple[Tensor, Tensor, Tensor]
# By how many keys, what `copies_of` or `bounds_of` makes of the first ones.
Copies = dict[int, tuple[Tensor, ...]]


def quantised(keys: Tensor, size: int) -> tuple[Bounds, Bounds, Bounds]:
    """Signs (n, D), scales and zeros (n / size, D) of whole groups of keys (n, D)."""
    keys = keys.float()
    grouped = keys.view(-1, size, keys.shape[1])
    high, low = grouped.amax(dim=1), grouped.amin(dim=1)
    zero, scale = (high + low) / 2, (high - low) / 2
    above = grouped - zero[:, None]
    error = ROUNDING * float(keys.abs().max()) if len(keys) else 0.0

    def sign(least: float) -> Tensor:
        return ((above >= least).double() * 2 - 1).flatten(0, 1)

    def half(value: Tensor) -> Bounds:
        low, exact, high = ((value + e).half().double() for e in (-error, 0, error))
        return low, exact, high

    return (sign(2 * error), sign(0), sign(-2 * error)), half(scale), half(zero)


def tokens(query: Tensor, keys: Tensor, size: int) -> Bounds:
    """Products (h, n) of query (h, D) and the 1-bit copies of keys (n, D)."""
    return by_copies(query, copies_of(keys, size))


def copies_of(keys: Tensor, size: int) -> tuple[Tensor, ...]:
    """The least, the actual and the greatest 1-bit copies (n, D) of keys, and norms (n,)."""
    signs, scales, zeros = quantised(keys, size)
    spread = [x.repeat_interleave(size, dim=0) for x in scales]
    middle = [x.repeat_interleave(size, dim=0) for x in zeros]
    least = middle[0] + torch.minimum(signs[0] * spread[0], signs[0] * spread[2])
    copies = middle[1] + signs[1] * spread[1]
    most = middle[2] + torch.maximum(signs[2] * spread[0], signs[2] * spread[2])
    return least, copies, most, copies.norm(dim=1)


def by_copies(query: Tensor, made: tuple[Tensor, ...]) -> Bounds:
    """The same products, of what `copies_of` made."""
    least, copies, most, norms = made
    query = query.double()
    up, down = query.clamp(min=0), -query.clamp(max=0)
    error = ROUNDING * query.norm(dim=1)[:, None] * norms
    low = up @ least.T - down @ most.T - error
    return low, query @ copies.T, up @ most.T - down @ least.T + error


def pages(query: Tensor, keys: Tensor, size: int) -> Bounds:
    """Channel by channel the larger of query x greatest and query x least key: (h, n / size)."""
    return by_bounds(query, bounds_of(keys, size))


def bounds_of(keys: Tensor, size: int) -> tuple[Tensor, ...]:
    """Scales and zeros (n / size, D) of pages, each with its bounds, and norms (n / size,)."""
    _, scales, zeros = quantised(keys, size)
    return *scales, *zeros, zeros[1].norm(dim=1) + scales[1].norm(dim=1)


def by_bounds(query: Tensor, made: tuple[Tensor, ...]) -> Bounds:
    """The products of `pages`, of what `bounds_of` made."""
    scales, zeros, norms = made[:3], made[3:6], made[6]
    query = query.double()
    up, down = query.clamp(min=0), -query.clamp(max=0)
    error = ROUNDING * query.norm(dim=1)[:, None] * norms
    low = up @ zeros[0].T - down @ zeros[2].T + query.abs() @ scales[0].T - error
    high = up @ zeros[2].T - down @ zeros[0].T + query.abs() @ scales[2].T + error
    return low, query @ zeros[1].T + query.abs() @ scales[1].T, high


def reduced(products: Bounds, reduction: str, scaling: float) -> Bounds:
    """Scores (n,) of a KV head from the products (h, n) of its query heads."""
    if reduction == "max":
        low, exact, high = (x.amax(dim=0) for x in products)
        return low, exact, high
    if reduction == "softmax":
        scaling /= 2  # 1-bit keys and bounds make products too large.
        totals = [(x * scaling).logsumexp(dim=1, keepdim=True) for x in reversed(products)]
        pairs = zip(products, totals, strict=True)
        low, exact, high = ((x * scaling - total).exp() for x, total in pairs)
        products = low, exact, high
    low, exact, high = (x.sum(dim=0) for x in products)
    return low, exact, high
