"""Answers summed up: by policy, task and length, beside the yardstick on the same prompts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.intervals import Interval, of_difference, of_mean, of_ratio, of_values
from vllm_kvx.tools.evaluate.loops import can_loop, has_loop
from vllm_kvx.tools.evaluate.rows import FULL_ORIGINAL, FULL_ROW, Row
from vllm_kvx.tools.evaluate.shares import ends_early, untouched_tokens
from vllm_kvx.tools.evaluate.store import Answer, QuestionId

PERPLEXITY = "perplexity"
# The shortest bucket's prompts have up to so many tokens; each other one's up to twice as many.
SHORTEST_BUCKET = 512

# What there is to say of a row that `kept_all` holds of, and of one whose answers all end early.
_KEPT_ALL = "kept and read every entry of these prompts: ask longer ones to see what it loses"
_ALL_EARLY = "retained nothing, since no answer has more than {} tokens: ask for longer ones"


@dataclass(frozen=True)
class Cell:
    """What some prompts gave under one policy.

    score: mean share that is right; for perplexity the mean negative logprob, in nats.
    of_full: the ratio to the yardstick on the same prompts; for perplexity the difference in nats.
    None where the yardstick was right nowhere, or did not answer them.
    from_full: the mean of the scores less the yardstick's on the same prompts; None for perplexity,
    and where the yardstick did not answer.
    same: share of the answers whose text is the yardstick's, but for white space; None for
    perplexity, whose text is given, and where the yardstick did not answer.
    loops: share of the answers that end in a loop (SPEED, Eq. 8), of tasks of which any answer is
    long enough for one; None where none is.
    kept, read, tokens: means over the prompts, see ``Answer``.
    early, untold: answers that ended before retention (`after=n`) dropped anything, and those that
    an older version wrote down, of which nobody knows; 0 of a policy that does not wait.
    """

    count: int
    score: Interval
    of_full: Interval | None
    from_full: Interval | None
    same: Interval | None
    loops: Interval | None
    kept: float
    read: float
    tokens: float
    early: int = 0
    untold: int = 0


def kept_all(row: Row, cell: Cell) -> bool:
    """Whether a policy dropped and skipped nothing of a cell's prompts, so that it was `full`.

    `full` itself, which may be over another KV cache, keeps all by its nature. One that propagates
    may change what it keeps, as SwiftKV does.
    """
    policy = parse_policy(row.policy)
    may_be_full = not policy.is_full and policy.propagate is None
    return may_be_full and cell.kept >= 1 and cell.read >= 1


def untested(row: Row, cell: Cell) -> str | None:
    """Why a cell's answers say nothing of what a policy loses, after its name; None if they do."""
    if cell.early == cell.count:
        return _ALL_EARLY.format(untouched_tokens(parse_policy(row.policy)))
    return _KEPT_ALL if kept_all(row, cell) else None


@dataclass(frozen=True)
class Bucket:
    """Prompts of `low` to `high` tokens, both included."""

    low: int
    high: int

    def __contains__(self, tokens: int) -> bool:
        return self.low <= tokens <= self.high


