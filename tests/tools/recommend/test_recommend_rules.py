"""`vllm-kvx recommend`: whom it asks, and what is gained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.shapes import SHAPES
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import Method
from vllm_kvx.tools.ideal.devices import device_of
from vllm_kvx.tools.ideal.work import decode_bytes, full_work, prefill_flops
from vllm_kvx.tools.recommend.command import check_time
from vllm_kvx.tools.recommend.gains import Gains, Workload, gains_of, server_of
from vllm_kvx.tools.recommend.ladder import Candidate, ModelFacts, candidates, names_for
from vllm_kvx.tools.recommend.rounds import Clock, Rounds
from vllm_kvx.tools.recommend.stopping import Verdict

LLAMA = SHAPES["llama-3.1-8b"].config()
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
KEEPS_STATES = {"layer_types": ["linear_attention", "full_attention"] * 16}
WORKLOAD = Workload(32000, 1000, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))


def facts(layer: int | None = 20, **changes: Any) -> ModelFacts:
    def with_layer(part: Method) -> Method | None:
        return None if layer is None else replace(part, tsp_layer=layer)  # type: ignore[call-arg]

    given = {"config": LLAMA, "limits": (), "head_dims": (64, 128), "with_layer": with_layer}
    return ModelFacts(**(given | changes))  # type: ignore[arg-type]


def gains(name: str) -> Gains | None:
    return gains_of(name, WORKLOAD, server_of(LLAMA, "h100", None))


def test_a_ladder_names_every_rate_and_layer() -> None:
    names, left_out = names_for(facts())
    assert "fier-2048" in names and "snapkv:kv_rate=0.2" in names
    assert any(name.startswith("fastkv") and "tsp_layer=20" in name for name in names)
    assert [each.policy for each in left_out] == ["speed-24"]
    assert "vllm-kvx tune-speed" in left_out[0].why
    names, left_out = names_for(facts(layer=None, tuned="speed-24"))
    assert "speed-24+fier-2048" in names and not any("fastkv" in name for name in names)
    assert all("vllm-kvx calibrate" in each.why for each in left_out) and len(left_out) == 3


def test_those_that_gain_most_come_first() -> None:
    names, _ = names_for(facts(tuned="speed-24"))
    found, left_out = candidates(names, facts(), 64, 32000, gains)
    factors = [each.gains.requests for each in found]
    assert len(found) == len(names) and factors == sorted(factors, reverse=True)
    assert not left_out


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("full", {}, "what the others are compared with"),
        ("speed-40", {}, "use speed-1 .. speed-31"),
        ("fier-2048", {"head_dims": (64,)}, "128 dimensions, and retrieval knows 64"),
        ("speed-24", {"limits": [("no ranges", True)]}, "no ranges"),
        ("fastkv", {}, "its layer is not known"),
        ("snapkv:kv_rate=1", {}, "what the others are compared with"),
        ("auto", {}, "a server chooses one"),
        ("snapkv:kv_rate=0.2,after=32", {}, "drops nothing within 33 tokens"),
        ("fastkv:tsp_layer=15,kv_rate=0.2,after=32", {}, "drops nothing within 33 tokens"),
        ("snapkv:kv_rate=0.2", {"kv_cache_dtype": "int8_per_token_head"}, "it drops or moves"),
        ("snapkv:lookahead=32", {"config": LLAMA | MROPE}, "cannot look ahead"),
        (
            "snapkv:lookahead=32",
            {"config": LLAMA | {"max_position_embeddings": 32031}},
            "the model's context leaves 31 tokens behind the longest prompt",
        ),
        ("snapkv:lookahead=32", {"config": LLAMA | KEEPS_STATES}, "cannot look ahead"),
    ],
)
def test_what_is_left_out(name: str, changes: dict[str, Any], why: str) -> None:
    found, ((left, said),) = candidates([name], facts(**changes), 32, 32000, gains)
    assert not found and left == name and why in said


def test_what_waits_beside_propagation_is_asked() -> None:
    names = ["fastkv:tsp_layer=15,kv_rate=0.2,after=32"]
    names.append("fastkv:tsp_layer=15,kv_rate=1+snapkv:kv_rate=0.4,after=32")
    found, left_out = candidates(names, facts(), 34, 32000, gains)
    assert [each.name for each in found] == names and not left_out


def test_what_waits_and_what_is_drafted_is_counted() -> None:
    """By hand: 32 of 1,000 tokens read all, or a prompt is read 32 times more, alone."""
    plain, waits, drafts = map(
        gains,
        ("snapkv:kv_rate=0.2", "snapkv:kv_rate=0.2,after=32", "snapkv:kv_rate=0.2,lookahead=32"),
    )
    assert plain is not None and waits is not None and drafts is not None
    share = 32 / WORKLOAD.output
    assert waits.tpot == pytest.approx(
        1 / (share + (1 - share) / plain.tpot), rel=0.01
    )  # Of a few more entries.
    assert waits.ttft == plain.ttft == 1 and drafts.tpot == plain.tpot
    assert drafts.pool == plain.pool
    assert waits.pool == pytest.approx(1 / (share + (1 - share) / plain.pool), rel=0.01)
    server, length = server_of(LLAMA, "h100", None), WORKLOAD.input
    full = full_work(server.shape.layers, length)
    prompt = prefill_flops(server.shape, full) / server.device.flops
    step = decode_bytes(server.shape, full) / server.device.bandwidth
    assert drafts.ttft == pytest.approx(prompt / (prompt + 32 * step))
    assert plain.requests > waits.requests > drafts.requests


@pytest.mark.parametrize(
    "name",
    ["fastkv:tsp_layer=15,kv_rate=0.1,after=32", "fastkv:tsp_layer=15,kv_budget=3200,after=32"],
)
def test_what_waits_holds_what_was_propagated_until_then(name: str) -> None:
    plain, alone, waits = map(
        gains, ("fastkv:tsp_layer=15,kv_rate=0.1", "fastkv:tsp_layer=15,kv_rate=1", name)
    )
    assert plain is not None and alone is not None and waits is not None
    share = 32 / WORKLOAD.output
    assert waits.ttft == plain.ttft
    assert waits.tpot == pytest.approx(
        1 / (share / alone.tpot + (1 - share) / plain.tpot), rel=0.01
    )
    assert waits.pool == pytest.approx(
        1 / (share / alone.pool + (1 - share) / plain.pool), rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("snapkv:kv_rate=0.2,after=32+fier-2048", "fier-2048"),
        (
            "fastkv:tsp_layer=15,kv_rate=0.2,after=32+fier-2048",
            "fastkv:tsp_layer=15,kv_rate=1+fier-2048",
        ),
    ],
)
def test_tokens_that_are_waited_for_read_what_is_retrieved(name: str, alone: str) -> None:
    plain, before, waits = map(gains, (name.replace(",after=32", ""), alone, name))
    assert plain is not None and before is not None and waits is not None
    share = 32 / WORKLOAD.output
    tpot, pool = (
        1 / (share / getattr(before, by) + (1 - share) / getattr(plain, by))
        for by in ("tpot", "pool")
    )
    assert (waits.tpot, waits.pool) == pytest.approx((tpot, pool), rel=0.01)
    assert waits.ttft == plain.ttft


def test_short_prompts_save_nothing() -> None:
    server = server_of(LLAMA, "h100", None)
    short = Workload(500, 100, 1)
    names = ["fier-2048", "snapkv:kv_rate=0.4", "speed-24"]
    found, left_out = candidates(
        names, facts(), 64, 32000, lambda name: gains_of(name, short, server)
    )
    assert [each.name for each in found] == ["speed-24"]
    assert {each.why for each in left_out} == {"it saves nothing of such prompts"}


def test_nothing_is_drafted_behind_prompts_that_stay_whole() -> None:
    server, short = server_of(LLAMA, "h100", None), Workload(500, 100, 1)
    found = gains_of("snapkv:kv_rate=0.2,lookahead=32", short, server)
    assert found is not None and set(found.as_json().values()) == {1.0}


def test_rates_below_a_floor_are_one_policy() -> None:
    server, short = server_of(LLAMA, "h100", None), Workload(1000, 100, 1)
    names = ["snapkv:kv_rate=0.4", "snapkv:kv_rate=0.2", "criticalkv:kv_rate=0.2", "snapkv"]
    found, left_out = candidates(
        names, facts(), 64, 32000, lambda name: gains_of(name, short, server)
    )
    assert {each.name for each in found} == {"snapkv:kv_rate=0.4", "criticalkv:kv_rate=0.2"}
    assert {each.why for each in left_out} == {
        "of such prompts it saves as much as snapkv:kv_rate=0.4"
    }


def test_windows_keep_some_from_a_model() -> None:
    config = SHAPES["gemma3-12b"].config()
    found, left_out = candidates(
        ["speed-24", "speed-24+fier-512", "snapkv:kv_rate=0.4"],
        facts(config=config, head_dims=(256,)),
        64,
        32000,
        lambda name: gains_of(name, WORKLOAD, server_of(config, "h100", None)),
    )
    assert {each.name for each in found} == {"speed-24", "snapkv:kv_rate=0.4"}
    assert "slide over a window" in left_out[0].why


class Asked(Rounds):
    """Rounds whose candidates stand as a test says."""

    def __init__(self, *verdicts: Verdict) -> None:
        found = [
            Candidate(f"snapkv:kv_rate=0.{9 - i}", None, Gains(1, 1, 1, 9.0 - i))  # type: ignore[arg-type]
            for i in range(len(verdicts))
        ]
        questions: Any = type("Q", (), {"rounds": 6})
        store: Any = None
        super().__init__(found, questions, store, 0.97, Clock(None), lambda: None, print)
        for standing, each in zip(self.standings, verdicts, strict=True):
            standing.verdict = each


def test_who_cannot_beat_one_that_keeps_is_asked_no_more() -> None:
    rounds = Asked(Verdict.UNDECIDED, Verdict.LOST, Verdict.KEPT, Verdict.UNDECIDED, Verdict.KEPT)
    everyone = [each.candidate for each in rounds.standings]
    assert rounds.best == everyone[2]
    assert [each.candidate for each in rounds.open(everyone)] == [everyone[0]]
    assert rounds.standings[3].verdict is Verdict.OUTDONE
    assert rounds.standings[0].verdict is Verdict.UNDECIDED
    # Those of another engine are not looked at.
    rounds = Asked(Verdict.KEPT, Verdict.UNDECIDED)
    assert rounds.open([]) == [] and rounds.standings[1].verdict is Verdict.UNDECIDED


def test_gains_are_what_is_counted() -> None:
    server = server_of(LLAMA, "h100", None)
    assert server.cards == 1 and not server.assumed
    found = gains_of("snapkv:kv_rate=0.2", WORKLOAD, server)
    assert found is not None
    assert (found.ttft, found.pool) == (1.0, pytest.approx(5.0, rel=1e-3))
    assert 1.5 < found.requests < found.tpot < 5
    assert gains_of("fastkv", WORKLOAD, server) is None
    # More requests at a time read more KV beside the same weights.
    alone = gains_of("snapkv:kv_rate=0.2", replace(WORKLOAD, concurrency=1), server)
    assert alone is not None and alone.tpot < found.tpot
    assert found.as_json().keys() == {"ttft", "tpot", "pool", "requests"}


def test_devices_are_named_found_or_assumed() -> None:
    assert server_of(LLAMA, None, "NVIDIA H200").device.name == "h200"
    assert server_of(LLAMA, "l4", "NVIDIA H200").device.name == "l4"
    assumed = server_of(LLAMA, None, None)
    assert assumed.assumed and "h100, which is assumed: --device" in assumed.says
    with pytest.raises(ToolError, match="no data sheet of NVIDIA A10G"):
        server_of(LLAMA, None, "NVIDIA A10G")
    assert device_of("NVIDIA H100 PCIe") is None
    # 8B parameters in 16 bits take most of 24 GB.
    assert server_of(LLAMA, "l4", None).cards == 1
    assert server_of(SHAPES["qwen2.5-32b"].config(), "h100", None).cards == 2
    assert server_of(SHAPES["qwen2.5-32b"].config(), "h100", None, 0.5).cards == 1
    with pytest.raises(ToolError, match="configuration has no num_attention_heads"):
        server_of({}, None, None)


def test_a_cpu_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvx.tools.recommend import command

    monkeypatch.setattr(command, "on_cpu", lambda: True)
    questions: Any = type("Q", (), {"median": 32000, "first": 16})
    with pytest.raises(ToolError, match=r"no GPU here, and 16 prompts of 32,000 tokens take"):
        check_time(Clock(10), questions, server_of(LLAMA, None, None))
    check_time(Clock(None), questions, server_of(LLAMA, None, None))
    check_time(Clock(10), questions, server_of(SHAPES["tiny"].config(), None, None))
