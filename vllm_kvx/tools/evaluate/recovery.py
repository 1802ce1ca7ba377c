"""What tuning brings back of the answers that a policy loses on the original's weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_kvx.tools.evaluate.intervals import Interval, of_recovery
from vllm_kvx.tools.evaluate.rows import FULL_ORIGINAL, FULL_ROW, Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Bucket, Summary
from vllm_kvx.tools.tasks.table import group_of

Wanted = Callable[[QuestionId, Answer], bool]


@dataclass(frozen=True)
class Recovery:
    """A policy's recovery over some of the prompts that all three answered.

    row: the policy on the tuned model. over: a group of tasks, a task, a length or `all`.
    count: how many prompts.
    full, cut, tuned: mean scores of the original in full, of the original under the policy and of
    the tuned model under it; for perplexity nats a token.
    share: (tuned - cut) / (full - cut); None where the cut loses nothing significant.
    lost, back, newly_lost: what `share` is made of, prompt by prompt, means over all of them: what
    the cut loses, what of this tuning brings back, and what tuning loses though the cut kept it.
    None for perplexity, where every text's score changes a little.
    """

    row: Row
    over: str
    count: int
    full: float
    cut: float
    tuned: float
    share: Interval | None
    lost: float | None = None
    back: float | None = None
    newly_lost: float | None = None


def recoveries(summary: Summary, by_task: bool = False) -> list[Recovery]:
    """What tuned weights won back under each policy: a `Recovery` for every part of the questions.

    The parts are all scored tasks, each group of tasks, each length, perplexity and, with
    `by_task`, each task. The list is empty where no original was asked.
    """
    found = []
    for row in summary.rows:
        if row == FULL_ROW or row.on_original or row.of_original() not in summary.rows:
            continue
        parts = [*_parts(summary)]
        if by_task:
            parts += [(task, _is(task)) for task in summary.scored]
        for over, wanted in parts:
            recovery = _recovery(summary, row, over, wanted)
            if recovery is not None:
                found.append(recovery)
    return found


def _parts(summary: Summary) -> Iterator[tuple[str, Wanted]]:
    """Names of what is looked at, and which prompts are of it."""
    yield "all", lambda question, _: question.task != PERPLEXITY
    groups = list(dict.fromkeys(map(group_of, summary.scored)))
    for group in groups if len(groups) > 1 else ():
        yield group, _of(group)
    for bucket in summary.buckets if len(summary.buckets) > 1 else ():
        yield bucket_name(bucket), _within(bucket)
    yield PERPLEXITY, lambda question, _: question.task == PERPLEXITY


def _of(group: str) -> Wanted:
    return lambda question, _: group_of(question.task) == group


def _is(task: str) -> Wanted:
    return lambda question, _: question.task == task


def _within(bucket: Bucket) -> Wanted:
    return lambda question, answer: question.task != PERPLEXITY and answer.tokens in bucket


def bucket_name(bucket: Bucket) -> str:
    """A bucket as a report has it."""
    return f"{bucket.low:,}-{bucket.high:,} tokens"


def _recovery(summary: Summary, row: Row, over: str, wanted: Wanted) -> Recovery | None:
    full, cut, tuned = map(summary.answers, (FULL_ORIGINAL, row.of_original(), row))
    triples = [
        (answer.score, cut[question].score, tuned[question].score)
        for question, answer in full.items()
        if question in cut and question in tuned and wanted(question, answer)
    ]
    if not triples:
        return None
    # Fewer nats are better.
    sign = -1.0 if over == PERPLEXITY else 1.0
    share = of_recovery([(sign * a, sign * b, sign * c) for a, b, c in triples])
    count = len(triples)
    means = [sum(scores) / count for scores in zip(*triples, strict=True)]
    parts: list[float] = []
    if over != PERPLEXITY:
        lost = [max(a - b, 0.0) for a, b, _ in triples]
        back = [min(max(c - b, 0.0), gone) for (_, b, c), gone in zip(triples, lost, strict=True)]
        newly = [max(min(a, b) - c, 0.0) for a, b, c in triples]
        parts = [sum(part) / count for part in (lost, back, newly)]
    return Recovery(row, over, count, means[0], means[1], means[2], share, *parts)
