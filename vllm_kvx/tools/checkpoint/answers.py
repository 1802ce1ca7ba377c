"""What stays of answers where a layer propagates: the criterion `answers` of `vllm-kvx calibrate`.

One dense pass per prompt shows, for every layer and rate at once, which tokens would go on. The
score is how much of what the answer needs is among them:

- where the prompt's evidence is known, the tokens of the asked values: the share of them;
- otherwise by the attention of the full model's own answer: its greedy tokens' attention to the
  prompt in the layers above, summed over layers and heads, without the first token and the window.
  The share of it that falls on the propagated tokens, over what the best choice of as many gets.

Then answers are decoded under the policy, with the full model's as the measure: rows are gathered
after the layer, the layers above run on these alone and store keys and values of these alone.
Retention has no part in it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.equations.pivot import Metrics, attention_metrics, by_layer
from vllm_kvx.equations.saliency import kept_indices, propagation_scores
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import WINDOW_REDUCTIONS
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.tools.checkpoint.dense_decoder import Cache, DenseDecoder
from vllm_kvx.tools.checkpoint.report import Progress

Policy = FastKV | StructKV
# By method, the parameter that says which share of a prompt's tokens goes on.
RATES = {FastKV.name: "tsp_rate", StructKV.name: "struct_rate"}


def at_rate(policy: Policy, rate: float) -> Policy:
    """`policy` with this share of a prompt's tokens that go on."""
    changed: dict[str, Any] = {RATES[policy.name]: rate}
    return replace(policy, **changed)


@dataclass(frozen=True)
class Choice:
    """How a layer chooses the tokens that go on.

    rate: their share of the prompt. reduction: how the weights of heads and window rows become a
    token's one score.
    """

    rate: float
    reduction: str


def choices_of(rates: Sequence[float]) -> list[Choice]:
    """Every reduction at every rate."""
    return [Choice(rate, reduction) for rate in rates for reduction in WINDOW_REDUCTIONS]


@dataclass(frozen=True)
class Question:
    """A prompt, and what is known of its answer.

    evidence: indices of the tokens that hold it; None if nobody knows.
    score: how right an answer's tokens are, 0 to 1; None if only the full model's answer says.
    limit: tokens of the longest answer.
    kind: the task that it is of; empty where there is none.
    """

    token_ids: tuple[int, ...]
    evidence: tuple[int, ...] | None = None
    score: Callable[[Sequence[int]], float] | None = None
    limit: int = 16
    kind: str = ""


@dataclass(frozen=True)
class Seen:
    """What one dense pass showed.

    chosen: the rows that each layer 0..L-2 would propagate, int64 on the CPU.
    scores: the score of each of these layers.
    answer: the full model's.
    right: how right it is; 1 where only the full model's answer says.
    metrics: StructKV's, (L,) each, if they were wanted.
    """

    chosen: dict[Choice, list[Tensor]]
    scores: dict[Choice, list[float]]
    answer: tuple[int, ...]
    right: float
    metrics: Metrics | None = None


class Chooser:
    """The rows that a policy would propagate after each layer of one pass, by every choice."""

    def __init__(self, policy: Policy, prompt_len: int, choices: Sequence[Choice]) -> None:
        self.spec = policy.selects_by
        self.counts = {
            choice: at_rate(policy, choice.rate).num_by_rate(prompt_len) for choice in choices
        }
        self.totals: dict[str, Tensor | None] = {choice.reduction: None for choice in choices}

    def __call__(self, attention: Tensor) -> dict[Choice, Tensor]:
        """After the next layer, from its window attention (H, w, n): (count,) int64 each."""
        chosen = {}
        for reduction, total in self.totals.items():
            scores = propagation_scores(attention, self.spec.kernel, reduction)
            if self.spec.decay is not None and total is not None:
                scores = self.spec.decay * total + scores
            self.totals[reduction] = scores
            unpooled = None
            if self.spec.kernel > 1:
                unpooled = propagation_scores(attention, 1, reduction)
            for choice, count in self.counts.items():
                if choice.reduction == reduction:
                    kept = kept_indices(scores, count, self.spec.window, unpooled)
                    chosen[choice] = kept.cpu()
        return chosen


