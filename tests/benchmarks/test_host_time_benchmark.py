"""The clock of the host-time benchmark, and the figures of what it measured."""

from typing import Any

import pytest

from benchmarks.engine import host_time
from benchmarks.engine.host_time_engine import Clock


def sample(us: float, launches: int = 4) -> dict[str, Any]:
    return {"schedule": us, "update": 2 * us, "worker": 3 * us, "launches": launches}


def test_ratios_are_taken_turn_by_turn() -> None:
    """The machine was half as fast in the second turn, for both."""
    turns = {
        "stock": [[sample(10), sample(10)], [sample(20), sample(20)], [sample(10)]],
        "snapkv": [[sample(12)], [sample(24)], [sample(12, launches=5), sample(12)]],
    }
    found = host_time.figures(turns)
    assert found["snapkv"]["ratio"] == 1.2 and found["snapkv"]["ratio_quartiles"] == [1.2, 1.2]
    assert found["snapkv"]["launches"] == 4.25
    assert found["stock"]["total_us"] == 60 and found["stock"]["worker_us"] == 30
    assert found["stock"]["quartiles_us"] == [60, 120] and "ratio" not in found["stock"]


def test_engines_are_named_by_requests_and_server() -> None:
    assert host_time.split_engine("stock") == (None, None)
    assert host_time.split_engine("speed-24") == ("speed-24", None)
    assert host_time.split_engine("full@speed-24") == ("speed-24", "full")
    with pytest.raises(SystemExit):
        host_time.parse_args(["--engines", "snapkv", "--out", "x.json"])


def test_the_table_has_every_case() -> None:
    turns = {"stock": [[sample(10)]], "snapkv": [[sample(12)]]}
    cases = {name: host_time.figures(turns) for name in ("1 decode", "16 decode")}
    text = host_time.table({"runs": {"after": {"commit": "abc", "cases": cases}}})
    assert "| engine | 1 decode | 16 decode |" in text
    assert "| stock | 60 us | 60 us |" in text and "| snapkv | 1.20 | 1.20 |" in text


class Engine:
    """Scheduler and worker in one: a step is planned before the one before it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.now, self.clock = 0, clock
        monkeypatch.setattr("time.thread_time_ns", lambda: self.now)

    def schedule(self, counts: dict[str, int], new: tuple[str, ...] = ()) -> Any:
        self.now += 1000
        requests = [type("New", (), {"req_id": name}) for name in new]
        return type("Output", (), {"num_scheduled_tokens": counts, "scheduled_new_reqs": requests})

    def execute_model(self) -> None:
        self.now += 3000
        self.clock.launches += 2
        with self.clock.paused():
            self.now += 10**6

    def update_from_output(self) -> None:
        self.now += 2000


def test_the_clock_leaves_the_forward_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = Engine(monkeypatch, clock)
    clock.watch(engine, engine)
    engine.schedule({"a": 1})
    engine.execute_model()
    engine.schedule({"a": 1, "b": 96}, ("b",))
    engine.execute_model()
    engine.update_from_output()
    engine.update_from_output()
    first, second = clock.steps
    assert first["counts"] == {"a": 1} and second["new"] == ["b"]
    for step in clock.steps:
        assert [step[part] for part in host_time.PARTS] == [1000, 2000, 3000]
        assert step["launches"] == 2
