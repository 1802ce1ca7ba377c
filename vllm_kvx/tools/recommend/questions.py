"""The questions of a run in the order in which rounds ask them; prompts are made round by round."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvx.tools.evaluate.questions import PreparedPrompt, Suite
from vllm_kvx.tools.evaluate.store import QuestionId
from vllm_kvx.tools.recommend.defaults import FIRST
from vllm_kvx.tools.recommend.stopping import rounds_of


def _quiet(done: int, total: int) -> None:
    """Tells nobody how many prompts are made."""


@dataclass(frozen=True)
class Round:
    """number: from 1. asked: all questions so far; new: those of this round."""

    number: int
    asked: dict[QuestionId, PreparedPrompt]
    new: dict[QuestionId, PreparedPrompt]


class Questions:
    """What is asked: generated questions to a length, or those of data sets, never both.

    count: of all. rounds: how many there are at most.
    """

    def __init__(
        self, suite: Suite, most: int, load: Callable[[], Any], first: int = FIRST
    ) -> None:
        """suite: with generated tasks alone, or data sets alone. most: questions. load: gives the
        tokenizer, in each process that makes prompts. first: questions of the first round.

        Raises:
            ToolError: a data set cannot be read, or a prompt is longer than it may be.
        """
        self._suite, self._load = suite, load
        self._made: list[dict[QuestionId, PreparedPrompt]] = []
        self._fixed: list[tuple[QuestionId, PreparedPrompt]] = []
        if suite.fixed:
            found = replace(suite, generated=(), samples=None).prepare(load, _quiet)
            self._fixed = list(found.items())
            # A file may be sorted, and rounds should ask alike.
            random.Random(suite.seed).shuffle(self._fixed)
            self._fixed = self._fixed[:most]
            self.count = len(self._fixed)
            self._ends = rounds_of(self.count, first)
            self._step = 1
        else:
            # Whole samples, one of each task.
            self._step = len(suite.generated)
            samples = max(most // self._step, 1)
            self.count = samples * self._step
            ends = rounds_of(samples, max(first // self._step, 1))
            self._ends = [end * self._step for end in ends]

    @property
    def rounds(self) -> int:
        """How many rounds there are at most."""
        return len(self._ends)

    @property
    def first(self) -> int:
        """Questions of the first round."""
        return self._ends[0]

    def context(self, ahead: int = 0) -> int:
        """Tokens that an engine has to take: the longest prompt with its answer.

        ahead: tokens that a policy drafts behind a prompt, and for which there has to be room, too.
        """
        return self._suite.context(dict(self._fixed), ahead)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self._suite.longest_prompt(dict(self._fixed))

    @property
    def median(self) -> int:
        """Tokens of the median prompt of the data sets, or of every prompt that is made."""
        lengths = sorted(len(each.prompt.token_ids) for _, each in self._fixed)
        return lengths[len(lengths) // 2] if lengths else max(self._suite.lengths)

    def __iter__(self) -> Iterator[Round]:
        asked: dict[QuestionId, PreparedPrompt] = {}
        for index in range(self.rounds):
            new = self._round(index)
            asked = {**asked, **new}
            yield Round(index + 1, asked, new)

    def _round(self, index: int) -> dict[QuestionId, PreparedPrompt]:
        """The new questions of a round, which are made once."""
        if index < len(self._made):
            return self._made[index]
        begin, end = self._ends[index - 1] if index else 0, self._ends[index]
        if self._fixed:
            new = dict(self._fixed[begin:end])
        else:
            begin, end = begin // self._step, end // self._step
            suite = replace(self._suite, begin=begin, samples=end - begin)
            new = suite.prepare(self._load, _quiet)
        self._made.append(new)
        return new
