"""Which layers are tried, and what is known of the answers that stay under one.

A layer holds by the lower end of the interval of the share of the full model's right answers that
stay under it: not by the share itself, which of few prompts says little. Prompts are drawn with
both of their scores, the full model's and the layer's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_kvx.tools.checkpoint.answers import Choice, Question, Seen, answers_kept
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder
from vllm_kvx.tools.evaluate.intervals import Interval, of_kept, of_mean


@dataclass(frozen=True)
class Candidate:
    """A layer and how it chooses tokens.

    score: the mean over the prompts. cost: FLOPs of prefill over those of the full model.
    """

    layer: int
    choice: Choice
    score: float
    cost: float

    def __str__(self) -> str:
        return f"layer {self.layer} by {self.choice.reduction} at {self.choice.rate:.3g}"


def candidates(
    scores: Mapping[Choice, Sequence[float]],
    cost: Callable[[int, float], float],
    reductions: Sequence[str],
    target: float,
    sliding: Collection[int] = (),
) -> list[Candidate]:
    """What to try, the cheapest first, and of equal cost in the order of `reductions`.

    First come those whose score is within `target` of the best at their rate, since decoding is
    dear and a score is not. Behind them are those above the lowest of these, rate by rate: an
    answer may have been read from tokens that a higher layer does not choose any more.

    cost: of a layer and a rate, as a candidate has it.
    sliding: layers that slide over a window, which select no tokens.
    """
    likely: list[Candidate] = []
    later: list[Candidate] = []
    for rate in dict.fromkeys(choice.rate for choice in scores):
        each = [
            Candidate(layer, Choice(rate, reduction), score, cost(layer, rate))
            for reduction in reductions
            for layer, score in enumerate(scores[Choice(rate, reduction)])
            if layer not in sliding
        ]
        least = target * max(candidate.score for candidate in each)
        lowest = min(candidate.layer for candidate in each if candidate.score >= least)
        likely += [candidate for candidate in each if candidate.score >= least]
        later += [each for each in each if each.score < least and each.layer > lowest]

    def order(candidate: Candidate) -> tuple[float, int]:
        return candidate.cost, reductions.index(candidate.choice.reduction)

    return sorted(likely, key=order) + sorted(later, key=order)


@dataclass(frozen=True)
class Asked:
    """Prompts, and what one dense pass over each of them showed."""

    questions: Sequence[Question]
    seen: Sequence[Seen]

    @property
    def right(self) -> float:
        """How many of them the full model has right."""
        return sum(one.right for one in self.seen)


@dataclass(frozen=True)
class Trial:
    """How much of the answers stayed under a candidate.

    pairs: of each prompt that the full model has right, how much stayed and out of how much.
    complete: whether all were asked; a trial ends where it cannot hold any more.
    kinds: of each of these prompts, its question's; () where there are none.
    """

    candidate: Candidate
    pairs: tuple[tuple[float, float], ...]
    complete: bool
    kinds: tuple[str, ...] = ()

    @property
    def lost(self) -> dict[str, float]:
        """By kind of question, how much did not stay, the most first; nothing where all stayed."""
        found: dict[str, float] = {}
        for (mine, full), kind in zip(self.pairs, self.kinds, strict=False):
            if kind and mine < full:
                found[kind] = found.get(kind, 0.0) + full - mine
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def kept(self) -> float:
        """Answers that stayed; of answers that nobody scores, tokens."""
        return sum(mine for mine, _ in self.pairs)

    @property
    def asked(self) -> float:
        """The full model's."""
        return sum(full for _, full in self.pairs)

    @cached_property
    def share(self) -> Interval:
        """The share that stayed; nothing of nothing is nothing."""
        return of_kept(self.pairs) or Interval(0.0, 0.0, 1.0)

    def holds(self, least: float) -> bool:
        """Whether it is known with 95% that at least this share stays."""
        return self.complete and self.share.low >= least


@dataclass(frozen=True)
class Attempt:
    """A candidate's trial, and its confirmation by other prompts where it held; None without."""

    trial: Trial
    confirmation: Trial | None = None

    @property
    def last(self) -> Trial:
        """The trial that decided."""
        return self.confirmation or self.trial


@dataclass(frozen=True)
class Outcome:
    """What was tried, and what is chosen; None if nothing holds.

    confirmed_by: the prompts of the confirmations; None if there was none.
    """

    attempts: tuple[Attempt, ...] = ()
    chosen: Attempt | None = None
    confirmed_by: Asked | None = None


def least_answers(least: float) -> int:
    """Right answers of the full model below which a layer that keeps all of them does not hold."""
    count = 1
    while of_mean([1.0] * count).low < least:
        count += 1
    return count


def is_hopeless(pairs: Sequence[tuple[float, float]], left: int, least: float) -> bool:
    """Whether a trial could not hold even if the `left` answers that are not asked yet all stay."""
    shares = [mine / full for mine, full in pairs]
    return of_mean([*shares, *[1.0] * left]).low < least


def try_out(
    decoder: DenseDecoder,
    asked: Asked,
    candidate: Candidate,
    least: float,
    progress: Callable[[int], None],
) -> Trial:
    """Decode the answers that the full model has right, those most likely lost first.

    It ends once no more than a share below `least` can be shown to stay.
    """
    right = [
        (question, one)
        for question, one in zip(asked.questions, asked.seen, strict=True)
        if one.right
    ]
    right.sort(key=lambda each: each[1].scores[candidate.choice][candidate.layer])
    pairs: list[tuple[float, float]] = []
    for number, (question, one) in enumerate(right):
        progress(number)
        pairs.append(answers_kept(decoder, question, one, candidate.layer, candidate.choice))
        if is_hopeless(pairs, len(right) - len(pairs), least):
            break
    kinds = tuple(question.kind for question, _ in right[: len(pairs)])
    return Trial(candidate, tuple(pairs), len(pairs) == len(right), kinds)


def choose(
    asked: Asked,
    confirm_by: Callable[[], Asked],
    tried: Sequence[Candidate],
    least: float,
    try_one: Callable[[Asked, Candidate], Trial],
) -> Outcome:
    """Try the candidates in turn; the first that holds on both sets of prompts is chosen.

    confirm_by: the prompts of confirmations, looked at when the first candidate needs them. The
    same as `asked` if there are no others: then a trial is its own confirmation.
    """
    attempts: list[Attempt] = []
    others: Asked | None = None
    if asked.right < least_answers(least):
        return Outcome()
    for candidate in tried:
        trial = try_one(asked, candidate)
        if not trial.holds(least):
            attempts.append(Attempt(trial))
            continue
        others = others or confirm_by()
        if others is not asked and others.right < least_answers(least):
            # No candidate could be confirmed by these.
            attempts.append(Attempt(trial))
            break
        confirmation = trial if others is asked else try_one(others, candidate)
        attempts.append(Attempt(trial, confirmation))
        if confirmation.holds(least):
            return Outcome(tuple(attempts), attempts[-1], others)
    return Outcome(tuple(attempts), None, others)
