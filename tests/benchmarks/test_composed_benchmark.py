"""Compositions beside the product of their parts; engines with a KV cache dtype of their own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import compare
from benchmarks.engine.composed import PRESETS, composed, table
from benchmarks.engine.ideal import Case
from benchmarks.engine.measure import Bench, Step, percentile, waits_during
from benchmarks.engine.shapes import SHAPES
from benchmarks.report.cells import words
from vllm_kvx.policy.layout import check_fits, layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.ideal.shape import Shape

LLAMA = SHAPES["llama-3.1-8b"]
CASE = "tpot:32768"


def results(medians: dict[str, float], pools: dict[str, int]) -> dict[str, Any]:
    """A file of `benchmarks.engine.compare`, derived."""
    engines = {
        name: {"pool": {"tokens": pools[name]}, "cases": {CASE: {"median": median}}}
        for name, median in medians.items()
    }
    settings = {"engine": {"dtype": "bfloat16"}, "tokens": 129, "steps": 64}
    content = {"settings": settings, "engines": engines}
    compare.derive(content, LLAMA)
    return content


def test_product_of_the_parts() -> None:
    medians = {"stock": 12.0, "speed-24": 8.0, "fier-2048": 6.0, "speed-24+fier-2048": 5.0}
    medians["stock@fp8"], medians["speed-24+fier-2048@fp8"] = 10.0, 4.0
    found = {(c.engine, c.case): c for c in composed(results(medians, dict.fromkeys(medians, 7)))}
    both = found["speed-24+fier-2048", CASE]
    assert both.parts == {"speed-24": 1.5, "fier-2048": 2.0}
    assert (both.measured, both.product) == (2.4, 3.0)
    assert both.ideal is not None and both.ideal < 3.0
    in_fp8 = found["speed-24+fier-2048@fp8", CASE]
    assert in_fp8.parts["stock@fp8"] == 1.2
    assert in_fp8.product == pytest.approx(3.6)
    assert in_fp8.ideal is not None and in_fp8.ideal > both.ideal
    # An fp8 cache holds twice as much, by itself and of every policy.
    pools = {name: each for (name, case), each in found.items() if case == "pool"}
    assert pools["speed-24+fier-2048@fp8"].ideal == pytest.approx(2 * 32 / 24, rel=1e-4)


def test_a_part_that_was_not_measured_has_no_product() -> None:
    content = results({"stock": 12.0, "speed-24+snapkv": 6.0}, {"stock": 1, "speed-24+snapkv": 1})
    (case,) = [each for each in composed(content) if each.case == CASE]
    assert case.product is None and case.parts == {"speed-24": None, "snapkv": None}
    assert (
        "speed-24+snapkv" in table(content) and table(results({"stock": 1.0}, {"stock": 1})) == ""
    )


def test_where_stock_has_another_cache_gains_are_over_that() -> None:
    names = {"stock@fp8": 12.0, "fastkv:tsp_layer=15@fp8": 6.0}
    content = results(names, {"stock@fp8": 10, "fastkv:tsp_layer=15@fp8": 90})
    engine = content["engines"]["fastkv:tsp_layer=15@fp8"]
    assert engine["cases"][CASE]["ratio_to_stock"] == 2.0
    # Of the same bytes an entry: ten times as many fit, by what stays.
    assert engine["pool"]["ratio_to_stock"] == 9.0
    assert engine["pool"]["ideal"] == pytest.approx(10, rel=1e-3)
    # Of two other stocks neither is stock.
    two = results({**names, "stock@fp8_e5m2": 12.0}, dict.fromkeys([*names, "stock@fp8_e5m2"], 1))
    assert "ratio_to_stock" not in two["engines"]["fastkv:tsp_layer=15@fp8"]["cases"][CASE]


def test_one_server_that_has_room_for_all(tmp_path: Path) -> None:
    argv = ["--model", "llama-3.1-8b", "--preset", "composed", "--out", str(tmp_path / "x.json")]
    args = compare.parse_args(argv)
    cases = {name: compare.cases_of(name, args.cases) for name in args.engines}
    assert len(cases["stock"]) == len(cases["stock@fp8"]) == 7
    content = results({"stock": 12.0}, {"stock": 1})
    settings = content["settings"]
    content = {"settings": settings, "engines": {}}
    for name, of_engine in cases.items():
        room = {} if name.startswith("stock") else {"room_for": args.layout}
        measured = {case: {"median": 1.0, "tokens_per_s": 1.0, "batch": 4} for case in of_engine}
        content["engines"][name] = {"pool": {"tokens": 1}, "cases": measured, **room}
    compare.derive(content, LLAMA)
    found = composed(content)
    assert {each.engine for each in found if "+" not in each.engine} == {
        f"{name}@fp8" for name in ("fier-2048", *args.layout)
    }
    known = [each for each in found if each.case != "pool"]
    assert known and [(c.engine, c.case) for c in known if c.product is None] == []
    both = next(c for c in known if (c.engine, c.case) == ("snapkv+fier-512", "tpot:130000"))
    # The ideal is that of what the requests ask for, and requests for `full` are no composition.
    assert both.ideal is not None and both.ideal > 1.5
    assert not any("full" in each.engine for each in found)
    # Every policy that requests name fits the server.
    policies = [parse_policy(name) for name in ("fier-2048", *args.layout)]
    layout = layout_of(policies, LLAMA.layers)
    for case in args.cases:
        check_fits(parse_policy(case.policy or "full"), layout, LLAMA.layers)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "composed"])
def test_presets_have_every_part(name: str, tmp_path: Path) -> None:
    argv = ["--model", "llama-3.1-8b", "--preset", name, "--out", str(tmp_path / "x.json")]
    args = compare.parse_args(argv)
    made = {engine: 1.0 for engine in args.engines}
    content = results(made, dict.fromkeys(made, 1))
    products = [each.product for each in composed(content)]
    assert products and None not in products
    assert args.engine_args["max_num_seqs"] == 256
    assert {case.kind for case in args.cases} == {"ttft", "tpot", "pool_decode"}


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    argv = ["--model", "tiny", "--engines", "stock", "--cases", "ttft:96", "tpot:96"]
    argv += ["--append", str(tmp_path / "x.json"), "--resume"]
    args = compare.parse_args(argv)
    shape: Shape = SHAPES["tiny"]
    file = compare.Results(args, argv, shape, dummy=True)
    file.content["engines"]["stock"] = {
        "cases": {"ttft:96": {"median": 1.0}, "tpot:96": {"error": ["x"]}}
    }
    assert file.missing("stock", ["ttft:96", "tpot:96"]) == ["tpot:96"]
    assert compare.cases_of("stock@fp8", [Case.parse("ttft:96@full")]) == ["ttft:96"]
    with pytest.raises(SystemExit):
        compare.parse_args([*argv[:-3], "--out", "x.json", "--resume"])


def test_a_pool_that_is_not_full_says_so() -> None:
    assert words("pool_decode:32768", {"pool_filled": 0.27}) == "decode, 32,768 each, pool 27% full"
    assert words("pool_decode:32768", {"pool_filled": 0.97}) == "decode, pool full of 32,768"


@pytest.mark.parametrize(
    ("policy", "tokens"),
    # Every page of the server has a sidecar; of snapkv's prompts a tenth stays, of speed-24's 3/4.
    [(None, 90_000), ("full", 90_000), ("snapkv", 900_000), ("speed-24", 120_000)],
)
def test_the_pool_of_what_requests_ask_for(policy: str | None, tokens: int) -> None:
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: 32)
    bench = Bench({"cases": [], "policy": "fier-2048"})
    bench.config = SimpleNamespace(model_config=model)
    bench.report["pool"] = {"tokens": 90_000, "stock_tokens": 96_000}
    case = Case("pool_decode", 32_000, policy=policy)
    assert bench._pool_tokens(case) == pytest.approx(tokens, rel=1e-3)


def test_waits_while_the_long_prompt_comes_in() -> None:
    steps = [Step([], 4, 4, None), Step([3.0, 1.0], 0, 9, None), Step([2.0], 1, 9, None)]
    after = Step([0.5], 0, 1, "FULL")
    assert waits_during([*steps, after]) == [3.0, 1.0, 2.0]
    assert waits_during([after]) == []
    assert [percentile([4.0, 1.0, 3.0, 2.0], q) for q in (50, 99)] == [2.0, 4.0]


def test_ideals_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Where weights take fewer bytes, the cache is more of a step, and a policy can gain more."""
    assert compare.stored_weights("llama-3.1-8b") == {}
    config = LLAMA.config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compare.stored_weights(str(tmp_path)) == {}
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    stored = compare.stored_weights(str(tmp_path))
    assert stored == {"weight_bytes": 0.5}
    content = results({"stock": 12.0, "fier-2048": 6.0}, {"stock": 7, "fier-2048": 7})
    plain = content["engines"]["fier-2048"]["cases"][CASE]["ideal"]
    content["model"] = stored
    compare.derive(content, LLAMA)
    assert content["engines"]["fier-2048"]["cases"][CASE]["ideal"] > 1.2 * plain
