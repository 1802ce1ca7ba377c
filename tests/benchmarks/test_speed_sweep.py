"""benchmarks.tuning.sweep: what runs when, and what becomes of it if a part fails."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import processes
from benchmarks.tuning import sweep as speed_sweep
from benchmarks.tuning.sweep import curves, parse_args, policies_of, sweep


class Commands:
    """Stands for vllm-kvx: what is asked of it, how many at once, and what fails.

    together: of `tune-speed` so many are at work before the first one ends.
    """

    def __init__(self, failing: str = "", together: int = 1) -> None:
        self.asked: list[str] = []
        self.evaluations: list[list[str]] = []
        self.most: dict[str, int] = {}
        self._failing, self._now, self._lock = failing, dict[str, int](), threading.Lock()
        self._left, self._together = together, threading.Event()

    def start(self, command: list[str], log: Path, gpu: str | None) -> "Command":
        return Command(self, command)

    def work(self, command: list[str]) -> int:
        out = Path(command[command.index("--out" if "--out" in command else "--output") + 1])
        kind = out.name if out.name in ("examples", "original") else command[0]
        with self._lock:
            self.asked.append(out.name)
            if command[0] == "evaluate":
                self.evaluations.append(command)
            self._now[kind] = self._now.get(kind, 0) + 1
            self.most[kind] = max(self.most.get(kind, 0), self._now[kind])
            self._left -= kind == "tune-speed"
            if self._left == 0:
                self._together.set()
        assert kind != "tune-speed" or self._together.wait(timeout=30)
        # The slowest is what the others wait for.
        time.sleep(0.2 if kind == "original" else 0.02)
        if kind == "original":
            out.mkdir(parents=True, exist_ok=True)
            (out / "answers.jsonl").write_text("")
        with self._lock:
            self._now[kind] -= 1
        return int(out.name == self._failing)


class Command:
    """A process: it works where it is waited for."""

    def __init__(self, commands: Commands, command: list[str]) -> None:
        self._commands, self._command = commands, command

    def wait(self) -> int:
        return self._commands.work(self._command)


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def sweep_with(
        *options: str, failing: str = "", together: int = 1
    ) -> tuple[list[str], Commands]:
        commands = Commands(failing, together)
        monkeypatch.setattr(speed_sweep, "start", commands.start)
        monkeypatch.setattr(processes, "stop", lambda process: None)
        args = ["MODEL", str(tmp_path / "out"), "--cutoffs", "6", "7", "--trial", "more-7", "7", ""]
        return sweep(parse_args([*args, *options])), commands

    return sweep_with


RUNS = ("speed-6", "speed-7", "more-7")


def test_one_at_a_time_without_more_gpus(swept: Any) -> None:
    failed, commands = swept()
    assert not failed and max(commands.most.values()) == 1
    # The only GPU is the original's first; each run is evaluated before the next begins.
    assert commands.asked[:2] == ["original", "examples"] and len(commands.asked) == 8
    for run in RUNS:
        assert commands.asked[commands.asked.index(run) + 1] == f"evaluate-{run}"


def test_several_at_once_and_evaluated_beside(swept: Any) -> None:
    failed, commands = swept("--at-once", "2", "--overlap", together=2)
    assert not failed and len(commands.asked) == len(set(commands.asked)) == 8
    assert commands.asked.index("examples") < min(map(commands.asked.index, RUNS))
    assert commands.most == {"examples": 1, "original": 1, "tune-speed": 2, "evaluate": 1}


def test_what_fails_is_named(swept: Any) -> None:
    assert swept(failing="examples")[0] == ["examples"]
    failed, commands = swept("--gpus", "0", "1", failing="speed-7")
    assert failed == ["tuning speed-7"] and "evaluate-speed-7" not in commands.asked
    assert swept("--at-once", "3", failing="original")[0] == ["the original"]
    assert swept(failing="evaluate-more-7")[0] == ["evaluating more-7"]
    with pytest.raises(SystemExit):
        swept("--at-once", "0")


def test_a_run_is_evaluated_under_what_it_tunes_for(swept: Any) -> None:
    tune = ["--lr", "1e-3", "--tail", "8"]
    assert policies_of(6, [], None) == ["speed-6"]
    assert policies_of(6, tune, None) == ["speed-6:tail=8"]
    assert policies_of(6, [*tune, "--anchors", "4", "--tail", "1"], None) == ["speed-6:anchors=4"]
    assert policies_of(6, ["--anchor", "4"], None) == ["speed-6:anchors=4"]
    assert policies_of(6, tune, ["speed-{K}", "full"]) == ["speed-6", "full"]

    _, commands = swept("--trial", "longer-6", "6", "--tail 8", "--tune", "--anchors 2")
    found = {Path(c[c.index("--output") + 1]).name: c for c in commands.evaluations}
    names = {name: c[c.index("--policies") + 1 :] for name, c in found.items()}
    assert names["original"] == [
        *("speed-6:anchors=2", "speed-7:anchors=2", "speed-6:anchors=2,tail=8")
    ]
    assert names["evaluate-more-7"][0] == "speed-7:anchors=2"
    assert names["evaluate-longer-6"][0] == "speed-6:anchors=2,tail=8"


def test_lines_go_from_cutoff_to_cutoff() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")

    def entry(cutoff: int, tuned: float) -> dict[str, Any]:
        means = {"full": 0.7, "cut": tuned / 2, "tuned": tuned}
        policy = f"speed-{cutoff}:anchors=2"
        report = {"recovery": [{"policy": policy, "over": "all", **means}]}
        return {"record": {"policy": policy}, "report": report}

    found = {"18": entry(18, 0.6), "21": entry(21, 0.65), "12": entry(12, 0.1)}
    found["more-18"] = entry(18, 0.2)
    figure = curves(pyplot, {"cutoffs": json.loads(json.dumps(found))})
    tuned = figure.axes[1].get_lines()[2]
    assert list(tuned.get_xdata()) == [12, 18, 21]
    assert list(tuned.get_ydata()) == pytest.approx([10, 60, 65])
    pyplot.close(figure)
