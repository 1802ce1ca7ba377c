"""The lines that say how far a calibration is, and how long the rest takes."""

import pytest

from vllm_kvx.server.measure_at_start import Progress
from vllm_kvx.tools import time_left
from vllm_kvx.tools.checkpoint.report import counter_of, progress_of
from vllm_kvx.tools.time_left import Left, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_left.Left.__init__, "__defaults__", (clock,))
    return clock


def test_durations_are_as_exact_as_estimates() -> None:
    seconds = (0.1, 3.4, 99.0, 100.0, 5900.0, 7800.0)
    assert [duration(each) for each in seconds] == [
        *("1 s", "3 s", "99 s", "2 min", "98 min", "2 h 10 min")
    ]


def test_long_prompts_take_long() -> None:
    clock = Clock()
    left = Left([100, 300, 600], clock)
    assert left.after(0) == ""
    clock.now = 10.0
    assert left.after(1) == ", about 90 s left of these"
    # Half of the second prompt's layers.
    clock.now = 25.0
    assert left.after(1.5) == ", about 75 s left of these"
    clock.now = 100.0
    assert left.after(3) == ""


def test_each_prompt_says_what_is_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    left = Left.of([range(100), range(300)])
    for number in (1, 2):
        progress = progress_of(f"prompt {number}/2, 7 tokens", 4, number, left)
        for layer in range(4):
            progress(layer)
            clock.now += 5.0
    count = counter_of("answers under layer 3 by sum", 2, [100, 300])
    for index in range(2):
        count(index)
        clock.now += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "prompt 1/2, 7 tokens",
        "prompt 2/2, 7 tokens, about 60 s left of these",
        "answers under layer 3 by sum: 1/2",
        "answers under layer 3 by sum: 2/2, about 3 s left of these",
    ]
    # A server that measures at its start goes on counting, and says it once.
    server = Progress(clock)
    for line in lines[:2]:
        server.read(line)
        clock.now += 20.0
    assert str(server) == "prompt 2/2, 7 tokens, about 40 s left of these"


def test_a_terminal_sees_it_before_the_first_prompt_ends(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = progress_of("prompt 1/1, 100 tokens", 2, 1, Left.of([range(100)]))
    progress(0)
    clock.now = 7.0
    progress(1)
    first, second = capsys.readouterr().err.split("\r")[1:]
    assert first == "prompt 1/1, 100 tokens: layer 1/2"
    assert second == "prompt 1/1, 100 tokens: layer 2/2, about 7 s left of these\n"
