"""Rounds of questions to an engine whose answers are known beforehand."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.engine import Answered, Progress, Prompt
from vllm_kvx.tools.evaluate.questions import PreparedPrompt
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.shares import Shares
from vllm_kvx.tools.evaluate.store import ANSWERS_FILE, QuestionId, Store
from vllm_kvx.tools.recommend import report
from vllm_kvx.tools.recommend import rounds as rounds_module
from vllm_kvx.tools.recommend.gains import Gains, Workload
from vllm_kvx.tools.recommend.ladder import Candidate, LeftOut
from vllm_kvx.tools.recommend.questions import Round
from vllm_kvx.tools.recommend.rounds import Clock, Rounds, Standing
from vllm_kvx.tools.recommend.stopping import Verdict, rounds_of
from vllm_kvx.tools.tasks.base import FixedTask, Sample

MOST = 256
# By gain, the best first.
NAMES = ("streamingllm", "snapkv:kv_rate=0.2", "snapkv:kv_rate=0.4", "fier-512")
WAITING = (
    "snapkv:kv_rate=0.2,after=8",
    "fastkv:tsp_layer=3,kv_rate=0.2,after=8",
    "fastkv:tsp_layer=3,kv_rate=1+snapkv:kv_rate=0.2,after=8",
)


class Numbers(FixedTask):
    """Asks for a number, which stands in the prompt's one token."""

    name, about, max_tokens = "numbers", "", 4

    def samples(self) -> Sequence[Sample]:
        return [Sample(str(index), (str(index),)) for index in range(MOST)]

    def score(self, answer: str, sample: Sample) -> float:
        return float(answer == sample.references[0])


class Prepared:
    """All prompts at once, in the rounds of as many questions."""

    def __init__(self) -> None:
        task = Numbers()
        self.all = {
            QuestionId(task.name, 0, index): PreparedPrompt(Prompt((index,), 4), task, sample)
            for index, sample in enumerate(task.samples())
        }
        self.ends = rounds_of(MOST)
        self.rounds = len(self.ends)

    def __iter__(self) -> Any:
        items, begin = list(self.all.items()), 0
        for number, end in enumerate(self.ends, start=1):
            yield Round(number, dict(items[:end]), dict(items[begin:end]))
            begin = end


class Scripted:
    """An engine that answers right where `is_right` says so, and counts what it is asked."""

    num_layers, block_size = 8, 16

    def __init__(self, is_right: Callable[[Row, int], bool], act: Callable[[], None]) -> None:
        self.is_right, self.act = is_right, act
        self.asked: Counter[str] = Counter()

    def answers(self, row: Row, prompts: Sequence[Prompt], progress: Progress) -> list[Answered]:
        self.act()
        self.asked[str(row)] += len(prompts)
        progress.begin(row, len(prompts))
        progress.step([1] * len(prompts), len(prompts))
        for prompt in prompts:
            progress.finish(prompt, 1)
        numbers = [prompt.token_ids[0] for prompt in prompts]
        texts = [str(n) if self.is_right(row, n) else "no" for n in numbers]
        # Every other answer is longer than what those of `WAITING` wait for.
        return [Answered(t, 0.0, 9 + n % 2) for t, n in zip(texts, numbers, strict=True)]

    def shares(self, row: Row, prompt_len: int, generated: int) -> Shares:
        return Shares(0.5, 0.5, 1.0)

    def resolved(self, row: Row) -> Row:
        return row


