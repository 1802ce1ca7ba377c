"""Calibration records: whose they are, where they lie, and which of them a server takes."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import build_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.records.folder import cache_root
from vllm_kvx.records.layers import RESULTS, load, record_path, save
from vllm_kvx.records.model_key import ModelIdentity, model_dir, model_key
from vllm_kvx.server.measured_layers import PAPER_TSP_LAYERS, layer_of

LAYERS = 6
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
}
ROPE = {**LLAMA["rope_scaling"], "rope_theta": 5e5}
MINISTRAL = {
    **LLAMA,
    "rope_scaling": None,
    "rope_theta": 1e8,
    "sliding_window": 32768,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "vocab_size": 131072,
    "head_dim": 128,
}
NEMO = {
    **MINISTRAL,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 14336,
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"), arch="llama", layers=LAYERS, seed=1)


@pytest.fixture
def model(built: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in built.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def config_of(path: Path) -> dict[str, Any]:
    return AutoConfig.from_pretrained(path).to_dict()


SETTINGS = {"criterion": "answers", "window": 8, "kernel": 7, "tsp_rate": 0.2}


def record_for(path: Path, **changes: Any) -> dict[str, Any]:
    key = model_key(config_of(path), path)
    facts = {"method": "fastkv", "key": key, "layers": LAYERS, "tsp_layer": 2}
    return {**facts, **SETTINGS, **changes}


def by_answers(path: Path) -> str:
    return f"calibrated by answers: {path}"


def tsp_layer_of(
    config: dict[str, Any], model: str, layers: int, revision: str | None = None
) -> tuple[int, str] | None:
    found = layer_of(FastKV(), ModelIdentity(model, config, revision), layers)
    return None if found is None else (found.layer, found.source)


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (LLAMA, 15),
        (NEMO, 19),
        ({**LLAMA, "architectures": ["KvxLlamaForCausalLM"]}, 15),
        ({**LLAMA, "head_dim": 128, "rope_theta": None, "rope_scaling": ROPE}, 15),
        ({**NEMO, "rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}, 19),
        # Its attention slides, which is not served.
        (MINISTRAL, None),
        # Llama 3, and others of the same depth and width.
        ({**LLAMA, "rope_scaling": None}, None),
        ({**LLAMA, "intermediate_size": 1}, None),
        ({**LLAMA, "rope_theta": 1e6}, None),
        ({**NEMO, "vocab_size": 32000}, None),
        ({**NEMO, "intermediate_size": 13824}, None),
        ({**NEMO, "head_dim": None}, None),
        ({**NEMO, "rope_theta": 1e4}, None),
        ({**NEMO, "architectures": ["LlamaForCausalLM"]}, None),
        ({**LLAMA, "vocab_size": 32000}, None),
        ({**LLAMA, "hidden_size": 5120}, None),
        ({**LLAMA, "num_key_value_heads": 32}, None),
        ({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}, None),
        ({**LLAMA, "architectures": None}, None),
        ({**NEMO, "num_hidden_layers": 36}, None),
        ({}, None),
    ],
)
def test_the_papers_models_are_told_by_shape(config: dict[str, Any], layer: int | None) -> None:
    expected = None if layer is None else (layer, "the paper's")
    layers = config.get("num_hidden_layers", 32)
    assert tsp_layer_of(config, "/nowhere/at-all", layers) == expected
    # A server may run fewer layers than the configuration has; nobody measured that.
    assert tsp_layer_of(config, "/nowhere/at-all", layers - 1) is None


def test_a_record_is_found_again(model: Path, root: Path) -> None:
    assert tsp_layer_of(config_of(model), str(model), LAYERS) is None
    path = save(record_for(model))
    assert path.parent == root / "calibration" and path.name.startswith("fastkv-")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert tsp_layer_of(config_of(model), str(model), LAYERS) == (
        2,
        by_answers(path),
    )
    save(record_for(model, tsp_layer=4))
    assert tsp_layer_of(config_of(model), str(model), LAYERS) == (
        4,
        by_answers(path),
    )


def test_a_record_wins_over_the_paper() -> None:
    key = model_key(LLAMA, None)
    path = save({"method": "fastkv", "key": key, "layers": 32, "tsp_layer": 11, **SETTINGS})
    assert tsp_layer_of(LLAMA, "/nowhere/at-all", 32) == (11, by_answers(path))


def test_weights_and_shape_are_the_key(model: Path) -> None:
    config = config_of(model)
    save(record_for(model))
    weights = load_file(model / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    # One tensor tuned a little: same names, shapes and size.
    save_file(
        {**weights, name: weights[name] * 1.01}, model / "model.safetensors", {"format": "pt"}
    )
    assert tsp_layer_of(config, str(model), LAYERS) is None
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert tsp_layer_of(config, str(model), LAYERS) is not None
    for change in (
        {"num_hidden_layers": LAYERS + 1},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"architectures": ["MistralForCausalLM"]},
    ):
        assert tsp_layer_of({**config, **change}, str(model), LAYERS) is None, change
    assert tsp_layer_of(config, str(model), LAYERS - 1) is None


def test_the_key_is_the_same_however_a_model_is_written_down(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    config = config_of(model)
    key = model_key(config, model)
    assert key == model_key(raw, model)
    assert key == model_key({**config, "architectures": ["KvxLlamaForCausalLM"]}, model)
    assert key == model_key({**config, "_name_or_path": "elsewhere", "dtype": "bfloat16"}, model)
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "head_dim")}
    old |= {"rope_theta": 10000, "rope_scaling": None, "head_dim": 32}
    assert key == model_key(old, model)
    # Files beside the weights, and the same weights in another form, say nothing.
    (model / "README.md").write_text("tuned!")
    (model / "consolidated.safetensors").write_bytes(b"abc")
    assert key == model_key(config, model)
    assert key != model_key(config, None)
    base = {**LLAMA, "rope_scaling": None}
    yarn = {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4}}
    new = {"rope_parameters": {"rope_type": "yarn", "type": "yarn", "factor": 4.0}}
    new["rope_parameters"]["rope_theta"] = 10000.0
    assert model_key(base | yarn, None) == model_key(base | new | {"rope_theta": None}, None)


def test_the_key_of_sharded_and_other_weights(model: Path) -> None:
    config = config_of(model)
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    empty = model_key(config, model)
    assert empty == model_key(config, None)
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, model / file)
    unlisted = model_key(config, model)
    listed = {name: file for file, part in shards.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert model_key(config, model) == unlisted != empty
    (model / "c.safetensors").write_bytes(b"not of this model")
    assert model_key(config, model) == unlisted
    (model / "a.safetensors").rename(model / "elsewhere")
    assert model_key(config, model) == empty
    (model / "elsewhere").rename(model / "a.safetensors")
    for file in ("model.safetensors.index.json", "a.safetensors", "b.safetensors"):
        (model / file).unlink()
    # A file that is none is told by its bytes.
    broken = model_key(config, model)
    (model / "c.safetensors").write_bytes(b"not of this model!")
    assert len({broken, model_key(config, model), unlisted, empty}) == 4
    (model / "c.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")
    assert model_key(config, model) not in (broken, unlisted, empty)


def test_a_hub_name_is_its_snapshot(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    real = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *args, **kwargs: real(*args, **kwargs, cache_dir=tmp_path / "hub"),
    )
    path = save(record_for(model))
    assert tsp_layer_of(config_of(model), "me/mine", LAYERS) == (
        2,
        by_answers(path),
    )
    assert tsp_layer_of(config_of(model), "me/mine", LAYERS, revision="other") is None
    for name in ("me/other", "no name//at all", str(model / "config.json")):
        assert model_dir(name) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[1]", "not a JSON object"),
        ("\xff\xfe", "Expecting"),
        ({"key": "0" * 32}, "key"),
        ({"method": "structkv"}, "method"),
        ({"layers": LAYERS + 1}, "layers"),
        ({"tsp_layer": LAYERS}, "tsp_layer"),
        ({"tsp_layer": -1}, "tsp_layer"),
        ({"tsp_layer": "2"}, "tsp_layer"),
        ({"tsp_layer": None}, "tsp_layer"),
        (
            {"criterion": None},
            "its criterion is None, not one of answers, paper: it is",
        ),
        ({"criterion": "guess"}, "its criterion is 'guess'"),
        ({"window": 16}, "its window is 16, wanted is 8"),
        ({"reduction": "mean"}, "its reduction is 'mean', not one of sum, max"),
        ({"kernel": None}, "its kernel is None, wanted is 7"),
        ({"tsp_rate": 0.3, "criterion": "paper"}, "its tsp_rate is 0.3, wanted is 0.2"),
    ],
)
def test_records_of_no_use_are_ignored_with_a_warning(
    model: Path, text: str | dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = record_for(model)
    path = save(good)
    path.write_text(text if isinstance(text, str) else json.dumps(good | text))
    # vLLM, where something has imported it, keeps its log to itself, and some of it from everyone.
    caplog.set_level(logging.WARNING, "vllm.kvx.calibration")
    logging.getLogger("vllm.kvx.calibration").addHandler(caplog.handler)
    try:
        assert load(FastKV(), good["key"], LAYERS) is None
    finally:
        logging.getLogger("vllm.kvx.calibration").removeHandler(caplog.handler)
    assert reason in caplog.text and str(path) in caplog.text and "delete it" in caplog.text
    assert tsp_layer_of(config_of(model), str(model), LAYERS) is None


def test_a_policys_own_reduction_is_kept(model: Path) -> None:
    """The default takes the record's; another one wants a record of its own."""
    config = config_of(model)
    for stored, expected in (("sum", ("sum", None)), ("max", ("max", "max"))):
        path = save(record_for(model, reduction=stored))
        for policy, reduction in zip(
            (FastKV(), FastKV(tsp_reduction="max")), expected, strict=True
        ):
            found = layer_of(policy, ModelIdentity(str(model), config), LAYERS)
            wanted = None if reduction is None else (2, by_answers(path), reduction, None)
            assert found == wanted


