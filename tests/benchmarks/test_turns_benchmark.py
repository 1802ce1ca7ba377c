"""The load of sessions with many turns, and the figures of what they measured."""

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.common.about import KEYS
from benchmarks.serving import turns
from benchmarks.serving.turns_figures import Load, Turn, summarise

LOAD = Load(sessions=2, turns=3, first=1000, last=3000, answer=10, think=0.0, repeats=2, seed=0)


def engine(policy: str, cached: list[list[int]], ttft: float, share: str = "on") -> dict[str, Any]:
    """A file of `benchmarks.serving.turns`. cached: by session and turn."""
    asked = [
        Turn(i, n, LOAD.prompt_len(n), tokens, ttft * (n + 1), 5.0, 0, ttft * (n + 1))
        for i, session in enumerate(cached)
        for n, tokens in enumerate(session)
    ]
    report: dict[str, Any] = {"cold": {"1000": [ttft, ttft + 2], "3000": [3 * ttft, 3 * ttft]}}
    if share == "on":
        report |= {"complete": True, "seconds": 2.0, "policies": {}}
        report |= {"counters": {"preemptions": 0}, "turns": [asdict(turn) for turn in asked]}
    facts = {"config": {}, "start_s": 1.0, "num_blocks": 9, "block_size": 16, "engine": {}}
    return facts | {
        "about": {**dict.fromkeys(KEYS), "date": "2026-01-01"},
        "model": {},
        "load": asdict(LOAD),
        "policy": policy,
        "share": share,
        "requests": {policy: report},
    }


def test_prompts_grow_evenly_and_are_the_same_in_every_run() -> None:
    assert [LOAD.prompt_len(turn) for turn in range(3)] == [1000, 2000, 3000]
    assert LOAD.tokens(50, 4, 0, 1, 2) == LOAD.tokens(50, 4, 0, 1, 2) != LOAD.tokens(50, 4, 0, 1, 1)
    with pytest.raises(ValueError, match="grow by more than an answer"):
        Load(**asdict(LOAD) | {"answer": 1000})
    with pytest.raises(ValueError, match="at least 1"):
        Load(**asdict(LOAD) | {"sessions": 0})


def test_figures_against_stock() -> None:
    files = [
        engine("stock", [[0, 1008, 2000], [0, 1008, 2000]], 10.0),
        engine("snapkv", [[0, 992, 1984], [0, 992, 1000]], 11.0),
        engine("snapkv", [[], []], 10.0, share="off"),
    ]
    result = summarise(files)
    stock, ours = (result["policies"][name] for name in ("stock", "snapkv"))
    assert stock["later"]["hit_rate"] == pytest.approx(6016 / 10000, abs=1e-5)
    later = ours["against_stock"]["later"]
    assert later["hit_rate"] == pytest.approx(4968 / 6016, abs=1e-4)
    assert (later["turns_to"], later["mean_ttft"]) == (3, 1.1)
    assert stock["tokens_per_s"] == 6 * 10 / 2.0
    # The cache lost most of one session's second turn.
    assert (stock["least_sessions_held"], stock["all_held_to"]) == (2, 2000)
    assert (ours["least_sessions_held"], ours["all_held_to"]) == (1, 1000)
    assert result["cold"]["snapkv"]["1000"]["on_over_off"] == round(12 / 11, 4)
    assert "on_over_off" not in result["cold"]["stock"]["1000"]


def test_turns_that_stock_was_not_answered_or_did_not_hold_are_left_out() -> None:
    files = [
        engine("stock", [[0, 1008, 1000], [0, 1008, 2000]], 10.0),
        engine("snapkv", [[0, 1008, 1984], [0, 504]], 5.0),
    ]
    ours = summarise(files)["policies"]["snapkv"]["against_stock"]
    figures = {"hit_rate": 0.75, "mean_ttft": 0.5, "p99_ttft": 0.5, "tokens_per_s": 2.0}
    assert ours["later"] == ours["fitting"] == {"turns_to": 2, **figures}
    assert ours["first_mean_ttft"] == 0.5

    files[1] = engine("snapkv", [[0, 1008, 1984], [0, 1008, 1984]], 5.0)
    ours = summarise(files)["policies"]["snapkv"]["against_stock"]
    assert [ours[key]["turns_to"] for key in ("later", "fitting")] == [3, 2]
    assert ours["later"]["hit_rate"] == pytest.approx(5984 / 5016, abs=1e-4)
    assert ours["fitting"]["hit_rate"] == 1.0


def test_other_settings_are_not_compared() -> None:
    files = [engine("stock", [[0], [0]], 1.0), engine("snapkv", [[0], [0]], 1.0)]
    files[1]["load"] = files[1]["load"] | {"seed": 1}
    with pytest.raises(ValueError, match="different settings: load"):
        summarise(files)
    with pytest.raises(ValueError, match="no engine"):
        summarise([])


@pytest.mark.parametrize(
    "args", ["", "--policy stock --share off", "--policy snapkv --first 100 --last 200"]
)
def test_bad_commands(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        turns.parse_args(["--out", "results", *args.split()])
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err
