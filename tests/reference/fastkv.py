"""Dense reference for FastKV, SnapKV and StreamingLLM: a transformers model's layers run by hand.

Prefill is exact causal attention over the rows that a layer has: all prompt tokens, above the TSP
layer the propagated ones, above a SPEED cutoff the anchors and the tail. Then every layer and KV
head retains some of those rows, and a generated token sees these, the generated tokens before it
and itself. Positions are never renumbered.
"""

from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d
from transformers import PreTrainedModel

from .masked import attention, causal, embed, layers_of, log_softmax, run_layer
from .speed import Result, load


@dataclass(frozen=True)
class Keep:
    """What propagates and what is retained; the default drops nothing."""

    tsp_layer: int | None = None
    tsp_rate: float = 1.0
    tsp_floor: int = 0  # the least that the rate propagates
    tsp_reduction: str = "sum"  # over heads and window rows; or "max"
    kv_rate: float | None = 1.0
    kv_budget: int | None = None  # tokens; if given, the rate is ignored
    window: int = 8
    kernel: int = 7
    kv_floor: int = 0  # the least that the rate keeps
    sinks: int | None = None  # StreamingLLM: by position, as many as `recent` or the rate says
    recent: int | None = None
    cutoff: int | None = None
    anchors: int = 1
    tail: int = 1

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window={self.window} must be >= 1 and kernel={self.kernel} be odd")
        if self.kv_rate is None and self.kv_budget is None:
            raise ValueError("kv_rate or kv_budget must be given; kv_rate=1 keeps everything")
        if self.sinks is None and self.recent is not None:
            raise ValueError(f"recent={self.recent} comes with sinks")
        if self.sinks is not None and self.recent is None and self.kv_budget is not None:
            raise ValueError(f"sinks={self.sinks} come with recent or a rate")
        if self.cutoff is not None and self.tsp_layer is not None:
            raise ValueError("cutoff and tsp_layer both say what propagates")
        if self.anchors < 0 or self.tail < 1:
            raise ValueError(f"anchors={self.anchors} must be >= 0 and tail={self.tail} >= 1")

    def cap(self, prompt_len: int) -> int:
        """The most rows that a KV head retains by saliency, the window included."""
        if self.kv_budget is not None:
            return max(self.kv_budget, self.window)
        assert self.kv_rate is not None
        return max(int(prompt_len * self.kv_rate), self.window, self.kv_floor)

    def last(self, prompt_len: int) -> int:
        """StreamingLLM's last rows."""
        assert self.sinks is not None and self.kv_rate is not None
        if self.recent is not None:
            return self.recent
        return max(int(prompt_len * self.kv_rate), self.sinks + 1, self.kv_floor) - self.sinks


@dataclass(frozen=True)
class KeptResult(Result):
    """A result with the prompt positions behind it."""

    retained: list[list[list[int]]]  # [layer][KV head] -> ascending prompt positions
    propagated: list[int]  # ascending prompt positions that ran above the TSP layer; else all
    # The least relative change of a score that could change any selection; inf without one.
    # Exact ties go by position and are no near-ties: they are left out.
    slack: float


def generate(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    keep: Keep,
    *,
    max_tokens: int,
    ignore_eos: bool = True,
) -> KeptResult:
    """At least one greedy token under `keep`."""
    model = load(model)
    eos = model.config.eos_token_id
    stop = set() if ignore_eos or eos is None else {eos} if isinstance(eos, int) else set(eos)
    context, row = prefill(model, prompt, keep)
    rows, tokens = [row], [int(row.argmax())]
    while len(tokens) < max_tokens and tokens[-1] not in stop:
        rows.append(decode(model, context, tokens[-1:]))
        tokens.append(int(rows[-1].argmax()))
    return context.result(tokens, rows)


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], keep: Keep
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, keep)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@dataclass
class Context:
    """What decode steps see, and how it was chosen."""

    # Per layer, keys (rotated) and values (G, stored, D): the retained rows, then generated ones.
    stored: list[tuple[Tensor, Tensor]]
    length: int  # tokens so far, prompt and generated
    retained: list[list[list[int]]]
    propagated: list[int]
    slack: float

    def result(self, tokens: list[int], rows: list[Tensor]) -> KeptResult:
        return KeptResult(tokens, torch.cat(rows), self.retained, self.propagated, self.slack)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], keep: Keep) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    total = len(prompt)
    for bound, last in ((keep.cutoff, len(layers)), (keep.tsp_layer, len(layers) - 1)):
        if bound is not None and not 0 <= bound <= last:
            raise ValueError(f"{keep}: {bound} is not within the {len(layers)} layers")
    context = Context([], total, [], list(range(total)), float("inf"))
    positions = torch.arange(total)
    hidden = embed(model, prompt)  # (rows, hidden)
    for index, layer in enumerate(layers):
        if index == keep.cutoff:
            full_depth = (positions < keep.anchors) | (positions >= total - keep.tail)
            hidden, positions = hidden[full_depth], positions[full_depth]
        hidden, key, value, probs = block(model, layer, hidden, positions, None)

        rows, slack = retain(probs, key.shape[0], positions, total, keep)
        context.slack = min(context.slack, slack)
        context.retained.append(positions[rows].tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))

        most = max(int(total * keep.tsp_rate), keep.window, keep.tsp_floor)
        if index == keep.tsp_layer and index < len(layers) - 1 and total > most:
            (scores,), (unpooled,) = (
                saliency(probs, 1, keep.window, width, keep.tsp_reduction)
                for width in (keep.kernel, 1)
            )
            chosen, slack = top(scores, most - keep.window, keep.window, unpooled)
            context.slack = min(context.slack, slack)
            hidden, positions = hidden[chosen], positions[chosen]
            context.propagated = positions.tolist()
    return context, log_softmax(model, hidden[-1:])