def test_a_rate_that_is_left_open_is_the_records(model: Path) -> None:
    """If it was searched for with the layer, or is the usual one; one that is given is kept."""
    config = config_of(model)

    def found(policy: FastKV) -> tuple[int, float | None] | None:
        each = layer_of(policy, ModelIdentity(str(model), config), LAYERS)
        return None if each is None else (each.layer, each.rate)

    given = FastKV(tsp_rate=0.4), FastKV(tsp_rate=0.2)
    # As earlier versions stored them: for one rate, which a policy had to have.
    save(record_for(model))
    assert [found(each) for each in (FastKV(), *given)] == [(2, None), None, (2, None)]
    save(record_for(model, tsp_rate=0.4))
    assert [found(each) for each in (FastKV(), *given)] == [None, (2, 0.4), None]
    save(record_for(model, tsp_rate=0.4, rates=[0.2, 0.3, 0.4]))
    assert [found(each) for each in (FastKV(), *given)] == [(2, 0.4), (2, 0.4), None]
    save(record_for(model, tsp_rate=0.2, rates=[0.2, 0.3, 0.4]))
    assert [found(each) for each in (FastKV(), *given)] == [(2, None), None, (2, None)]
    path = save(record_for(model, rates=[0.2, 0.3]))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tsp_rate": 1.5}))
    assert found(FastKV()) is None


