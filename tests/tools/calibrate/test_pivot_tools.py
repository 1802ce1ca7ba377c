"""`vllm-kvx calibrate --method structkv`, from end to end, and the prompts that are built in."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import structkv
from support.calibrating import FOCUS, PROMPTS, WEIGHTS, WINDOW, build_focused
from support.models import LOOKUP
from transformers import AutoConfig, AutoTokenizer

from vllm_kvx.equations.pivot import Metrics
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.measured_layers import layer_of
from vllm_kvx.tools.calibrate import pivot
from vllm_kvx.tools.checkpoint.prompts import BUILTIN, builtin_prompts


def pivot_of_model(
    config: dict[str, Any], model: str, layers: int, window: int, weights: Sequence[float]
) -> tuple[int, str] | None:
    names = ("entropy_weight", "sparsity_weight", "variance_weight")
    policy = StructKV(window=window, **dict(zip(names, weights, strict=True)))
    found = layer_of(policy, ModelIdentity(model, config), layers)
    return None if found is None else (found.layer, found.source)


@pytest.fixture(scope="module", params=FOCUS, ids=lambda layers: f"{layers}l")
def layers(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def model(layers: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_focused(tmp_path_factory.mktemp("focused"), layers, FOCUS[layers])


def config_of(path: Path) -> dict[str, Any]:
    return AutoConfig.from_pretrained(path).to_dict()


def stored(cache: Path) -> tuple[Path, dict[str, Any]]:
    [path] = cache.glob("calibration/*.json")
    return path, json.loads(path.read_text())


def test_the_pivot_follows_the_models_depth(
    model: Path,
    layers: int,
    run_tool: Callable[..., int],
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_tool("calibrate", model, "--no-plot") == 0
    path, record = stored(cache)
    assert record["pivot"] == FOCUS[layers] + 1
    expected = structkv.metrics(str(model), PROMPTS, WINDOW)
    for name, values in expected.items():
        assert record["metrics"][name] == pytest.approx(values.tolist(), rel=1e-3)
    scores = structkv.transition_scores(expected, WEIGHTS).tolist()
    assert record["transition"][0] is None
    assert record["transition"][1:] == pytest.approx(scores[1:], abs=1e-3)
    assert structkv.pivot_of(expected, WEIGHTS) == record["pivot"]
    facts = {"method": "structkv", "layers": layers, "window": WINDOW, "weights": [*WEIGHTS]}
    assert facts.items() <= record.items() and {"date", "versions"} <= record.keys()
    assert record["prompts"]["tokens"] == [70, 90]
    assert path.name == f"structkv-{record['key']}.json"
    out = capsys.readouterr()
    [marked] = [line for line in out.out.splitlines() if line.endswith("<- pivot")]
    assert marked.split()[0] == str(record["pivot"])
    assert "`vllm serve" in out.out and f"structkv:pivot={record['pivot']},kv_rate=0.4\n" in out.out
    assert "prompt 2/2, 90 tokens" in out.err
    found = pivot_of_model(config_of(model), str(model), layers, WINDOW, WEIGHTS)
    assert found == (record["pivot"], f"calibrated by the paper's criterion: {path}")


def test_another_model_has_another_pivot(
    tmp_path: Path, run_tool: Callable[..., int], cache: Path
) -> None:
    """Of the same shape: the weights decide."""
    for focus in (2, 5):
        model = build_focused(tmp_path / str(focus), 8, focus)
        assert run_tool("calibrate", model, "--no-plot") == 0
        found = pivot_of_model(config_of(model), str(model), 8, WINDOW, WEIGHTS)
        assert found is not None and found[0] == focus + 1
    assert len(list(cache.glob("calibration/*.json"))) == 2


def test_a_stored_pivot_is_not_anothers(
    focused: Path,
    tmp_path: Path,
    run_tool: Callable[..., int],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run_tool("calibrate", focused, "--no-plot") == 0
    path, record = stored(cache)
    config = config_of(focused)
    # vLLM, where something has imported it, keeps its log to itself, and some of it from everyone.
    caplog.set_level(logging.WARNING, "vllm.kvx.calibration")
    logging.getLogger("vllm.kvx.calibration").addHandler(caplog.handler)
    try:
        assert pivot_of_model(config, str(focused), 5, WINDOW, WEIGHTS) == (
            3,
            f"calibrated by the paper's criterion: {path}",
        )
        # As a list, or where 1 and 1.0 differ in spelling, they are the same weights.
        assert pivot_of_model(config, str(focused), 5, WINDOW, list(WEIGHTS)) is not None
        assert not caplog.text
        other = build_focused(tmp_path / "other", 5, 1)
        assert pivot_of_model(config_of(other), str(other), 5, WINDOW, WEIGHTS) is None
        assert not caplog.text
        for arguments, reason in (
            ((3, WINDOW, WEIGHTS), "its layers is 5, wanted is 3"),
            ((5, 4, WEIGHTS), "its window is 8, wanted is 4"),
            ((5, WINDOW, (0.2, 0.3, 0.4)), "its weights is [0.2, 0.3, 0.5], wanted is"),
        ):
            caplog.clear()
            assert pivot_of_model(config, str(focused), *arguments) is None
            assert reason in caplog.text and str(path) in caplog.text
        caplog.clear()
        path.write_text(json.dumps({k: v for k, v in record.items() if k != "weights"}))
        assert pivot_of_model(config, str(focused), 5, WINDOW, WEIGHTS) is None
        assert "does not say with which weights" in caplog.text
    finally:
        logging.getLogger("vllm.kvx.calibration").removeHandler(caplog.handler)


def test_window_and_weights_are_those_given(
    focused: Path, run_tool: Callable[..., int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = (1.0, 0.0, 0.25)
    assert run_tool("calibrate", focused, "--no-plot", window=4, weights="1,0,0.25") == 0
    path, record = stored(cache)
    assert record["window"] == 4 and record["weights"] == [*weights]
    expected = structkv.metrics(str(focused), PROMPTS, 4)
    assert record["metrics"]["variance"] == pytest.approx(expected["variance"].tolist(), rel=1e-3)
    assert record["pivot"] == structkv.pivot_of(expected, weights)
    found = pivot_of_model(config_of(focused), str(focused), 5, 4, (1, 0, 0.25))
    assert found == (record["pivot"], f"calibrated by the paper's criterion: {path}")
    name = "structkv:kv_rate=0.4,window=4,entropy_weight=1,sparsity_weight=0,variance_weight=0.25"
    assert f"--kv-policy {name}`" in capsys.readouterr().out


def test_the_curves_are_drawn_where_they_are_wanted(
    focused: Path, tmp_path: Path, run_tool: Callable[..., int], cache: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert run_tool("calibrate", focused) == 0
    [picture] = cache.glob("calibration/*.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert run_tool("calibrate", focused, plot=tmp_path / "here.png") == 0
    assert (tmp_path / "here.png").read_bytes()[:4] == b"\x89PNG"


def test_a_pivot_at_the_top_is_pointed_out(
    tmp_path: Path, run_tool: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_focused(tmp_path / "model", 4, 3)
    assert run_tool("calibrate", model, "--no-plot", min_layer=3, max_layer=3) == 0
    assert "The pivot is the last layer" in capsys.readouterr().out


def test_attention_out_of_range() -> None:
    fine = torch.ones(2, dtype=torch.float64)
    pivot.check_finite(Metrics(fine, fine, fine), "prompt 1/1")
    with pytest.raises(ToolError, match="prompt 1/1: its attention is not finite"):
        pivot.check_finite(Metrics(fine, fine * float("nan"), fine), "prompt 1/1")


def test_builtin_prompts() -> None:
    config, tokenizer = AutoConfig.from_pretrained(LOOKUP), AutoTokenizer.from_pretrained(LOOKUP)
    prompts = builtin_prompts(str(LOOKUP), config)
    assert [len(prompt) for prompt in prompts] == [4096] * 4
    assert all(prompt[0] == tokenizer.bos_token_id for prompt in prompts)
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 4
    assert tokenizer.decode(prompts[0][1:]).startswith("Alice was beginning to get very tired")
    # As many tokens as there may be.
    assert [len(p) for p in builtin_prompts(str(LOOKUP), config, longest=100)] == [100] * 4
    config.sliding_window = 90
    assert [len(p) for p in builtin_prompts(str(LOOKUP), config, longest=100)] == [90] * 4
    config.max_position_embeddings = 80
    short = builtin_prompts(str(LOOKUP), config)
    assert short == [prompt[:80] for prompt in prompts]


def test_the_built_in_text_is_small() -> None:
    assert BUILTIN.stat().st_size < 40_000
    assert (BUILTIN.parent / "README.md").exists()


def test_calibrating_without_prompts(
    run_tool: Callable[..., int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool("calibrate", LOOKUP, "--no-plot", prompts=None, max_prompt_tokens=200) == 0
    _, record = stored(cache)
    assert record["prompts"] == {"source": "built-in", "count": 4, "tokens": [200] * 4}
    out = capsys.readouterr()
    assert "4 built-in prompts of 200 tokens" in out.out
    assert "longer than" not in out.err
