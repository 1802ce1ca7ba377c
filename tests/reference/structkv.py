"""Dense reference for StructKV: centrality over the lower layers says which tokens go on.

Layers up to the pivot run the whole prompt and add up how much its last queries attend to each key.
The most central tokens run through the layers above, at the positions they had. Every layer then
retains tokens by its own saliency, pooled over neighbouring rows, one set for all heads or each KV
head for itself, or every side of the pivot retains whole blocks by centrality. Nothing of
centrality is pooled.
Equation numbers are the paper's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv
from .criticalkv import EPSILON, Critical
from .fastkv import Context, KeptResult, block, decode, load, saliency, top
from .masked import embed, layers_of, log_softmax, output_weight

WEIGHTS = (0.2, 0.3, 0.5)  # of entropy, sparsity and variance in Eq. 8
METRICS = ("entropy", "sparsity", "variance")


@dataclass(frozen=True)
class Struct:
    """The pivot and what goes on and stays; both rates 1 drop nothing."""

    pivot: int  # the last layer that runs every token
    struct_rate: float = 0.2
    kv_rate: float = 0.1
    window: int = 8
    decay: float = 0.9
    block_size: int | None = None  # tokens of a block where whole blocks are retained
    kv_budget: int | None = None  # tokens; if given, the rate is ignored
    kv_floor: int = 0  # the least that the rate keeps
    struct_floor: int = 0  # the least that the rate propagates
    struct_reduction: str = "sum"  # of what centrality adds up; or "max"
    most_kept: float = 1.0  # retained rows are no more than this share of the prompt's
    heads: str = "shared"  # one set for all heads of a layer (Eq. 13), as blocks are; or "own"
    kernel: int = 7  # of what tokens are retained by; 1 does not pool (Eq. 13)
    score: str = "attention"  # or "critical": half of the rows by what values do, too

    def __post_init__(self) -> None:
        if self.window < 1 or (self.block_size is not None and self.block_size < 1):
            raise ValueError(f"window={self.window}, block_size={self.block_size} must be >= 1")
        if self.heads not in ("own", "shared"):
            raise ValueError(f"heads={self.heads} must be own or shared")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} must be odd")
        for rate in (self.struct_rate, self.kv_rate, self.decay):
            if not 0 < rate <= 1:
                raise ValueError(f"{self}: rates and decay must be in (0, 1]")

    def most(self, prompt_len: int) -> int:
        """The most tokens that go on, the window included."""
        return max(int(prompt_len * self.struct_rate), self.window, self.struct_floor)

    def cap(self, prompt_len: int) -> int:
        """The most rows that a layer retains by saliency, the window included."""
        cap = max(int(prompt_len * self.kv_rate), self.window, self.kv_floor)
        if self.kv_budget is not None:
            cap = self.kv_budget
        return min(cap, max(int(prompt_len * self.most_kept), self.window, self.struct_floor))


def generate(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    struct: Struct,
    *,
    max_tokens: int,
    ignore_eos: bool = True,
) -> KeptResult:
    """At least one greedy token under `struct`."""
    model = load(model)
    eos = model.config.eos_token_id
    stop = set() if ignore_eos or eos is None else {eos} if isinstance(eos, int) else set(eos)
    context, row = prefill(model, prompt, struct)
    rows, tokens = [row], [int(row.argmax())]
    while len(tokens) < max_tokens and tokens[-1] not in stop:
        rows.append(decode(model, context, tokens[-1:]))
        tokens.append(int(rows[-1].argmax()))
    return context.result(tokens, rows)


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], struct: Struct
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, struct)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], struct: Struct) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    total, window, most = len(prompt), struct.window, struct.most(len(prompt))
    if not 0 <= struct.pivot < len(layers):
        raise ValueError(f"{struct}: the pivot is not one of the {len(layers)} layers")
    context = Context([], total, [], list(range(total)), float("inf"))
    positions = torch.arange(total)
    hidden = embed(model, prompt)  # (rows, hidden)
    # By layer: what centrality adds up, and what tokens are retained by.
    central, saliencies = [], []
    for index, layer in enumerate(layers):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        context.stored.append((key, value))
        central.append(local_saliency(probs, window, struct.struct_reduction))
        if struct.score == "critical":
            saliencies.append(critical_rows(probs, value, output_weight(layer), total, struct))
        else:
            saliencies.append(retained_by(probs, key.shape[0], struct))
        if index == struct.pivot:
            lower = upper = reduce(lambda c, s: struct.decay * c + s, central)  # Eq. 3
            if index < len(layers) - 1 and total > most:
                chosen, slack = top(lower, most - window, window)
                context.slack = min(context.slack, slack)
                upper = lower[chosen[:-window]]
                hidden, positions = hidden[chosen], positions[chosen]
                context.propagated = positions.tolist()

    for index, (key, value) in enumerate(context.stored):
        above = index > struct.pivot
        computed = torch.tensor(context.propagated) if above else torch.arange(total)
        if struct.block_size is not None:
            each = [retain_blocks(upper if above else lower, len(computed), total, struct)]
        elif struct.score == "critical":
            each = saliencies[index]
        else:
            each = [retain_rows(*by, len(computed), total, struct) for by in saliencies[index]]
        if len(each) == 1:
            each *= key.shape[0]
        context.slack = min(context.slack, *(slack for _, slack in each))
        context.retained.append([computed[rows].tolist() for rows, _ in each])
        context.stored[index] = tuple(
            torch.stack([head[rows] for head, (rows, _) in zip(cache, each, strict=True)])
            for cache in (key, value)
        )
    return context, log_softmax(model, hidden[-1:])


def local_saliency(probs: Tensor, window: int, reduction: str = "sum") -> Tensor:
    """Eq. 2 times w: (n - window,) float64 of the rows before the window, from probs (H, n, n).

    With `max` it is the largest weight of any head and window row instead.
    """
    votes = probs[:, -window:, :-window].double().flatten(0, 1)
    if reduction == "max":
        return votes.amax(dim=0)
    # One by one: torch's own sum adds some columns in another order, and equal ones must stay so.
    return reduce(torch.add, votes)


def retained_by(probs: Tensor, kv_heads: int, struct: Struct) -> list[tuple[Tensor, Tensor]]:
    """Pooled and unpooled saliency of the rows before the window, from probs (H, n, n).

    For all heads at once (Eq. 13) or for each KV head: pooled by query head, then summed over them.
    """
    sets = kv_heads if struct.heads == "own" else 1
    if probs.shape[1] <= struct.window:
        return [(torch.empty(0), torch.empty(0))] * sets
    pooled, unpooled = (saliency(probs, sets, struct.window, width) for width in (struct.kernel, 1))
    return list(zip(pooled, unpooled, strict=True))


def critical_rows(
    probs: Tensor, value: Tensor, weight: Tensor, prompt_len: int, struct: Struct
) -> list[tuple[Tensor, float]]:
    """Rows retained by CriticalKV's two stages, and the choice's slack: of all heads, or of each.

    probs (H, n, n), value (G, n, D), weight (hidden, H * D). Where all heads share one set, a row's
    attention is the sum over the KV heads, and so is its product: of the attention of a KV head, a
    mean over its query heads and the window, with the mean norm of its projected values there.
    """
    (heads, count, _), kv_heads = probs.shape, value.shape[0]
    window, cap, shared = struct.window, struct.cap(prompt_len), heads // kv_heads
    if struct.heads == "own":
        policy = Critical(kv_budget=cap, window=window, kernel=struct.kernel)
        rows, slack = criticalkv.retain(probs, value, weight, prompt_len, policy)
        return [(each, slack) for each in rows]
    if count <= cap:
        return [(torch.arange(count), float("inf"))]
    scores = saliency(probs, kv_heads, window, struct.kernel)
    norms = torch.stack(
        [
            (value[head // shared].double() @ part.double().T).norm(dim=1)
            for head, part in enumerate(weight.chunk(heads, dim=1))
        ]
    )
    norms = norms.view(kv_heads, shared, count).mean(dim=1)[:, : count - window]
    products = (scores / (shared * window) + EPSILON) * norms
    (attention,), (peaks,) = (saliency(probs, 1, window, k) for k in (struct.kernel, 1))
    first = (cap - window) // 2
    early, slack = top(attention, first, 0, peaks)
    left = torch.ones(count - window, dtype=torch.bool)
    left[early] = False
    rest = left.nonzero()[:, 0]
    late, gap = top(products.sum(dim=0)[rest], cap - window - first, 0, peaks[rest])
    tail = torch.arange(count - window, count)
    return [(torch.cat([early, rest[late], tail]).sort().values, min(slack, gap))]


def retain_rows(
    pooled: Tensor, unpooled: Tensor, count: int, prompt_len: int, struct: Struct
) -> tuple[Tensor, float]:
    """Which of `count` rows are retained by a saliency, int64 ascending, and the choice's slack.

    pooled, unpooled: of the rows before the window, of a layer (Eq. 13) or of one KV head. Among
        rows whose pooled saliency is equal the higher unpooled one decides, then the lower row.
    """
    cap = struct.cap(prompt_len)
    if count <= cap:
        return torch.arange(count), float("inf")
    return top(pooled, cap - struct.window, struct.window, unpooled)


def retain_blocks(
    centrality: Tensor, count: int, prompt_len: int, struct: Struct
) -> tuple[Tensor, float]:
    """Which of `count` rows stay if whole blocks do, int64 ascending, and the choice's slack.

    centrality: of the rows before the window; the window's own is 0, but its blocks stay.
    """
    assert struct.block_size is not None
    size = struct.block_size
    blocks, before = math.ceil(count / size), len(centrality) // size  # `before` the window's
    share = max(prompt_len * struct.kv_rate, struct.kv_floor)
    kept = max(math.ceil((struct.kv_budget or share) / size), blocks - before)
    if blocks <= kept:
        return torch.arange(count), float("inf")
    # One by one, as in `local_saliency`: (before, size) -> (before,).
    scores = reduce(torch.add, centrality[: before * size].view(before, size).T)
    chosen, slack = top(scores, kept - (blocks - before), blocks - before)
    rows = torch.arange(count)
    return rows[torch.isin(rows // size, chosen)], slack


@torch.no_grad()
def metrics(
    model: str | Path | PreTrainedModel, prompts: Sequence[list[int]], window: int = 8
) -> dict[str, Tensor]:
    """What the window's queries attend to, by layer (Eq. 4-6): (L,) float64 by METRICS.

    From full attention at full depth; means over query heads, window rows and then prompts.
    """
    model = load(model)
    sums = {name: 0.0 for name in METRICS}
    for prompt in prompts:
        by_layer: dict[str, list[Tensor]] = {name: [] for name in METRICS}
        positions = torch.arange(len(prompt))
        hidden = embed(model, prompt)
        for layer in layers_of(model):
            hidden, _, _, probs = block(model, layer, hidden, positions, None)
            for name, value in zip(METRICS, measure(probs, window), strict=True):
                by_layer[name].append(value)
        for name in METRICS:
            sums[name] = sums[name] + torch.stack(by_layer[name])
    return {name: value / len(prompts) for name, value in sums.items()}


def measure(probs: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, sparsity and variance, () float64, of the last rows of probs (H, n, n)."""
    count = probs.shape[1]
    rows = probs[:, -window:].double()  # (H, w, n)
    entropy = torch.special.entr(rows).sum(dim=-1).mean()
    sparsity = rows.topk(max(1, int(0.1 * count)), dim=-1).values.sum(dim=-1).mean()
    visible = range(count - rows.shape[1] + 1, count + 1)
    spread = [rows[:, i, :seen].var(dim=-1, correction=0) for i, seen in enumerate(visible)]
    return entropy, sparsity, torch.stack(spread).mean()