@torch.no_grad()
def decode(model: PreTrainedModel, context: Context, tokens: list[int]) -> Tensor:
    """Run generated `tokens` and store them; their log-softmax (len(tokens), V)."""
    positions = torch.arange(context.length, context.length + len(tokens))
    hidden = embed(model, tokens, context.length)
    context.length += len(tokens)
    for index, layer in enumerate(layers_of(model)):
        past = context.stored[index]
        hidden, key, value, _ = block(model, layer, hidden, positions, past)
        context.stored[index] = key, value
    return log_softmax(model, hidden)


def block(
    model: PreTrainedModel,
    layer: Any,
    hidden: Tensor,
    positions: Tensor,
    past: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One decoder layer over new rows, which see all of `past` and each other causally.

    hidden (n, hidden), positions (n,), past keys and values (G, p, D) -> hidden (n, hidden),
    keys and values (G, p + n, D), attention probabilities (H, n, p + n), all float32.
    """
    caught = []

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if past is not None:
            key, value = torch.cat([past[0], key], dim=1), torch.cat([past[1], value], dim=1)
        seen = causal(query.shape[1], key.shape[1])
        mixed, probs = attention(query, key, value, scale, seen)
        caught.append((key, value, probs))
        return mixed

    hidden = run_layer(model, layer, hidden, positions, attend)
    return hidden, *caught[0]


def retain(
    probs: Tensor, kv_heads: int, positions: Tensor, prompt_len: int, keep: Keep
) -> tuple[Tensor, float]:
    """Rows that each KV head keeps, (G, kept) int64 ascending, and the slack of the choice.

    probs (H, n, n) and positions (n,) are of the rows that the layer computed.
    """
    rows = torch.arange(len(positions))
    if keep.cutoff is not None and len(rows) < prompt_len:
        return rows.expand(kv_heads, -1), float("inf")  # SPEED's own choice stays as it is.
    if keep.sinks is not None:
        rows = rows[(positions < keep.sinks) | (positions >= prompt_len - keep.last(prompt_len))]
        return rows.expand(kv_heads, -1), float("inf")
    cap = keep.cap(prompt_len)
    if len(rows) <= cap:
        return rows.expand(kv_heads, -1), float("inf")
    scores, unpooled = (saliency(probs, kv_heads, keep.window, width) for width in (keep.kernel, 1))
    heads = zip(scores, unpooled, strict=True)
    chosen, slacks = zip(
        *(top(head, cap - keep.window, keep.window, peaks) for head, peaks in heads), strict=True
    )
    return torch.stack(chosen), min(slacks)


def saliency(
    probs: Tensor, kv_heads: int, window: int, kernel: int, reduction: str = "sum"
) -> Tensor:
    """(G, n - window) float64 scores of the rows before the window, from probs (H, n, n).

    One KV head gives the scores for propagation: the sum over all query heads. reduction: `max`
    takes the largest weight of any window row and head instead of the sums.
    """
    if reduction == "max":
        largest = probs[:, -window:].double().amax(dim=1)[:, :-window]
        largest = torch.stack([group.amax(dim=0) for group in largest.chunk(kv_heads)])
        return max_pool1d(largest[None], kernel, stride=1, padding=kernel // 2)[0]
    mass = probs[:, -window:].double().sum(dim=1)[:, :-window]
    pooled = max_pool1d(mass[None], kernel, stride=1, padding=kernel // 2)[0]
    # Equal neighbours must stay equal, and different ones different: torch's sum adds in another
    # order in some columns, and float32 loses what a small head says next to a large one.
    return torch.stack([reduce(torch.add, group) for group in pooled.chunk(kv_heads)])


def top(
    scores: Tensor, count: int, window: int, unpooled: Tensor | None = None
) -> tuple[Tensor, float]:
    """The `count` best of scores (n,), and the `window` rows after them.

    Among equals the highest `unpooled` (n,) first, if it is given, then the lowest row.

    Returns rows (count + window,) int64 ascending, and the relative gap at the edge. Where the edge
    lies among equals, the gap is that to the nearest other score: crossing it moves the edge; or
    the smaller gap of their unpooled scores.
    """
    order = scores.argsort(descending=True, stable=True)
    among = float("inf")
    if unpooled is not None and 0 < count < len(scores):
        equal = scores == scores[order[count - 1]]
        sure = int((scores > scores[order[count - 1]]).sum())
        ties = equal.nonzero()[:, 0]
        _, among = top(unpooled[ties], count - sure, 0)
        ranked = ties[unpooled[ties].argsort(descending=True, stable=True)]
        order = torch.cat([order[:sure], ranked, order[sure + len(ties) :]])
    kept, dropped = scores[order[:count]], scores[order[count:]]
    slack = float("inf")
    if len(kept) and len(dropped):
        last, best = kept[-1], dropped[0]
        pairs = [(last, best)]
        if last == best:
            pairs = [(a, last) for a in kept[kept > last][-1:]]
            pairs += [(last, b) for b in dropped[dropped < last][:1]]
        slack = min((float((a - b) / a) for a, b in pairs), default=slack)
    slack = min(slack, among)
    tail = torch.arange(len(scores), len(scores) + window)
    return torch.cat([order[:count].sort().values, tail]), slack
