"""Asks candidates in rounds, until the answers decide or the time is over."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.engine import on_cpu
from vllm_kvx.tools.evaluate.asking import ask
from vllm_kvx.tools.evaluate.engine import OwnEngine, Prompt
from vllm_kvx.tools.evaluate.full_answers import are_too_few
from vllm_kvx.tools.evaluate.intervals import Interval, least_right, of_kept
from vllm_kvx.tools.evaluate.progress import AnswersBar
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.shares import ends_early, untouched_tokens
from vllm_kvx.tools.evaluate.store import QuestionId, Store
from vllm_kvx.tools.recommend.ladder import Candidate, that_may_win
from vllm_kvx.tools.recommend.questions import Questions, Round
from vllm_kvx.tools.recommend.stopping import Verdict, level_of, verdict

# Questions that are asked between two looks at the clock, on a GPU and on a CPU.
AT_A_TIME, AT_A_TIME_ON_CPU = 64, 8


class Clock:
    """How much of a run's time is left.

    now: seconds of a clock that only moves forward.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic) -> None:
        """minutes: the limit; None for none."""
        self._now = now
        self.minutes = minutes
        self.ends = float("inf") if minutes is None else now() + 60 * minutes
        # Seconds a question, by row: what the next ones are taken to need.
        self._paces: dict[Row, float] = {}

    def has_time_for(self, row: Row, count: int) -> bool:
        """Whether so many questions of a row can be answered, as far as the pace so far tells.

        One that nobody asked is taken to be as fast as the fastest; else it is broken off.
        """
        pace = self._paces.get(row, min(self._paces.values(), default=0.0))
        return self._now() + pace * count < self.ends

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self._now() >= self.ends

    def time(self, row: Row, count: int, act: Callable[[], None]) -> None:
        """Runs `act`, which answers so many questions of a row, and notes the pace."""
        begun = self._now()
        act()
        self._paces[row] = (self._now() - begun) / count


class OutOfTime(Exception):
    """The limit is reached, or would be before the next answers are there."""


class LimitedBar(AnswersBar):
    """The bar of a round's answers, which ends an engine's work when the time is over."""

    def __init__(self, rows: Mapping[Row, Sequence[Prompt]], clock: Clock) -> None:
        """rows: what each is yet to be asked."""
        super().__init__(rows)
        self._clock = clock

    def step(self, read: Sequence[int], written: int) -> None:
        """Notes that an engine's step is done.

        Raises:
            OutOfTime: answers that the engine has begun are lost.
        """
        super().step(read, written)
        if self._clock.is_over:
            raise OutOfTime


@dataclass
class Standing:
    """What is known of a candidate.

    share: that it kept, with its interval; None before a first look. asked: questions that it
    answered; right: how many of them `full` has right.
    """

    candidate: Candidate
    verdict: Verdict = Verdict.UNDECIDED
    share: Interval | None = None
    asked: int = 0
    right: float = 0.0

    @property
    def row(self) -> Row:
        """What its answers are stored under."""
        return Row(self.candidate.name)


