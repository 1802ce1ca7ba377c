"""How long the rest of a run's answers will take."""

from vllm_kvx.tools.evaluate.engine import Prompt
from vllm_kvx.tools.evaluate.progress import TimeLeft
from vllm_kvx.tools.evaluate.rows import Row

FULL, SNAPKV, FIER, FIER_FP8 = map(Row.parse, ("full", "snapkv", "fier-64", "fier-64@fp8"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(*lengths: int, longest: int = 10) -> list[Prompt]:
    return [Prompt(range(length), longest) for length in lengths]


def test_prompts_and_answers_have_paces_of_their_own() -> None:
    clock, questions = Clock(), asked(100, 300)
    left = TimeLeft({FULL: questions, SNAPKV: questions}, clock)
    assert left.seconds is None
    left.begin(FULL, 2)
    # 0.1 s for a token of a prompt, of which a step takes 100 and begins no answer but one.
    clock.now = 10.0
    left.step([100], 1)
    clock.now = 30.0
    left.step([], 1)
    clock.now = 40.0
    left.step([300], 2)
    # How long it takes to write is not known yet.
    assert left.seconds is None
    # Both write a token in a second.
    clock.now = 41.0
    left.step([], 2)
    # full: 20 less the 6 that are there; snapkv: 400 to read and 20 to write; 0.5 s each.
    assert left.seconds == 14 * 0.5 + 400 * 0.1 + 20 * 0.5
    # Answers end before their limit: so will others.
    left.finish(questions[0], 4)
    left.finish(questions[1], 2)
    assert left.seconds == 400 * 0.1 + 2 * 3 * 0.5


def test_a_row_has_its_own_pace_as_soon_as_it_has_one() -> None:
    clock, questions = Clock(), asked(100, longest=1)
    left = TimeLeft({FULL: questions, FIER: [*questions, *questions]}, clock)
    left.begin(FULL, 1)
    clock.now = 10.0
    left.step([100], 1)
    left.finish(questions[0], 1)
    assert left.seconds is None
    left.begin(FIER, 2)
    clock.now = 40.0
    left.step([100], 1)
    left.finish(questions[0], 1)
    clock.now = 41.0
    # A second token, whose pace is the only one known.
    left.step([100], 1)
    left.finish(questions[0], 1)
    assert left.seconds == 0.0


def test_engines_that_are_yet_to_start_count() -> None:
    clock, questions = Clock(), asked(100)
    left = TimeLeft({FULL: questions, FIER_FP8: questions}, clock)
    left.starts_left = 2
    left.started(60.0)
    left.begin(FULL, 1)
    clock.now = 10.0
    left.step([100], 1)
    clock.now = 11.0
    left.step([], 1)
    left.finish(questions[0], 2)
    assert left.seconds == 60 + 10 + 2 * 1.0
    # One that does not start is not waited for.
    left.starts_left = 0
    assert left.drop([FIER_FP8]) == 1
    assert left.seconds == 0.0


def test_a_server_says_only_when_an_answer_is_there() -> None:
    clock, questions = Clock(), asked(100, 100, 200)
    left = TimeLeft({FULL: questions}, clock)
    left.begin(FULL, 3)
    clock.now = 5.0
    left.step([100], 0)
    left.finish(questions[0], 0)
    assert left.seconds == 300 * 0.05