@pytest.fixture(autouse=True)
def whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is a round, on a CPU too."""
    monkeypatch.setattr(rounds_module, "AT_A_TIME_ON_CPU", rounds_module.AT_A_TIME)


def rounds_in(directory: Path, keep: float = 0.9, clock: Clock | None = None) -> Rounds:
    gains = [Gains(1.0, 2.0, 1.0, 3.0 - i / 2) for i in range(len(NAMES))]
    found = [Candidate(n, parse_policy(n), g) for n, g in zip(NAMES, gains, strict=True)]
    store = Store(directory, {"model": "m"})
    questions: Any = Prepared()
    return Rounds(found, questions, store, keep, clock or Clock(None), lambda: None, print)


def ask(rounds: Rounds, is_right: Callable[[Row, int], bool], act: Any = lambda: None) -> Scripted:
    engine: Any = Scripted(is_right, act)
    rounds.ask(engine, [each.candidate for each in rounds.standings])
    return engine  # type: ignore[no-any-return]


def right(row: Row, number: int) -> bool:
    """The first policy keeps a fifth, the second three quarters, the others all."""
    if row == Row(NAMES[0]):
        return number % 5 == 0
    return row != Row(NAMES[1]) or number % 4 != 0


def test_asking_stops_where_the_answers_decide(tmp_path: Path) -> None:
    rounds = rounds_in(tmp_path)
    engine = ask(rounds, right)
    verdicts = [each.verdict for each in rounds.standings]
    assert verdicts == [Verdict.LOST, Verdict.LOST, Verdict.KEPT, Verdict.KEPT]
    assert rounds.best is not None and rounds.best.name == NAMES[2]
    # One that loses most is told in the first round, one that loses a quarter some later.
    assert engine.asked[NAMES[0]] == 16
    assert 16 < engine.asked[NAMES[1]] <= engine.asked["full"] == engine.asked[NAMES[2]] < MOST
    shown = report.text(rounds, 0.9, Workload(32000, 1000, 16), "h100", [LeftOut("fastkv", "why")])
    assert "--kv-policy snapkv:kv_rate=0.4" in shown and "Left out: fastkv: why." in shown
    assert "--kv-policy streamingllm" not in shown
    advice = report.advice(rounds, "m", 0.9, saved=True)
    assert advice.startswith("To serve the best: vllm serve m --kv-policy snapkv:kv_rate=0.4, or")
    # Its answers are kept: the same again asks nothing.
    again = rounds_in(tmp_path)
    assert not ask(again, right).asked
    assert [each.verdict for each in again.standings] == verdicts


def test_one_that_is_kept_ends_the_asking_of_those_that_gain_less(tmp_path: Path) -> None:
    rounds = rounds_in(tmp_path, keep=0.8)

    def is_right(row: Row, number: int) -> bool:
        return row == FULL_ROW or row == Row(NAMES[0]) or number % 5 != 0

    engine = ask(rounds, is_right)
    verdicts = [each.verdict for each in rounds.standings]
    assert verdicts[0] is Verdict.KEPT and set(verdicts[1:]) == {Verdict.OUTDONE}
    assert engine.asked[NAMES[1]] == engine.asked["full"]


def rounds_of_one(directory: Path, name: str) -> Rounds:
    rounds = rounds_in(directory)
    first = rounds.standings[0].candidate
    rounds.standings = [Standing(Candidate(name, parse_policy(name), first.gains))]
    return rounds


def right_in_short_answers(row: Row, number: int) -> bool:
    """Right where nothing was dropped, and wrong where something was."""
    return row == FULL_ROW or number % 2 == 0


@pytest.mark.parametrize("name", WAITING)
def test_answers_of_which_nothing_was_dropped_do_not_count(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = rounds_of_one(tmp_path, name)
    ask(rounds, right_in_short_answers)
    (standing,) = rounds.standings
    assert standing.verdict is Verdict.LOST and standing.asked == 8
    assert standing.share is not None and standing.share.value == 0
    said = capsys.readouterr().out
    assert f"{name}: 8 of 16 answers do not count: they ended within 9 tokens" in said
    assert "asked again" not in said


@pytest.mark.parametrize("name", WAITING)
def test_older_answers_that_do_not_say_how_long_they_are_are_asked_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(rounds_of_one(tmp_path, name), right_in_short_answers)
    path = tmp_path / ANSWERS_FILE
    path.write_text(re.sub(r', "generated": \d+', "", path.read_text()))
    capsys.readouterr()
    rounds = rounds_of_one(tmp_path, name)
    engine = ask(rounds, right_in_short_answers)
    # Those of `full` are as good as they were.
    assert engine.asked == {name: 16}
    (standing,) = rounds.standings
    assert standing.verdict is Verdict.LOST and standing.asked == 8
    assert f"{name}: 16 answers of an older version are asked again" in capsys.readouterr().out
    assert not ask(rounds_of_one(tmp_path, name), right_in_short_answers).asked


def test_full_has_to_have_some_right(tmp_path: Path) -> None:
    rounds = rounds_in(tmp_path)
    with pytest.raises(ToolError, match=r"full has 1 of 16 answers right, .* a shorter --input"):
        ask(rounds, lambda row, number: number == 3)


class Time:
    """A clock that every batch of answers moves on by ten seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def pass_on(self) -> None:
        self.seconds += 10


def test_what_is_not_decided_in_time_is_said(tmp_path: Path) -> None:
    time = Time()
    rounds = rounds_in(tmp_path, clock=Clock(1, time))
    engine = ask(rounds, right, time.pass_on)
    assert rounds.out_of_time and engine.asked == {"full": 16, **dict.fromkeys(NAMES, 16)}
    verdicts = [each.verdict for each in rounds.standings]
    assert verdicts[0] is Verdict.LOST and set(verdicts[1:]) == {Verdict.UNDECIDED}
    said = report.advice(rounds, "m", 0.9, saved=True)
    assert "No policy was shown to keep 90.0%" in said and "more time or --samples" in said
    found = report.as_json(rounds, {"model": "m"}, [])
    assert found["chosen"] is None and found["out_of_time"]
    # With more time the same run goes on.
    again = rounds_in(tmp_path)
    ask(again, right)
    assert again.best is not None and not again.out_of_time


def test_answers_that_take_too_long_are_broken_off(tmp_path: Path) -> None:
    time = Time()
    rounds = rounds_in(tmp_path, clock=Clock(1, time))

    def act() -> None:
        # The third batch takes longer than those before.
        time.seconds += 10 if time.seconds < 20 else 90

    engine = ask(rounds, right, act)
    assert rounds.out_of_time and engine.asked == {"full": 16, NAMES[0]: 16, NAMES[1]: 16}
    assert [each.asked for each in rounds.standings] == [16, 0, 0, 0]


def test_no_time_at_all_is_an_error(tmp_path: Path) -> None:
    time = Time()
    clock = Clock(11 / 60, time)
    with pytest.raises(ToolError, match=r"full has answered 16 of 16 questions of the first round"):
        ask(rounds_in(tmp_path, clock=clock), right, time.pass_on)
