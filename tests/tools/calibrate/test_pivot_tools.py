"""`vllm-kvx calibrate --method structkv` and `vllm-kvx diagnose`, from end to end."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import structkv
from reference.models import build_model
from safetensors.torch import load_file, save_file
from support.models import LOOKUP
from support.nightly import nightly
from support.prompts import VOCAB, prompt_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.cli import main
from vllm_kvx.equations.pivot import Metrics
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.structkv import StructKV, online_limits, paper_limits
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.measured_layers import layer_of
from vllm_kvx.tools.calibrate import pivot
from vllm_kvx.tools.checkpoint.prompts import BUILTIN, builtin_prompts

WINDOW = 8
WEIGHTS = (0.2, 0.3, 0.5)


def pivot_of_model(
    config: dict[str, Any], model: str, layers: int, window: int, weights: Sequence[float]
) -> tuple[int, str] | None:
    names = ("entropy_weight", "sparsity_weight", "variance_weight")
    policy = StructKV(window=window, **dict(zip(names, weights, strict=True)))
    found = layer_of(policy, ModelIdentity(model, config), layers)
    return None if found is None else (found.layer, found.source)


def bounded(metrics: dict[str, torch.Tensor]) -> int:
    """The reference's pivot within the tool's default limits."""
    scores = structkv.transition_scores(metrics, WEIGHTS).tolist()
    low, high = paper_limits(len(scores))
    return max(range(low, high + 1), key=lambda pivot: (scores[pivot - 1], -pivot))


# Layers of a model, and the first of them whose attention is focused.
FOCUS = {8: 3, 28: 12, 48: 22}


def build_focused(path: Path, layers: int, focus: int, **options: Any) -> Path:
    """A model whose attention is broad in the layers below `focus` and narrow from there on."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 32, "intermediate": 32}
    build_model(path, **{"arch": "llama", "layers": layers, "vocab": VOCAB, **shape, **options})
    weights = load_file(path / "model.safetensors")
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] *= 0.2 if layer < focus else 5
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module", params=FOCUS, ids=lambda layers: f"{layers}l")
def layers(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def model(layers: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_focused(tmp_path_factory.mktemp("focused"), layers, FOCUS[layers])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_focused(tmp_path_factory.mktemp("small"), 5, 2)


def config_of(path: Path) -> dict[str, Any]:
    return AutoConfig.from_pretrained(path).to_dict()


PROMPTS = [prompt_of(70), prompt_of(90, seed=1)]


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    """Runs a command on a model with PROMPTS; options as keywords, None leaves one out."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS))

    def run(name: str, model: Path | str, *flags: str, **options: Any) -> int:
        given: dict[str, Any] = {"prompts": prompts, "device": "cpu"}
        if name == "calibrate":
            given |= {"method": "structkv", "criterion": "paper"}
        else:
            given["output"] = tmp_path / "out"
        argv = [name, str(model), *flags]
        for option, value in {**given, **options}.items():
            if value is not None:
                argv += [f"--{option.replace('_', '-')}", str(value)]
        return main(argv)

    return run


def stored(cache: Path) -> tuple[Path, dict[str, Any]]:
    [path] = cache.glob("calibration/*.json")
    return path, json.loads(path.read_text())


# calibrate --method structkv


def test_the_pivot_follows_the_models_depth(
    model: Path,
    layers: int,
    command: Callable[..., int],
    cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("calibrate", model, "--no-plot") == 0
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
    tmp_path: Path, command: Callable[..., int], cache: Path
) -> None:
    """Of the same shape: the weights decide."""
    for focus in (2, 5):
        model = build_focused(tmp_path / str(focus), 8, focus)
        assert command("calibrate", model, "--no-plot") == 0
        found = pivot_of_model(config_of(model), str(model), 8, WINDOW, WEIGHTS)
        assert found is not None and found[0] == focus + 1
    assert len(list(cache.glob("calibration/*.json"))) == 2


def test_a_stored_pivot_is_not_anothers(
    small: Path,
    tmp_path: Path,
    command: Callable[..., int],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert command("calibrate", small, "--no-plot") == 0
    path, record = stored(cache)
    config = config_of(small)
    # vLLM, where something has imported it, keeps its log to itself, and some of it from everyone.
    caplog.set_level(logging.WARNING, "vllm.kvx.calibration")
    logging.getLogger("vllm.kvx.calibration").addHandler(caplog.handler)
    try:
        assert pivot_of_model(config, str(small), 5, WINDOW, WEIGHTS) == (
            3,
            f"calibrated by the paper's criterion: {path}",
        )
        # As a list, or where 1 and 1.0 differ in spelling, they are the same weights.
        assert pivot_of_model(config, str(small), 5, WINDOW, list(WEIGHTS)) is not None
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
            assert pivot_of_model(config, str(small), *arguments) is None
            assert reason in caplog.text and str(path) in caplog.text
        caplog.clear()
        path.write_text(json.dumps({k: v for k, v in record.items() if k != "weights"}))
        assert pivot_of_model(config, str(small), 5, WINDOW, WEIGHTS) is None
        assert "does not say with which weights" in caplog.text
    finally:
        logging.getLogger("vllm.kvx.calibration").removeHandler(caplog.handler)


def test_window_and_weights_are_those_given(
    small: Path, command: Callable[..., int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = (1.0, 0.0, 0.25)
    assert command("calibrate", small, "--no-plot", window=4, weights="1,0,0.25") == 0
    path, record = stored(cache)
    assert record["window"] == 4 and record["weights"] == [*weights]
    expected = structkv.metrics(str(small), PROMPTS, 4)
    assert record["metrics"]["variance"] == pytest.approx(expected["variance"].tolist(), rel=1e-3)
    assert record["pivot"] == structkv.pivot_of(expected, weights)
    found = pivot_of_model(config_of(small), str(small), 5, 4, (1, 0, 0.25))
    assert found == (record["pivot"], f"calibrated by the paper's criterion: {path}")
    name = "structkv:kv_rate=0.4,window=4,entropy_weight=1,sparsity_weight=0,variance_weight=0.25"
    assert f"--kv-policy {name}`" in capsys.readouterr().out


def test_the_curves_are_drawn_where_they_are_wanted(
    small: Path, tmp_path: Path, command: Callable[..., int], cache: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert command("calibrate", small) == 0
    [picture] = cache.glob("calibration/*.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert command("calibrate", small, plot=tmp_path / "here.png") == 0
    assert (tmp_path / "here.png").read_bytes()[:4] == b"\x89PNG"


def test_a_pivot_at_the_top_is_pointed_out(
    tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_focused(tmp_path / "model", 4, 3)
    assert command("calibrate", model, "--no-plot", min_layer=3, max_layer=3) == 0
    assert "The pivot is the last layer" in capsys.readouterr().out


def test_attention_out_of_range() -> None:
    fine = torch.ones(2, dtype=torch.float64)
    pivot.check_finite(Metrics(fine, fine, fine), "prompt 1/1")
    with pytest.raises(ToolError, match="prompt 1/1: its attention is not finite"):
        pivot.check_finite(Metrics(fine, fine * float("nan"), fine), "prompt 1/1")


# Built-in prompts.


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
    command: Callable[..., int], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("calibrate", LOOKUP, "--no-plot", prompts=None, max_prompt_tokens=200) == 0
    _, record = stored(cache)
    assert record["prompts"] == {"source": "built-in", "count": 4, "tokens": [200] * 4}
    out = capsys.readouterr()
    assert "4 built-in prompts of 200 tokens" in out.out
    assert "longer than" not in out.err


# diagnose


@torch.no_grad()
def recovery_by_hand(
    path: Path, prompt: list[int], layer: int, rate: float, kv_rate: float
) -> dict[str, list[float]]:
    """Figure 5 from transformers' own attention, key by key."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    out = model.model(torch.tensor([prompt]), output_attentions=True, use_cache=False)
    rows = [a[0, :, -WINDOW:].double().numpy() for a in out.attentions]  # (H, w, N) each
    total, groups = len(prompt), model.config.num_key_value_heads
    before, recent = total - WINDOW, list(range(total - WINDOW, total))

    def pooled(scores: np.ndarray, kernel: int, of: Callable[..., float]) -> np.ndarray:
        padded = np.pad(scores, kernel // 2)
        return np.array([of(padded[key : key + kernel]) for key in range(len(scores))])

    def best(scores: np.ndarray, count: int, unpooled: np.ndarray | None = None) -> list[int]:
        second = scores if unpooled is None else unpooled
        order = sorted(range(before), key=lambda key: (-scores[key], -second[key], key))
        return order[: count - WINDOW] + recent

    centrality = np.zeros(before)
    for attention in rows[: layer + 1]:
        centrality = 0.9 * centrality + attention.sum(axis=(0, 1))[:before]
    fastkv = sum(pooled(head.sum(axis=0)[:before], 7, np.max) for head in rows[layer])
    gemfilter = pooled(rows[layer][:, -1, :before].sum(axis=0), 5, np.mean)
    count, cap = max(int(total * rate), WINDOW), max(int(total * kv_rate), WINDOW)
    scores = {"structkv": centrality, "fastkv": fastkv, "gemfilter": gemfilter}
    summed = {"fastkv": rows[layer].sum(axis=(0, 1))[:before]}
    sets = {name: best(values, count, summed.get(name)) for name, values in scores.items()}
    result: dict[str, list[float]] = {
        name: [
            1.0 if index <= layer and name != "gemfilter" else attention[..., keys].sum(-1).mean()
            for index, attention in enumerate(rows)
        ]
        for name, keys in sets.items()
    }
    result["snapkv"] = []
    for attention in rows:
        mass = 0.0
        for group in np.split(attention, groups):
            local = sum(pooled(head.sum(axis=0)[:before], 7, np.max) for head in group)
            kept = best(local, cap, group.sum(axis=(0, 1))[:before])
            mass += group[..., kept].sum(-1).mean() / groups
        result["snapkv"].append(mass)
    return result


@nightly
def test_diagnosis_of_the_demo_checkpoint(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    texts = [make_prompt(seed, 512, tokenizer)[0] for seed in range(3)]
    (tmp_path / "lookup.txt").write_text("\n---\n".join(texts))
    options = {"prompts": tmp_path / "lookup.txt", "struct_rate": 0.25, "kv_rate": 0.2}
    # Its layers 0 to 3 find the answer.
    assert command("diagnose", LOOKUP, pivot=3, **options) == 0
    out = capsys.readouterr()
    directory = tmp_path / "out"
    record = json.loads((directory / "diagnosis.json").read_text())
    assert str(directory / "diagnosis.json") in out.out and "prompt 3/3" in out.err

    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = structkv.metrics(str(LOOKUP), prompts, WINDOW)
    low, high = online_limits(8)
    assert record["pivot"] == 3
    assert record["measured"]["pivot"] == bounded(expected)
    assert record["online"]["pivot"] == structkv.online_pivot(expected, WEIGHTS, low, high)
    alone = [structkv.metrics(str(LOOKUP), [prompt], WINDOW) for prompt in prompts]
    assert record["measured"]["prompts"] == [bounded(each) for each in alone]
    assert record["online"]["prompts"] == [
        structkv.online_pivot(each, WEIGHTS, low, high) for each in alone
    ]
    for name, values in expected.items():
        assert record["metrics"][name] == pytest.approx(values.tolist(), rel=1e-3)

    assert set(record["recovery"]) == {"structkv", "fastkv", "gemfilter", "snapkv"}
    for index, prompt in enumerate(prompts):
        by_hand = recovery_by_hand(LOOKUP, prompt, 3, 0.25, 0.2)
        for method, values in by_hand.items():
            actual = record["recovery"][method]["prompts"][index]
            assert actual == pytest.approx(values, abs=1e-3), method
    for method, values in record["recovery"].items():
        assert values["mean"] == pytest.approx(np.mean(values["prompts"], axis=0)), method
        assert f"{method} {np.mean(values['mean'][4:]):.3f}" in out.out
    # The paper's finding: what one layer ignores, the layers above may want.
    above = {method: np.mean(values["mean"][4:]) for method, values in record["recovery"].items()}
    assert above["structkv"] > above["fastkv"] + 0.05 > above["gemfilter"] + 0.1
    pytest.importorskip("matplotlib")
    for name in ("pivot.png", "recovery.png"):
        assert (directory / name).read_bytes()[:4] == b"\x89PNG"


@nightly
def test_diagnosis_after_a_given_layer(command: Callable[..., int], tmp_path: Path) -> None:
    """Of a model with every query head its own KV head, and where two heads share one."""
    for kv_heads in (2, 1):
        model = build_focused(tmp_path / f"kv{kv_heads}", 6, 3, kv_heads=kv_heads)
        assert command("diagnose", model, pivot=1, struct_rate=0.3, kv_rate=0.3) == 0
        record = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
        assert record["pivot"] == 1 and record["measured"]["pivot"] == 4
        assert record["struct_rate"] == record["kv_rate"] == 0.3
        for index, prompt in enumerate(PROMPTS):
            for method, values in recovery_by_hand(model, prompt, 1, 0.3, 0.3).items():
                actual = record["recovery"][method]["prompts"][index]
                assert actual == pytest.approx(values, abs=1e-3), method


def test_selecting_everything_recovers_everything(
    small: Path, command: Callable[..., int], tmp_path: Path
) -> None:
    assert command("diagnose", small, pivot=0, struct_rate=1, kv_rate=1) == 0
    record = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    for method, values in record["recovery"].items():
        assert values["mean"] == pytest.approx([1.0] * 5), method


def test_diagnosis_lies_where_it_is_asked_for(
    small: Path,
    command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # At the last layer there is nothing to compare above it.
    assert command("diagnose", small, output=None, pivot=4) == 0
    written = [path.name for path in (tmp_path / f"diagnose-{small.name}").iterdir()]
    assert written == ["diagnosis.json"]
    out = capsys.readouterr().out
    assert "pip install 'vllm-kvx[tools]'" in out and "there is no layer above" in out


# What cannot be done.


def failure(code: int, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failed command leaves."""
    out = capsys.readouterr()
    assert code == 2 and not out.out
    [line] = [line for line in out.err.splitlines() if "error:" in line]
    assert line.startswith(f"vllm-kvx {name}: error: ") and "Traceback" not in out.err
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 7}, "--kernel has no meaning without --method fastkv"),
        ({"tsp_rate": 0.2}, "--tsp-rate has no meaning without --method fastkv"),
        ({"max_layer": 5}, "set --min-layer and --max-layer"),
        ({"min_layer": 4, "max_layer": 3}, "in this order"),
        ({"decay": 0.8}, "--decay has no meaning without --criterion answers"),
        ({"count": 8}, "--count has no meaning without --criterion answers"),
        ({"window": 0}, "window must be an integer from 1 to 64"),
        ({"window": 36}, "prompt 1 has 70 tokens; twice the window, 72"),
        ({"weights": "0,0,0"}, "must be above 0"),
        ({"weights": "0.2,0.3,1.5"}, "variance_weight must be a number in [0, 1]"),
        ({"weights": "nan,0.3,0.5"}, "entropy_weight must be a number in [0, 1]"),
        ({"max_prompt_tokens": 15}, "prompt 1 has 15 tokens"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda"),
    ],
)
def test_bad_options_of_calibrate(
    options: dict[str, Any],
    message: str,
    small: Path,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failure(command("calibrate", small, **options), "calibrate", capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"struct_rate": 0}, "struct_rate must be a number in (0, 1]"),
        ({"kv_rate": 1.5}, "kv_rate must be a number in (0, 1]"),
        ({"decay": 0}, "decay must be a number in (0, 1]"),
        ({"kernel": 4}, "kernel must be an odd integer"),
        ({"weights": "0,0,0"}, "must be above 0"),
        ({"pivot": 5}, "use pivot=0 .. pivot=4"),
        ({"pivot": -1}, "pivot must be an integer"),
        ({"prompts": "nothing.jsonl"}, "cannot read prompts"),
        ({"window": 36}, "prompt 1 has 70 tokens; twice the window, 72"),
    ],
)
def test_bad_options_of_diagnose(
    options: dict[str, Any],
    message: str,
    small: Path,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failure(command("diagnose", small, **options), "diagnose", capsys)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["calibrate", "diagnose"])
def test_built_in_prompts_need_a_tokenizer(
    arch: str,
    name: str,
    tmp_path: Path,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = build_model(tmp_path / "bare", arch=arch, layers=2)
    capsys.readouterr()
    line = failure(command(name, bare, prompts=None), name, capsys)
    assert "no tokenizer that loads: give prompt_token_ids to --prompts" in line


@pytest.mark.parametrize("name", ["calibrate", "diagnose"])
def test_where_nothing_can_be_written(
    name: str,
    small: Path,
    tmp_path: Path,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "file"))
    options = {"output": tmp_path / "file"} if name == "diagnose" else {}
    hint = "give --output a directory" if name == "diagnose" else "set KVX_CACHE_ROOT to a dir"
    assert hint in failure(command(name, small, **options), name, capsys)


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["diagnose"],
        ["calibrate", "m", "--method", "snapkv"],
        ["calibrate", "m", "--weights", "0.2,0.3"],
        ["calibrate", "m", "--target", "1.5"],
        ["calibrate", "m", "--criterion", "guess"],
        ["diagnose", "m", "--weights", "0.2,0.3,much"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2 and "error:" in capsys.readouterr().err