class Summary:
    """Cells of a run.

    rows, tasks, lengths: those that have answers, in the order that they were asked for.
    has_short: whether there are questions without a length.
    """

    def __init__(self, answers: Iterable[Answer], rows: Sequence[Row] = ()) -> None:
        self._answers = list(answers)
        questions = [answer.question for answer in self._answers]
        found = dict.fromkeys(answer.row for answer in self._answers)
        self.rows = [row for row in rows if row in found] or list(found)
        self.tasks = list(dict.fromkeys(q.task for q in questions))
        self.lengths = sorted({q.length for q in questions if q.length})
        self.has_short = any(q.length == 0 for q in questions)
        self._cells: dict[tuple[Row, str | None, int | None, Bucket | None], Cell | None] = {}
        self._by_row: dict[Row, dict[QuestionId, Answer]] = {}
        for answer in self._answers:
            self._by_row.setdefault(answer.row, {})[answer.question] = answer

    @property
    def yardstick(self) -> Row:
        """The row that others are compared with: `full`, of the original where there is one."""
        return FULL_ORIGINAL if FULL_ORIGINAL in self._by_row else FULL_ROW

    @property
    def scored(self) -> list[str]:
        """The tasks that are answered right or wrong."""
        return [task for task in self.tasks if task != PERPLEXITY]

    @cached_property
    def looping(self) -> frozenset[str]:
        """The tasks of which any answer is long enough for a loop."""
        found: set[str] = set()
        for answer in self._answers:
            task = answer.question.task
            if task not in found and task != PERPLEXITY and can_loop(answer.text):
                found.add(task)
        return frozenset(found)

    @cached_property
    def _looped(self) -> frozenset[tuple[Row, QuestionId]]:
        return frozenset(
            a.key for a in self._answers if a.question.task in self.looping and has_loop(a.text)
        )

    @property
    def buckets(self) -> list[Bucket]:
        """The tokens of the scored tasks' prompts, in buckets of which each doubles the last."""
        tokens = {a.tokens for a in self._answers if a.question.task != PERPLEXITY}
        found, bucket = [], Bucket(1, SHORTEST_BUCKET)
        while tokens and bucket.low <= max(tokens):
            if any(count in bucket for count in tokens):
                found.append(bucket)
            bucket = Bucket(bucket.high + 1, 2 * bucket.high)
        return found

    def answers(self, row: Row) -> dict[QuestionId, Answer]:
        """The answers of a row, by what was asked."""
        return self._by_row.get(row, {})

    def cell(
        self,
        row: Row,
        task: str | None = None,
        length: int | None = None,
        bucket: Bucket | None = None,
    ) -> Cell | None:
        """The cell of a row; over all scored tasks, lengths or buckets, where None is given."""
        key = row, task, length, bucket
        if key not in self._cells:
            wanted = [
                answer
                for question, answer in self.answers(row).items()
                if (question.task != PERPLEXITY if task is None else question.task == task)
                and (length is None or question.length == length)
                and (bucket is None or answer.tokens in bucket)
            ]
            self._cells[key] = self._cell(wanted, task == PERPLEXITY)
        return self._cells[key]

    def _cell(self, answers: Sequence[Answer], is_perplexity: bool) -> Cell | None:
        if not answers:
            return None
        scores = [answer.score for answer in answers]
        full = self.answers(self.yardstick)
        both = [(answer, full[answer.question]) for answer in answers if answer.question in full]
        of_full = from_full = same = None
        if both and is_perplexity:
            of_full = of_values([first.score - second.score for first, second in both])
        elif both:
            pairs = [(first.score, second.score) for first, second in both]
            of_full = of_ratio(pairs)
            from_full = of_difference(pairs, [first.question.text for first, _ in both])
            same = of_mean([float(_plain(a.text) == _plain(b.text)) for a, b in both])
        long = [a.key for a in answers if a.question.task in self.looping]
        policy = parse_policy(answers[0].row.policy)
        counts = [a.generated for a in answers if policy.num_generated]

        def mean(value: Callable[[Answer], float]) -> float:
            return math.fsum(map(value, answers)) / len(answers)

        return Cell(
            len(answers),
            of_values(scores) if is_perplexity else of_mean(scores),
            of_full,
            from_full,
            same,
            of_mean([float(key in self._looped) for key in long]) if long else None,
            mean(lambda answer: answer.kept),
            mean(lambda answer: answer.read),
            mean(lambda answer: float(answer.tokens)),
            sum(count is not None and ends_early(policy, count) for count in counts),
            counts.count(None),
        )


def _plain(text: str) -> str:
    """An answer without what no reader sees: its white space is single spaces."""
    return " ".join(text.split())