class Rounds:
    """A run's questions to all candidates, engine by engine.

    standings: by candidate, those that gain most first. out_of_time: whether the time ended it.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        questions: Questions,
        store: Store,
        keep: float,
        clock: Clock,
        load: Callable[[], Any],
        say: Callable[[str], None],
    ) -> None:
        """load: gives the tokenizer. say: is told of every look, in a line."""
        self.standings = [Standing(each) for each in candidates]
        self.questions, self.keep, self.clock = questions, keep, clock
        self.level = level_of(questions.rounds)
        self.out_of_time = False
        self._store, self._load, self._say = store, load, say

    @property
    def best(self) -> Candidate | None:
        """The candidate that gains most of those that keep the answers; None if none does yet."""
        kept = (each for each in self.standings if each.verdict is Verdict.KEPT)
        return max((e.candidate for e in kept), key=lambda e: e.gains.requests, default=None)

    def open(self, among: Sequence[Candidate]) -> list[Standing]:
        """Those that are still worth asking; others that the best one outdoes are marked so."""
        may_win = that_may_win(among, self.best)
        found = []
        for each in self.standings:
            if each.verdict is not Verdict.UNDECIDED or each.candidate not in among:
                continue
            if each.candidate in may_win:
                found.append(each)
            else:
                each.verdict = Verdict.OUTDONE
        return found

    def ask(self, engine: OwnEngine, members: Sequence[Candidate]) -> None:
        """Has an engine answer for its members until each is decided, or nothing is left to ask.

        Raises:
            ToolError: the engine fails, `full` has too few answers right, or the time was over
                before the first round was.
        """
        for each in self.questions:
            if not self.open(members):
                return
            try:
                self._round(engine, each, self.open(members))
            except OutOfTime:
                self.out_of_time = True
            self._look(each, self.open(members))
            if self.out_of_time:
                if all(standing.share is None for standing in self.standings):
                    raise ToolError(self._too_short(each))
                return
        self.open(members)

    def _round(self, engine: OwnEngine, each: Round, wanted: Sequence[Standing]) -> None:
        """Asks what is missing of a round: `full` first, then those that gain most.

        Raises:
            OutOfTime: what is answered then is kept.
        """
        missing = {FULL_ROW: [q for q in each.asked if (FULL_ROW, q) not in self._store]}
        for standing in wanted:
            missing[standing.row] = self._missing(standing, each)
        if not any(missing.values()):
            return
        prompts = {row: [each.asked[q].prompt for q in left] for row, left in missing.items()}
        with closing(LimitedBar(prompts, self.clock)) as bar:
            for row, left in missing.items():
                self._store.note_resolved(row, engine.resolved(row))
                self._ask(engine, row, left, each, bar)
                if row == FULL_ROW:
                    bar.clear()
                    self._check_full(each)

    def _missing(self, standing: Standing, each: Round) -> list[QuestionId]:
        """The questions of a round that a candidate is to be asked, those to be asked again too."""
        left = [q for q in each.asked if not self._is_told(standing, q)]
        if again := sum((standing.row, q) in self._store for q in left):
            self._say(
                f"{standing.row}: {again} answers of an older version are asked again: it did not "
                "write down how many tokens they have"
            )
        return left

    def _is_told(self, standing: Standing, question: QuestionId) -> bool:
        """Whether an answer is there, and tells whether it ended before anything was dropped."""
        if (standing.row, question) not in self._store:
            return False
        if not standing.candidate.policy.num_generated:
            return True
        return self._store[standing.row, question].generated is not None

    def _ask(
        self,
        engine: OwnEngine,
        row: Row,
        left: Sequence[QuestionId],
        each: Round,
        bar: AnswersBar,
    ) -> None:
        step = AT_A_TIME_ON_CPU if on_cpu() else AT_A_TIME
        for begin in range(0, len(left), step):
            some = left[begin : begin + step]
            if not self.clock.has_time_for(row, len(some)):
                raise OutOfTime
            self.clock.time(
                row,
                len(some),
                lambda some=some: ask(  # type: ignore[misc]
                    engine, row, some, each.asked, self._store, bar, self._load
                ),
            )

    def _check_full(self, each: Round) -> None:
        """Raise ToolError where `full` has too few answers right for a share of them."""
        scores = [self._store[FULL_ROW, question].score for question in each.asked]
        if are_too_few(scores):
            raise ToolError(
                f"full has {sum(scores):.3g} of {len(scores)} answers right, and a share of so few "
                f"says nothing ({least_right()} are the least): use --tasks of which it answers "
                "more (`vllm-kvx evaluate MODEL --tasks list`), a shorter --input, or your own "
                f"--prompts. Its answers are kept in {self._store.directory}"
            )

    def _look(self, each: Round, wanted: Sequence[Standing]) -> None:
        """Looks at what the answers so far say of those that were asked."""
        for standing in wanted:
            row, store, policy = standing.row, self._store, standing.candidate.policy
            both = [q for q in each.asked if self._is_told(standing, q) and (FULL_ROW, q) in store]
            # Such an answer is the one without retention.
            early = {q for q in both if ends_early(policy, store[row, q].generated or 0)}
            if early:
                self._say(
                    f"{row}: {len(early)} of {len(both)} answers do not count: they ended within "
                    f"{untouched_tokens(policy)} tokens, before retention dropped anything"
                )
            both = [q for q in both if q not in early]
            if not both:
                continue
            pairs = [(store[row, q].score, store[FULL_ROW, q].score) for q in both]
            standing.share = of_kept(pairs, self.level)
            standing.asked, standing.right = len(both), sum(full for _, full in pairs)
            standing.verdict = verdict(standing.share, self.keep)
            if (share := standing.share) is not None:
                self._say(
                    f"round {each.number} of {self.questions.rounds}: {row}: kept "
                    f"{share.value:.1%} [{share.low:.1%}-{share.high:.1%}] of "
                    f"{standing.right:.3g} right answers: {standing.verdict}"
                )

    def _too_short(self, each: Round) -> str:
        """What to say where the time was over before any policy was asked."""
        done = sum((FULL_ROW, question) in self._store for question in each.asked)
        return (
            f"--time-limit {self.clock.minutes:g}: the time was over before any policy was asked "
            f"(full has answered {done} of {len(each.asked)} questions of the first round): give "
            "it more time, or a shorter --input. The answers are kept: the same command goes on"
        )
