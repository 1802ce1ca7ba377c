"""What doctor says of the model that a server would serve."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from reference.wrappers import build
from support.configs import GLM_AIR, write_config
from support.findings import ON_CPU, lines
from support.models import LOOKUP

from benchmarks.engine.shapes import SHAPES
from vllm_kvx.tools.doctor.model_limits import (
    FULL_ALONE,
    NO_POLICY,
    NO_PROPAGATION,
    last_state,
    limits_of,
)
from vllm_kvx.tools.doctor.weights import weights_bytes
from vllm_kvx.tools.experts import Experts


def test_a_model_that_is_not_there(doctor) -> None:
    asked = doctor("speed-4", model="nobody/nothing")
    (problem,) = asked("model")
    assert problem.status == "problem"
    assert problem.mend.startswith("hf download nobody/nothing config.json")
    assert [each.status for each in asked("flags")] == ["note"]
    assert "layout is not told: nobody/nothing was not found" in asked("policy")[-1].says
    assert [each.status for each in asked("measured")] == ["note"]


def test_a_hubs_model_in_the_cache(doctor, tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(LOOKUP)
    refs = tmp_path / "hub" / "models--me--mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    real = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *args, **kwargs: real(*args, **kwargs, cache_dir=tmp_path / "hub"),
    )
    asked = doctor("speed-4", model="me/mine", serve_args=ON_CPU)
    assert lines(asked("model"), "ok")[0] == f"me/mine, in {snapshot}"
    assert [each.status for each in asked("flags")] == ["ok"]
    # Commands name the model as the user does.
    assert asked("measured")[0].mend == "vllm-kvx tune-speed me/mine --cutoff 4 --out DIR"


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_model_without_a_readable_configuration(doctor, tmp_path: Path, text) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    (problem,) = doctor("speed-4", model=tmp_path)("model")
    assert problem.status == "problem" and "config.json cannot be read" in problem.says


def test_no_model_and_no_policy(doctor) -> None:
    asked = doctor(model=None)
    for name in ("model", "flags", "policy", "measured"):
        assert [each.status for each in asked(name)] == ["note"]


def test_a_model_that_policies_do_not_run(doctor, tmp_path: Path) -> None:
    write_config(
        tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=8
    )
    asked = doctor("speed-4", model=tmp_path, serve_args=ON_CPU)
    (note,) = (each for each in asked("model") if "slides" in each.says)
    assert note.says == "MistralForCausalLM: every layer's attention slides over a window"
    assert note.mend == "name full alone"
    (problem,) = asked("flags")
    # The server's own words.
    assert "every layer of this model slides over a window" in problem.says


KINDS = ["sliding_attention", "full_attention"] * 2
STATES = ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("architecture", "fields", "remain"),
    [
        ("LlamaForCausalLM", {}, []),
        ("DeepseekV2ForCausalLM", {"kv_lora_rank": 64}, [FULL_ALONE]),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 1, "layer_types": KINDS}, [FULL_ALONE]),
        (
            "Gemma3nForCausalLM",
            {"num_kv_shared_layers": 0, "layer_types": KINDS, "sliding_window": 64},
            [NO_PROPAGATION, NO_PROPAGATION],
        ),
        ("SolarForCausalLM", {"bskcn_tv": [0.9, 0.8]}, [NO_PROPAGATION]),
        ("ChatGLMModel", {"multi_query_group_num": 2}, [NO_PROPAGATION]),
        ("BertModel", {}, [NO_POLICY]),
        ("Qwen3NextForCausalLM", {"layer_types": STATES}, [NO_PROPAGATION]),
    ],
)
def test_what_remains_by_a_configuration(
    architecture: str, fields: dict[str, Any], remain: list[str]
) -> None:
    found = list(limits_of(architecture, fields))
    assert [each.remain for each in found] == remain
    if fields.get("layer_types") is STATES:
        assert "layer 2: tokens could leave in the 1 layer above it alone" in found[0].reason


def test_a_model_whose_attention_caps_its_logits(doctor, tmp_path: Path) -> None:
    write_config(
        tmp_path,
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        layer_types=["full_attention"] * 8,
    )
    for policy in ("fier-64", "snapkv:kv_rate=0.2", "speed-4"):
        asked = doctor(policy, model=tmp_path, serve_args=ON_CPU)
        assert lines(asked("model", "flags"), "problem") == []


def test_a_hybrid_says_what_share_of_its_kv_a_policy_can_save(doctor, tmp_path: Path) -> None:
    write_config(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 2,
        sliding_window=64,
        head_dim=64,
    )
    policy = "snapkv:kv_rate=0.25,kv_floor=0"
    asked = doctor(policy, model=tmp_path, serve_args=ON_CPU, prompt_len=1024, gpu_memory=8)
    found = [each.says for each in asked("model", "flags", "policy")]
    assert any(line.startswith("layout on 2 policy layers: ") for line in found)
    # 2 x 1,024 entries against 6 x 64; a quarter of the first is kept.
    assert any("in 2 of 8 layers, which hold 84% of the KV of 1,024" in line for line in found)
    assert any("keeps 25% there saves 63% of it" in line for line in found)
    # The pool counts the same: (2048 + 384) / (512 + 384).
    assert any(f"{(2048 + 384) / (512 + 384):.2f}x" in line for line in found)
    # Above a cut the layers that slide are in stages of their own: of 1,024 tokens 64 go on.
    policy = "speed-4:anchors=0,tail=64"
    asked = doctor(policy, model=tmp_path, serve_args=ON_CPU, prompt_len=1024, gpu_memory=8)
    found = [each.says for each in asked("model", "flags", "policy")]
    groups = "stages of 1 + 1 + 3 + 3 layers in 1 + 1 + 3 + 3 KV groups of 1 layers, 0 padding"
    assert any(f"{groups} layers; the last 2 of these" in line for line in found)
    assert any(f"{(2048 + 384) / (1024 + 64 + 384):.2f}x" in line for line in found)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's code of it imports that")
def test_a_model_that_also_reads_images(doctor, tmp_path: Path) -> None:
    build(tmp_path, "qwen3_vl")
    asked = doctor("speed-4", model=tmp_path, serve_args=ON_CPU)
    found = asked("model")
    assert any("Qwen3VLForConditionalGeneration of 8 layers: every" in each.says for each in found)
    (note,) = (each for each in found if "images" in each.says)
    assert "only retain or retrieve take them" in note.says
    found = asked("model", "flags")
    assert lines(found, "problem") == []
    assert any("drop them from the KV policy" in line for line in lines(found, "note"))
    asked = doctor("snapkv:kv_rate=0.2", model=tmp_path, serve_args=ON_CPU)
    assert any(
        "images, audio and video are served" in each.says for each in asked("model", "flags")
    )


def test_nothing_is_measured_where_layers_are_unknown(doctor, tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_embd": 64, "n_head": 2}))
    asked = doctor("fastkv:kv_rate=0.1", model=tmp_path, serve_args=ON_CPU)
    assert any("no num_hidden_layers" in line for line in lines(asked("model"), "note"))
    assert "layout is not told" in asked("policy")[-1].says


def test_weights_are_estimated(tmp_path: Path) -> None:
    config = json.loads((LOOKUP / "config.json").read_text())
    files = sum(path.stat().st_size for path in LOOKUP.glob("*.safetensors"))
    stored = {"float32": 4, "bfloat16": 2}[config.get("dtype") or config["torch_dtype"]]
    size, how = weights_bytes(LOOKUP, config, stored)
    assert (size, how) == (files, "by their files")
    assert weights_bytes(LOOKUP, config, 2 * stored)[0] == 2 * files
    counted, how = weights_bytes(tmp_path, config, stored)
    assert how == "counted from the configuration" and counted == pytest.approx(files, rel=0.02)
    index = {"metadata": {"total_size": 1000}, "weight_map": {"a": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_bytes(tmp_path, config, stored) == (1000, "by their index")


def test_weights_of_experts_and_of_quantized_models(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, 30.5 billion weights, and GLM-4.5-Air, 106 billion with its last layer."""
    qwen = SHAPES["qwen3-30b-a3b"].config()
    assert weights_bytes(tmp_path, qwen, 2)[0] / 2 == pytest.approx(30.53e9, rel=2e-3)
    tables = 2 * 151936 * 2048
    in_fp8, _ = weights_bytes(tmp_path, qwen, 2, "fp8_per_tensor")
    assert in_fp8 == pytest.approx(30.53e9 + tables, rel=2e-3)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert weights_bytes(tmp_path, qwen | {"quantization_config": blocks}, 2)[0] == in_fp8
    for quantized in (
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
        },
    ):
        found, _ = weights_bytes(tmp_path, qwen | {"quantization_config": quantized}, 2)
        assert found == pytest.approx((30.53e9 - tables) / 2 + 2 * tables, rel=2e-3), quantized
    assert Experts.of(GLM_AIR) == Experts(128, 8, 1408, shared=1408, dense_layers=1)
    assert weights_bytes(tmp_path, GLM_AIR, 2)[0] / 2 == pytest.approx(106.8e9, rel=0.01)
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}
    assert Experts.of(mixtral) == Experts(8, 2, 14336)
    assert Experts.of({"intermediate_size": 14336, "num_experts": 0}) is None


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["full_attention"] * 3, ""),
        (
            ["conv", "full_attention", "full_attention"],
            "layer 0: tokens could leave in the 2 layers",
        ),
        # What holds nothing of a prompt keeps no state either.
        (["mamba", "mlp", "attention", "mamba", "mlp"], "layer 3: tokens could leave in the 1"),
        (["full_attention", "conv"], "layer 1: tokens could leave nowhere"),
    ],
)
def test_where_tokens_could_leave(kinds: list[str], said: str) -> None:
    found = last_state(kinds)
    assert said in found and bool(said) == bool(found)
