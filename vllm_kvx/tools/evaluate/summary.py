"""Answers summed up: by policy, task and length, beside the yardstick on the same prompts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_kvx.policy.cache_dtype import FULL, split_dtype
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.intervals import Interval, of_mean, of_ratio, of_values
from vllm_kvx.tools.evaluate.loops import can_loop, has_loop
from vllm_kvx.tools.evaluate.rows import FULL_ORIGINAL, policy_of
from vllm_kvx.tools.evaluate.store import Answer, Question

PERPLEXITY = "perplexity"
# The shortest bucket's prompts have up to so many tokens; each other one's up to twice as many.
SHORTEST_BUCKET = 512

# What there is to say of a row of which `kept_all` holds.
KEPT_ALL = "kept and read every entry of these prompts: ask longer ones to see what it loses"

# A question, whoever answers it: task, length and index.
Asked = tuple[str, int, int]


@dataclass(frozen=True)
class Cell:
    """What some prompts gave under one policy.

    score: mean share that is right; for perplexity the mean negative logprob, in nats.
    of_full: the ratio to the yardstick on the same prompts; for perplexity the difference in nats.
    None where the yardstick was right nowhere, or did not answer them.
    same: share of the answers whose text is the yardstick's, but for white space; None for
    perplexity, whose text is given, and where the yardstick did not answer.
    loops: share of the answers that end in a loop (SPEED, Eq. 8), of tasks of which any answer is
    long enough for one; None where none is.
    kept, read, tokens: means over the prompts, see ``Answer``.
    """

    count: int
    score: Interval
    of_full: Interval | None
    same: Interval | None
    loops: Interval | None
    kept: float
    read: float
    tokens: float


def kept_all(row: str, cell: Cell) -> bool:
    """Whether a policy dropped and skipped nothing of a cell's prompts, so that it was `full`.

    `full` itself, which may be over another KV cache, keeps all by its nature. One that propagates
    may change what it keeps, as SwiftKV does.
    """
    policy = parse_policy(split_dtype(policy_of(row))[0])
    may_be_full = not policy.is_full and policy.propagate is None
    return may_be_full and cell.kept >= 1 and cell.read >= 1


@dataclass(frozen=True)
class Bucket:
    """Prompts of `low` to `high` tokens, both included."""

    low: int
    high: int

    def __contains__(self, tokens: int) -> bool:
        return self.low <= tokens <= self.high


class Summary:
    """Cells of a run.

    policies: rows of the report, see ``rows``. policies, tasks, lengths: those that have answers,
    in the order that they were asked for. has_short: whether there are questions without a length.
    """

    def __init__(self, answers: Iterable[Answer], policies: Sequence[str] = ()) -> None:
        self._answers = list(answers)
        questions = [answer.question for answer in self._answers]
        found = dict.fromkeys(q.policy for q in questions)
        self.policies = [p for p in policies if p in found] or list(found)
        self.tasks = list(dict.fromkeys(q.task for q in questions))
        self.lengths = sorted({q.length for q in questions if q.length})
        self.has_short = any(q.length == 0 for q in questions)
        self._cells: dict[tuple[str, str | None, int | None, Bucket | None], Cell | None] = {}
        self._by_row: dict[str, dict[Asked, Answer]] = {}
        for answer in self._answers:
            q = answer.question
            self._by_row.setdefault(q.policy, {})[q.task, q.length, q.index] = answer

    @property
    def yardstick(self) -> str:
        """The row that others are compared with: `full`, of the original where there is one."""
        return FULL_ORIGINAL if FULL_ORIGINAL in self._by_row else FULL

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
    def _looped(self) -> frozenset[Question]:
        return frozenset(
            a.question
            for a in self._answers
            if a.question.task in self.looping and has_loop(a.text)
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

    def answers(self, policy: str) -> dict[Asked, Answer]:
        """The answers of a row, by what was asked."""
        return self._by_row.get(policy, {})

    def cell(
        self,
        policy: str,
        task: str | None = None,
        length: int | None = None,
        bucket: Bucket | None = None,
    ) -> Cell | None:
        """The cell of a policy; over all scored tasks, lengths or buckets, where None is given."""
        key = policy, task, length, bucket
        if key not in self._cells:
            wanted = [
                answer
                for (name, fitted, _), answer in self.answers(policy).items()
                if (name != PERPLEXITY if task is None else name == task)
                and (length is None or fitted == length)
                and (bucket is None or answer.tokens in bucket)
            ]
            self._cells[key] = self._cell(wanted, task == PERPLEXITY)
        return self._cells[key]

    def _cell(self, answers: Sequence[Answer], is_perplexity: bool) -> Cell | None:
        if not answers:
            return None
        scores = [answer.score for answer in answers]
        full = self.answers(self.yardstick)
        both = [
            (answer, full[key])
            for answer in answers
            if (key := (answer.question.task, answer.question.length, answer.question.index))
            in full
        ]
        of_full = same = None
        if both and is_perplexity:
            of_full = of_values([first.score - second.score for first, second in both])
        elif both:
            of_full = of_ratio([(first.score, second.score) for first, second in both])
            same = of_mean([float(_plain(a.text) == _plain(b.text)) for a, b in both])
        long = [a.question for a in answers if a.question.task in self.looping]

        def mean(value: Callable[[Answer], float]) -> float:
            return math.fsum(map(value, answers)) / len(answers)

        return Cell(
            len(answers),
            of_values(scores) if is_perplexity else of_mean(scores),
            of_full,
            same,
            of_mean([float(question in self._looped) for question in long]) if long else None,
            mean(lambda answer: answer.kept),
            mean(lambda answer: answer.read),
            mean(lambda answer: float(answer.tokens)),
        )


def _plain(text: str) -> str:
    """An answer without what no reader sees: its white space is single spaces."""
    return " ".join(text.split())
