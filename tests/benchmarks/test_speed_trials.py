"""benchmarks.tuning.trials: what is compared, which trial is taken, and how long its runs are."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.tuning import trials as speed_trials
from benchmarks.tuning.trials import best_of, epochs_of, lookups, options_of, rate_of


def agreement(kl, tokens, same=0.0, answers=1):
    return {"kl": kl, "tokens": tokens, "same": same, "answers": answers, "greedy": 0.0}


def test_only_lookups_are_compared():
    found = lookups(
        {
            "all": agreement(9, 1000),
            "own": agreement(9, 1000),
            "recital": agreement(9, 1000),
            "<= 512 tokens": agreement(9, 1000),
            "staff": agreement(0.1, 10, same=1.0, answers=3),
            "dossier": agreement(0.4, 30, same=0.5, answers=2),
        }
    )
    assert found["kl"] == pytest.approx((0.1 * 10 + 0.4 * 30) / 40)
    assert math.isnan(lookups({"all": agreement(9, 10)})["kl"])
    assert found["same"] == pytest.approx((3 + 1) / 5) and found["answers"] == 5


def test_the_best_is_of_those_that_ended():
    trials = {
        "slow": {"options": "", "exit": None},
        "lost": {"options": "", "exit": 0, "after": {"kl": float("nan")}},
        "good": {"options": "", "exit": 0, "after": {"kl": 0.2}},
        "better": {"options": "", "exit": 0, "after": {"kl": 0.1}},
    }
    assert best_of(trials) == "better"
    with pytest.raises(SystemExit, match="no trial ended"):
        best_of({name: trials[name] for name in ("slow", "lost")})


def test_runs_fill_the_time_at_the_rate_of_the_trials():
    trials = {
        "a": {"tokens_per_second": 600.0},
        "b": {"tokens_per_second": 400.0},
        "interrupted": {},
    }
    assert rate_of(trials, at_once=4) == 1000 and rate_of(trials, at_once=1) == 500
    with pytest.raises(SystemExit, match="none is timed"):
        rate_of({"interrupted": {}}, at_once=1)
    found = epochs_of(1000, [18, 21], {18: 3.0}, tokens=10_000, seconds=100.0)
    assert sum(found.values()) == pytest.approx(0.85 * 1000 * 100 / 10_000)
    assert found[18] == pytest.approx(3 * found[21])


def test_what_was_decided_stays(tmp_path, monkeypatch):
    (tmp_path / "trials.json").write_text(
        json.dumps(
            {
                "best": "b",
                "epochs": {"3": 2.0, "4": 1.0},
                "trials": {"a": {}, "b": {"options": "-"}},
            }
        )
    )
    plans = []
    monkeypatch.setattr(speed_trials, "sweep", lambda plan: plans.append(plan) or [])
    command = ["speed_trials", "MODEL", str(tmp_path), "--minutes", "1", "--tune", "--lr 1"]
    trials = ["--trial", "a", "", "--trial", "b", "-"]
    monkeypatch.setattr("sys.argv", [*command, *trials, "--cutoffs", "3", "4", "--at-once", "2"])
    speed_trials.main()
    (plan,) = plans
    assert plan.tune == "--lr 1 - --epochs 2.0000" and plan.cutoffs == [3]
    assert plan.trial == [("speed-4", "4", "--epochs 1.0000")]
    assert plan.gpus == [None] and plan.at_once == 2
    for more in (["--cutoffs", "3"], ["--cutoffs", "3", "4", "--trial", "c", ""]):
        monkeypatch.setattr("sys.argv", [*command, *trials, *more])
        with pytest.raises(SystemExit, match="other cutoffs or trials"):
            speed_trials.main()
    monkeypatch.setattr("sys.argv", [*command, *trials, "--trial", "a", "", "--cutoffs", "3"])
    with pytest.raises(SystemExit):
        speed_trials.main()


def test_options_are_tune_speeds():
    found = options_of("MODEL", 18, Path("out"), ["--batch-tokens", "9999"])
    assert found.batch_tokens == 9999 and found.cutoff == 18 and found.held_out == 200
    with pytest.raises(SystemExit):
        options_of("MODEL", 18, Path("out"), ["--no-such-option", "1"])