def transition_scores(
    metrics: dict[str, Tensor], weights: tuple[float, float, float] = WEIGHTS
) -> Tensor:
    """T_l of Eq. 8, (L,) float64; nan at layer 0, which has no difference."""
    score = torch.full_like(metrics["entropy"], float("nan"))
    score[1:] = 0
    for name, sign, weight in zip(METRICS, (-1, 1, 1), weights, strict=True):
        steps = sign * metrics[name].diff()
        if len(steps) and steps.min() < steps.max():  # Eq. 7; without a range it says nothing
            score[1:] += weight * ((steps - steps.min()) / (steps.max() - steps.min()))
    return score


def pivot_of(metrics: dict[str, Tensor], weights: tuple[float, float, float] = WEIGHTS) -> int:
    """L* of Eq. 9, and never above the last layer."""
    scores = transition_scores(metrics, weights).tolist()
    return min(_steepest(scores) + 1, len(scores) - 1)


def online_pivot(
    metrics: dict[str, Tensor],
    weights: tuple[float, float, float],
    min_layer: int,
    max_layer: int,
) -> int:
    """The first layer from `min_layer` on that has the largest transition so far behind it.

    Causal: after layer l it looks at layers 0..l alone, whose differences are normalised among
    themselves. At `max_layer` it stops looking.
    """
    layers = len(metrics["entropy"])
    if not 0 <= min_layer <= max_layer < layers:
        raise ValueError(f"{min_layer=} and {max_layer=} are not within the {layers} layers")
    for layer in range(max(min_layer, 2), max_layer):
        seen = {name: values[: layer + 1] for name, values in metrics.items()}
        if _steepest(transition_scores(seen, weights).tolist()) < layer:
            return layer
    return max_layer


def _steepest(scores: list[float]) -> int:
    """The lowest layer with the highest score; layer 0 only if there is no other."""
    return scores.index(max(scores[1:])) if len(scores) > 1 else 0