def test_nothing_stored_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    assert load(FastKV(), "0" * 32, LAYERS) is None
    assert not caplog.text


def test_only_what_loads_is_saved(model: Path, root: Path) -> None:
    for wrong in ({"tsp_layer": LAYERS}, {"layers": None}, {"method": "speed"}, {"criterion": ""}):
        with pytest.raises(ValueError):
            save(record_for(model, **wrong))
    with pytest.raises(TypeError):
        save(record_for(model, note=object()))
    assert not list(root.glob("calibration/*"))


def test_where_records_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path))
    assert record_path("fastkv", "ab") == tmp_path / "calibration" / "fastkv-ab.json"
    monkeypatch.delenv("KVX_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "vllm-kvx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "vllm-kvx"


def test_neither_vllm_nor_torch_is_imported() -> None:
    """By the part that a server uses: it resolves layers in the API process."""
    code = "import sys, vllm_kvx.server.measured_layers; print({'vllm', 'torch'} & {*sys.modules})"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert ran.stdout.strip() == "set()", ran.stderr


def test_the_table_names_what_calibration_finds() -> None:
    assert all(
        paper.tsp_layer < paper.shape["num_hidden_layers"] // 2 for paper in PAPER_TSP_LAYERS
    )
    assert RESULTS == {"fastkv": "tsp_layer", "structkv": "pivot"}