def look(
    decoder: DenseDecoder,
    question: Question,
    policy: Policy,
    choices: Sequence[Choice],
    progress: Progress,
    metrics: bool = False,
) -> Seen:
    """Runs one dense pass over the prompt, and the full model's answer after it.

    policy: whose window and score choose; the rates are those of `choices`.
    metrics: whether StructKV's are wanted too.
    """
    prompt = question.token_ids
    cache, chooser = Cache(), Chooser(policy, len(prompt), choices)
    chosen: dict[Choice, list[Tensor]] = {choice: [] for choice in choices}
    measured = []
    rows = decoder.embed(prompt)
    steps = decoder.layers(rows, window=policy.window, cache=cache)
    for index in range(decoder.num_layers):
        progress(index)
        rows, attention = next(steps)
        assert attention is not None
        if metrics:
            measured.append(attention_metrics(attention))
        for choice, indices in chooser(attention).items():
            chosen[choice].append(indices)
    answer, masses = generate(decoder, rows.hidden[-1:], question, cache)
    # Nothing lies above the last layer.
    chosen = {choice: layers[:-1] for choice, layers in chosen.items()}
    if question.evidence is not None:
        evidence = torch.tensor(question.evidence)
        scores = {
            choice: [share_of_evidence(rows, evidence) for rows in layers]
            for choice, layers in chosen.items()
        }
    else:
        above = mass_above(masses)
        scores = {
            choice: [
                share_of_mass(mass, rows, policy.window)
                for mass, rows in zip(above, layers, strict=True)
            ]
            for choice, layers in chosen.items()
        }
    right = 1.0 if question.score is None else question.score(answer)
    return Seen(chosen, scores, tuple(answer), right, by_layer(measured) if metrics else None)


def share_of_evidence(chosen: Tensor, evidence: Tensor) -> float:
    """Share of the tokens `evidence` that is among `chosen`."""
    return torch.isin(evidence, chosen).double().mean().item()


def mass_above(masses: Tensor) -> Tensor:
    """(L, N), attention of the answer at each layer -> (L - 1, N): summed over those above it."""
    return masses.double().flip(0).cumsum(dim=0).flip(0)[1:]


def share_of_mass(mass: Tensor, chosen: Tensor, window: int) -> float:
    """What of the attention (N,) falls on `chosen`, over the most that as many tokens get.

    Neither the first token, which is attended to for itself, nor the window, which always stays,
    counts.
    """
    counted = mass[1 : len(mass) - window]
    inner = chosen[(chosen > 0) & (chosen < len(mass) - window)]
    most = counted.topk(min(len(chosen) - window, len(counted))).values.sum().item()
    return mass[inner].sum().item() / most if most else 1.0


def generate(
    decoder: DenseDecoder, last: Tensor, question: Question, cache: Cache
) -> tuple[list[int], Tensor]:
    """The greedy answer after a prompt, whose last row's output is `last` (1, hidden).

    It ends at a stop token, which is part of it, at the limit, or once it is right.

    Returns its tokens, and their attention to the prompt, (L, N) float32 on the CPU, if every layer
    of `cache` holds the whole prompt.
    """
    position = len(question.token_ids)
    masses: Tensor | None = None
    answer = [int(decoder.logits(last)[-1].argmax())]
    while True:
        done = answer[-1] in decoder.stop_tokens or len(answer) >= question.limit
        done = done or (question.score is not None and question.score(answer) == 1)
        if done and question.score is not None:
            break
        logits, mass = decoder.extend(answer[-1:], position + len(answer) - 1, cache)
        if question.score is None:
            now = torch.stack([layer[:position] for layer in mass])
            masses = now if masses is None else masses + now
        if done:
            break
        answer.append(int(logits[-1].argmax()))
    return answer, torch.empty(0) if masses is None else masses.cpu()


def answers_kept(
    decoder: DenseDecoder, question: Question, seen: Seen, layer: int, choice: Choice
) -> tuple[float, float]:
    """How much of the full model's answer stays where `layer` propagates, and out of how much.

    A generated lookup is decoded anew and is right or not. Of an answer that only the full model
    gives, each token is predicted after the full model's tokens before it, and is the same or not.
    """
    cache, rows = Cache(), decoder.embed(question.token_ids)
    steps = decoder.layers(rows, cache=cache)
    for _ in range(layer + 1):
        rows, _ = next(steps)
    rows = rows.select(seen.chosen[choice][layer])
    for output, _ in decoder.layers(rows, layer + 1, cache=cache):
        rows = output
    if question.score is not None:
        answer, _ = generate(decoder, rows.hidden[-1:], question, cache)
        return min(question.score(answer), seen.right), seen.right
    predicted = decoder.logits(rows.hidden[-1:]).argmax(dim=-1).tolist()
    if len(seen.answer) > 1:
        logits, _ = decoder.extend(seen.answer[:-1], len(question.token_ids), cache)
        predicted += logits.argmax(dim=-1).tolist()
    same = sum(mine == full for mine, full in zip(predicted, seen.answer, strict=True))
    return float(same), float(len(seen.answer))


def mean_scores(seen: Sequence[Seen]) -> dict[Choice, list[float]]:
    """The mean scores over the prompts, one of each layer.

    Raises:
        ToolError: the type's range did not suffice.
    """
    means = {
        choice: torch.tensor([each.scores[choice] for each in seen]).double().mean(0).tolist()
        for choice in seen[0].scores
    }
    if not all(math.isfinite(score) for layers in means.values() for score in layers):
        raise ToolError("attention is not finite: use --dtype bfloat16 or float32")
    return means
