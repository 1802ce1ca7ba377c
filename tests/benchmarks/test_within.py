"""The highest rate within limits of TTFT and TPOT: the search, its limits, and where it goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.nightly import nightly

from benchmarks.engine import merge
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving import within
from benchmarks.serving.figures import Setting, is_whole
from benchmarks.serving.load import Results
from benchmarks.serving.rates import WITHIN, Bounds, Limits, Load, bounds, first_rate, next_rate
from vllm_kvx.tools.ideal.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(2000, 30, 0.9)


def searched(limit: float, first: float, known: dict[float, bool] | None = None) -> list[float]:
    """The rates that are tried where all up to `limit` are held, after those that are known."""
    held, rates = dict(known or {}), list[float]()
    while (rate := next_rate(held, first, 0.08, 16)) is not None:
        rates.append(rate)
        held[rate] = rate <= limit
    low, high = bounds(held)
    if low is not None and high is not None:
        assert low <= limit < high and high <= 1.08 * low
    return rates


@pytest.mark.parametrize("limit", [0.0731, 0.4, 0.83, 1.0, 1.9, 9.0])
@pytest.mark.parametrize("first", [0.11, 0.8, 1.0])
def test_a_search_ends_near_the_limit(limit: float, first: float) -> None:
    if not first / 16 < limit < first * 16:
        return
    rates = searched(limit, first)
    # Those of the bracket, and three halves of a factor of 1.5.
    steps = sum(rate > limit for rate in rates) if limit < first else len(rates)
    assert rates[0] == first and len(rates) <= steps + 5
    assert all(str(Setting.parse(f"16x8/8@{rate:g}").rate) == str(rate) for rate in rates)
    # From any point on, what is known is all that counts.
    for done in range(len(rates)):
        known = {rate: rate <= limit for rate in rates[:done]}
        assert searched(limit, first, known) == rates[done:]
    # Also where it begins with another rate.
    assert searched(limit, 2 * first, {rate: rate <= limit for rate in rates}) == []


def test_a_search_from_a_near_rate_takes_five_runs() -> None:
    assert searched(0.9, 0.8) == [0.8, 1.2, 0.98, 0.885, 0.931]


def test_a_search_ends_where_nothing_is_held_or_all() -> None:
    rates = searched(0, 1)
    assert rates == sorted(rates, reverse=True) and len(rates) == 7 and rates[-1] > 1 / 16
    assert searched(100, 1)[-1] < 16
    assert bounds(dict.fromkeys(rates, False)) == Bounds(None, rates[-1])
    assert bounds({1.0: True, 1.5: True}) == Bounds(1.5, None)
    assert bounds({}) == Bounds(None, None)
    # By chance a higher rate was held: what lies above a rate that was not does not count.
    assert bounds({1.0: True, 1.5: False, 2.0: True, 3.0: False}) == Bounds(1.0, 1.5)


def test_what_a_rate_is_tried_with() -> None:
    short, long = Load.parse("8192/1024@0.8"), Load.parse("32768/4096")
    assert (short.first, long.first, str(short), str(long)) == (
        0.8,
        None,
        "8192/1024",
        "32768/4096",
    )
    # Twice a request within the limits: 2 s and 1,023 times 30 ms; 4,095 times.
    assert LIMITS.arrivals(1024) == pytest.approx(65.38)
    assert LIMITS.arrivals(4096) == pytest.approx(249.7)
    assert LIMITS.arrivals(32) == 60
    assert str(short.at(0.885, LIMITS)) == "58x8192/1024@0.885"
    assert str(long.at(0.05, LIMITS)) == "16x32768/4096@0.05"
    quick = Limits(2000, 30, 0.9, seconds=120)
    assert str(long.at(0.3, quick)) == "36x32768/4096@0.3"
    assert LIMITS.flags == ["--goodput", "ttft:2000", "tpot:30", "--save-detailed"]


def test_a_search_begins_at_half_the_ideal() -> None:
    shape, h100 = SHAPES["llama-3.1-8b"], DEVICES["h100"]
    rates = {
        (name, length): first_rate(shape, name, load, h100, 256)
        for name in ("stock", "fier-2048", "fastkv")
        for length, load in ((8, Load(8192, 1024)), (32, Load(32768, 4096)))
    }
    assert 0.5 < rates["stock", 8] < 2 and 0.05 < rates["stock", 32] < 0.2
    assert rates["fier-2048", 8] > rates["stock", 8]
    # Without an ideal of its own, a policy begins where stock does.
    assert rates["fastkv", 8] == rates["stock", 8]


def answered(ttfts: list[float], tpots: list[float], within: int) -> dict[str, Any]:
    """What the client writes of requests with these seconds, of four tokens each."""
    total = len(ttfts)
    return {
        "bench": {
            "completed": total,
            "request_throughput": total / 7.0,
            "request_goodput": within / 7.0,
            "ttfts": ttfts,
            "itls": [[tpot] * 3 for tpot in tpots],
            "output_lens": [4] * total,
            "mean_ttft_ms": 1.0,
        }
    }


def judged(found: dict[str, Any], prompts: int, was_short: bool = False) -> Any:
    within.judge(found, Setting(prompts, 8, 4, rate=1.0), LIMITS, was_short)
    return found.get(WITHIN)


def test_what_counts_as_held() -> None:
    nine = answered([0.1] * 9 + [2.1], [0.03 - 1e-9] * 10, 9)
    assert judged(nine, 10) == {"share": 0.9, "missed_ttft": 0.1, "missed_tpot": 0, "held": True}
    # Nothing of single requests remains.
    assert nine["bench"].keys() == {
        "completed",
        "request_throughput",
        "request_goodput",
        "mean_ttft_ms",
    }
    eight = answered([0.1] * 9 + [2.1], [0.031] + [0.02] * 9, 8)
    verdict = {"share": 0.8, "missed_ttft": 0.1, "missed_tpot": 0.1, "held": False}
    assert judged(eight, 10) == verdict


def test_runs_without_all_answers() -> None:
    over = {"error": ["not done after 90 s"]}
    assert judged(dict(over), 10) == {"held": False}
    # The command's time was over before the run's own limit: it is tried again.
    assert judged(dict(over), 10, was_short=True) is None
    some = answered([0.1] * 9, [0.02] * 9, 9) | {"error": ["9 of 10 answered"]}
    assert judged(some, 10) == {"held": False} and "ttfts" not in some["bench"]
    none = answered([], [], 0) | {"error": ["0 of 10 answered"]}
    assert judged(none, 10) is None
    assert judged({"error": ["exit status 1"]}, 10) is None


def command(out: Path, *more: str) -> list[str]:
    loads = ["--loads", "8/4@1", "16/4@1"]
    return ["--model", "tiny", "--servers", "stock", "--out", str(out), *loads, *more]


def results_of(argv: list[str]) -> tuple[Any, Results]:
    args = within.parse_args(argv)
    asked = {WITHIN: args.limits.as_json()}
    return args, Results(args, argv, SHAPES["tiny"], True, "m", "Rates", **asked)


def test_a_search_goes_on_from_its_file(tmp_path: Path) -> None:
    argv = command(tmp_path / "out.json")
    args, results = results_of(argv)
    search = within.Search(args, results, "stock", args.loads[0])
    assert str(search.next()) == "60x8/4@1" and "no rate was tried; not at an end" in str(search)
    for rate, held in ((1.0, True), (1.5, False), (1.22, False), (1.1, False), (1.05, True)):
        text = str(args.loads[0].at(rate, args.limits))
        results.add("stock", {}, {text: {WITHIN: {"held": held}}})
    # A run that cannot tell is none.
    results.add("stock", {}, {"66x8/4@1.07": {"error": ["exit status 1"]}})
    again_args, again = results_of(argv)
    search = within.Search(again_args, again, "stock", again_args.loads[0])
    assert search.next() is None
    what = "within TTFT 2000 ms and TPOT 30 ms for 90%"
    assert str(search) == f"stock 8/4 {what}: 1.05 requests/s, not 1.1"
    other = within.Search(again_args, again, "stock", again_args.loads[1])
    assert str(other.next()) == "60x16/4@1"
    finer_args, finer = results_of([*argv, "--precision", "0.01"])
    search = within.Search(finer_args, finer, "stock", finer_args.loads[0])
    assert str(search.next()) == "65x8/4@1.07"
    for more in (["--share", "0.5"], ["--within", "ttft:1", "tpot:1"], ["--seconds", "9"]):
        with pytest.raises(SystemExit, match="another model or other settings"):
            results_of([*argv, *more])
    # Files of servers side by side become one.
    content = json.loads((tmp_path / "out.json").read_text())
    beside = {**content, "servers": {"speed-4": content["servers"]["stock"]}}
    assert list(merge.merge([content, beside])["servers"]) == ["stock", "speed-4"]


def test_without_an_ideal_a_rate_has_to_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "gpu", lambda: None)
    args, results = results_of(command(tmp_path / "out.json"))
    with pytest.raises(SystemExit, match="give a rate to begin with, 8/4@1"):
        within.Search(args, results, "stock", Load(8, 4))
    monkeypatch.setattr(within, "gpu", lambda: "NVIDIA H100 80GB HBM3, 570.1")
    assert within.Search(args, results, "stock", Load(8, 4)).next() is not None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--loads 8192", "write input / output"),
        ("--loads 64x8192/1024@1", "write input / output"),
        ("--loads 8192/1", "the output above 1"),
        ("--loads 8192/1024@0.001", "from 0.01 to 10000"),
        ("--loads 8/4@1 8/4@2", "the same lengths twice"),
        ("--within ttft:2000", "write both limits in ms"),
        ("--within ttft:2000 tpot:0", "'tpot:0': write both limits"),
        ("--within ttft:2000 ttft:30", "'ttft:30': write both limits"),
        ("--within ttft:2000 e2el:30", "'e2el:30': write both limits"),
        ("--share 1.2", "above 0 and at most 1"),
        ("--share 0", "above 0 and at most 1"),
        ("--seconds 0", "more than 0 seconds"),
        ("--precision 0", "give 0.01 to 1"),
        ("--farthest 0.5", "a factor is 1 or more"),
        ("--servers @fp8", "write stock or a policy"),
    ],
)
def test_bad_commands(more: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        within.parse_args(command(Path("x.json"), *more.split()))
    assert caught.value.code == 2 and says in capsys.readouterr().err


@nightly
def test_a_server_is_searched(tmp_path: Path) -> None:
    """A policy and another that its server has room for: all rates are held, the first not far."""
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "benchmarks.serving.within", "--model", "tiny"]
    argv += ["--servers", "speed-4", "--layout", "snapkv", "--loads", "96/8@8", "--out", str(out)]
    argv += ["--within", "ttft:600000", "tpot:60000", "--seconds", "1", "--farthest", "1.5"]
    argv += ["--dtype", "float32", "--max-num-batched-tokens", "96", "--max-num-seqs", "8"]
    argv += ["--server-args", "--enforce-eager --block-size 32"]
    cpu = os.environ | {"KVX_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(argv, cwd=ROOT, env=cpu, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    content = json.loads(out.read_text())
    limits = {"ttft": 600000.0, "tpot": 60000.0, "share": 0.9, "seconds": 1.0}
    assert content["settings"][WITHIN] == limits
    assert content["servers"]["snapkv"]["asked_of"] == "speed-4"
    for name in ("speed-4", "snapkv"):
        assert f"{name} 96/8 within" in ran.stdout and "12 requests/s, the highest" in ran.stdout
        found = content["servers"][name]["settings"]
        assert list(found) == ["16x96/8@8", "16x96/8@12"]
        for text, measured in found.items():
            assert is_whole(measured, Setting.parse(text))
            verdict = {"share": 1.0, "missed_ttft": 0.0, "missed_tpot": 0.0, "held": True}
            assert measured[WITHIN] == verdict
            bench = measured["bench"]
            assert bench["request_goodput"] == pytest.approx(bench["request_throughput"])
            assert "itls" not in bench and "generated_texts" not in bench
    again = subprocess.run(argv, cwd=ROOT, env=cpu, capture_output=True, text=True)
    assert again.returncode == 0 and "starting" not in again.stdout
