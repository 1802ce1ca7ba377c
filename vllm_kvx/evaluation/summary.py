"""Answers summed up: by policy, task and length, beside `full` on the same prompts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_kvx.evaluation.intervals import Interval, of_mean, of_ratio, of_values
from vllm_kvx.evaluation.store import Answer, Question

FULL = "full"
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Cell:
    """What some prompts gave under one policy.

    score: mean share that is right; for perplexity the mean negative logprob, in nats.
    of_full: the ratio to `full` on the same prompts; for perplexity the difference in nats. None
    where `full` was right nowhere, or did not answer them.
    kept, read, tokens: means over the prompts, see ``Answer``.
    """

    count: int
    score: Interval
    of_full: Interval | None
    kept: float
    read: float
    tokens: float


class Summary:
    """Cells of a run.

    policies, tasks, lengths: those that have answers, in the order that they were asked for.
    """

    def __init__(self, answers: Iterable[Answer], policies: Sequence[str] = ()) -> None:
        self._answers = list(answers)
        questions = [answer.question for answer in self._answers]
        found = dict.fromkeys(q.policy for q in questions)
        self.policies = [p for p in policies if p in found] or list(found)
        self.tasks = list(dict.fromkeys(q.task for q in questions))
        self.lengths = sorted({q.length for q in questions if q.length})
        self._cells: dict[tuple[str, str | None, int | None], Cell | None] = {}
        self._full = {
            self._key(a.question): a.score for a in self._answers if a.question.policy == FULL
        }

    @property
    def scored(self) -> list[str]:
        """The tasks that are answered right or wrong."""
        return [task for task in self.tasks if task != PERPLEXITY]

    def cell(self, policy: str, task: str | None = None, length: int | None = None) -> Cell | None:
        """The cell of a policy; over all scored tasks, or all lengths, where None is given."""
        key = policy, task, length
        if key not in self._cells:
            self._cells[key] = self._found(policy, task, length)
        return self._cells[key]

    def _found(self, policy: str, task: str | None, length: int | None) -> Cell | None:
        def wanted(q: Question) -> bool:
            right = q.task != PERPLEXITY if task is None else q.task == task
            return q.policy == policy and right and (length is None or q.length == length)

        return self._cell([a for a in self._answers if wanted(a.question)], task == PERPLEXITY)

    def _cell(self, answers: Sequence[Answer], is_perplexity: bool) -> Cell | None:
        if not answers:
            return None
        scores = [answer.score for answer in answers]
        pairs = [
            (answer.score, self._full[key])
            for answer in answers
            if (key := self._key(answer.question)) in self._full
        ]
        of_full: Interval | None = None
        if pairs:
            apart = [first - second for first, second in pairs]
            of_full = of_values(apart) if is_perplexity else of_ratio(pairs)

        def mean(value: Callable[[Answer], float]) -> float:
            return math.fsum(map(value, answers)) / len(answers)

        return Cell(
            len(answers),
            of_values(scores) if is_perplexity else of_mean(scores),
            of_full,
            mean(lambda answer: answer.kept),
            mean(lambda answer: answer.read),
            mean(lambda answer: float(answer.tokens)),
        )

    @staticmethod
    def _key(question: Question) -> tuple[str, int, int]:
        return question.task, question.length, question.index
