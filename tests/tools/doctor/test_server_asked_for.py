"""What doctor says of the server that was asked for: its model, flags, policy and records."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.wrappers import build
from support.configs import GLM_AIR, planned_kv_cache, vllm_config, write_config
from support.models import LOOKUP
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.engine.shapes import SHAPES
from vllm_kvx import plugin
from vllm_kvx.cache.kv_cache_specs import policy_kv_cache_specs
from vllm_kvx.cache.pool_capacity import pool_tokens
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.layers import save
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.server.validate import identity_of
from vllm_kvx.tools.doctor import asked as asked_for
from vllm_kvx.tools.doctor.findings import Context, Finding, Request
from vllm_kvx.tools.doctor.model_limits import (
    FULL_ALONE,
    NO_POLICY,
    NO_PROPAGATION,
    last_state,
    limits_of,
)
from vllm_kvx.tools.doctor.plan import rows_of
from vllm_kvx.tools.doctor.sizes import GIB, Pool, Sizes
from vllm_kvx.tools.doctor.weights import weights_bytes
from vllm_kvx.tools.experts import Experts

ON_CPU = ("--enforce-eager", "--dtype", "float32") if current_platform.is_cpu() else ()
LAYERS = 8


def lines(found: list[Finding], status: str) -> list[str]:
    return [each.says for each in found if each.status == status]


# The model.


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
    assert "policies serve its text alone" in note.says
    assert lines(asked("model", "flags"), "problem") == []


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


# The flags.


def test_flags_that_are_refused_are_all_named(doctor) -> None:
    flags = ("--enable-prompt-embeds", "--pipeline-parallel-size", "2", *ON_CPU)
    (problem,) = doctor("speed-3", serve_args=flags)("model", "flags")
    assert problem.status == "problem"
    assert problem.says.startswith("KV policy speed-3 cannot run in this configuration:")
    assert "drop --enable-prompt-embeds" in problem.says
    assert "--pipeline-parallel-size 1" in problem.says


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--max-model-len", "many"), "--max-model-len"),
        (("--max-model-len", "9999999"), "vLLM refuses: "),
    ],
)
def test_flags_that_vllm_refuses(doctor, flags: tuple[str, ...], says: str) -> None:
    (problem,) = doctor("speed-4", serve_args=(*flags, *ON_CPU))("model", "flags")
    assert problem.status == "problem" and says in problem.says, problem


def test_two_policies_are_refused_as_the_server_does(doctor) -> None:
    asked = doctor("speed-4", additional_config={"kv_policy": "speed-3"}, serve_args=ON_CPU)
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "name different policies" in problem.says


def test_what_requests_may_name_is_told(doctor) -> None:
    asked = doctor("speed-4", request_policies="list", serve_args=ON_CPU)
    assert lines(asked("model", "flags"), "problem") == []
    assert "requests may name these policies alone: speed-4 (kv_request_policies)" in lines(
        asked("policy"), "ok"
    )
    asked = doctor("speed-4", additional_config={"kv_request_policies": "none"})
    (problem,) = asked("model", "policy")[1:]
    assert problem.status == "problem" and "must be one of off, layout, list" in problem.says


def test_further_policies_are_told(doctor) -> None:
    layout = ("speed-4", "fier-64")
    asked = doctor("full", layout=layout, request_policies="list")
    named = "requests may name these policies alone: full, speed-4, fier-64 (kv_request_policies)"
    assert named in lines(asked("model", "policy"), "ok")
    asked = doctor("full", layout=layout, serve_args=ON_CPU)
    assert lines(asked("model", "flags"), "problem") == []
    assert asked.context.additional_config == {"kv_policy": "full", "kv_layout": list(layout)}
    asked = doctor("full", layout=("speed-4",), additional_config={"kv_layout": ["speed-3"]})
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "name different policies; drop one" in problem.says


def test_flags_in_a_config_file(doctor, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("kv-policy: speed-4\nkv-layout: [fier-64, speed-2]\n")
    asked = doctor(serve_args=("--config", str(file), *ON_CPU))
    assert lines(asked("model", "flags"), "problem") == []
    layout = {"kv_layout": ["fier-64", "speed-2"]}
    assert asked.context.additional_config == {"kv_policy": "speed-4", **layout}


def test_flags_without_a_policy(doctor) -> None:
    asked = doctor(serve_args=("--enable-prompt-embeds", *ON_CPU))
    taken, refused = asked("model", "flags")
    assert taken == Finding("ok", "vLLM takes these flags")
    assert refused.status == "note" and "drop --enable-prompt-embeds" in refused.says


def test_a_policy_that_nobody_reads(doctor, monkeypatch) -> None:
    monkeypatch.setattr(plugin, "is_loaded", lambda: False)
    asked = doctor(additional_config={"kv_policy": "speed-4"}, serve_args=ON_CPU)
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "ignores kv_policy" in problem.says


# The policy.


def test_rows() -> None:
    def rows(name: str, length: int = 1000) -> list[int]:
        policy = parse_policy(name)
        return [rows_of(policy, length, layer, LAYERS) for layer in range(LAYERS)]

    assert rows("full") == [1000] * 8
    assert rows("speed-4:anchors=2") == [1000] * 4 + [3] * 4
    assert rows("speed-4", 2) == [2] * 8
    assert rows("snapkv") == [1000] * 8
    assert rows("swiftkv-6") == [1000] * 6 + [1] * 2
    assert rows("fastkv:tsp_layer=2,tsp_rate=0.3,kv_floor=0") == [1000] * 3 + [300] * 5
    # Selected tokens run again from the first layer.
    assert rows("gemfilter:layer=2,rate=0.1,kv_floor=0") == [1100] * 3 + [100] * 5


@pytest.mark.parametrize("name", ["speed-3", "fier-64", "speed-5+snapkv:kv_rate=0.5"])
def test_the_pool_is_the_servers(tmp_path: Path, name: str) -> None:
    """vLLM forms groups from the worker's specs, and counts blocks; so do we, without either."""
    config = vllm_config(write_config(tmp_path), name, dtype="float32", block_size=32)
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None
    sizes = Sizes.of(Context(Request(), vllm_config=config))
    stock = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    layers: Any = [SimpleNamespace(get_kv_cache_spec=lambda _: stock) for _ in range(LAYERS)]
    policy_kv_cache_specs(layers, settings)
    specs = {f"l.{i}": layer.get_kv_cache_spec(config) for i, layer in enumerate(layers)}
    config.cache_config.kv_cache_layout = "LBHNC"
    planned = planned_kv_cache(config, specs, GIB)
    tokens = pool_tokens(planned, settings, sizes.longest)
    pool = Pool.of(settings.policy, settings.layout, sizes, sizes.longest)
    assert GIB / pool.token_bytes == pytest.approx(tokens.policy, rel=1e-3)
    assert GIB / pool.stock_token_bytes == pytest.approx(tokens.stock, rel=1e-3)


def test_the_policy_is_told(doctor) -> None:
    # No flags were read: what config.json says.
    asked = doctor("speed-3", gpu_memory=1.0, prompt_len=1000)
    told = asked("model", "policy")
    text = "\n".join(lines(told, "ok"))
    assert "speed-3 (propagate): SPEED-K: above the cutoff" in text
    assert "layout on 8 layers: KV groups split at layer 3" in text
    assert "1,000 rows in layers 0-2, 2 rows in layers 3-7" in text
    assert "stages of 3 + 5 layers" in text
    assert "KV pool, an estimate" in text and "of weights (by their files)" in text
    assert any("16-bit entries, since the flags were not read" in n for n in lines(told, "note"))


def test_more_ranks_share_the_memory(doctor) -> None:
    def stock(ranks: int) -> str:
        found = doctor("snapkv:kv_rate=0.2", gpu_memory=1.0, ranks=ranks)("model", "policy")
        (line,) = [each for each in lines(found, "ok") if each.startswith("KV of such")]
        return line.rpartition("stock ")[2]

    one, two = float(stock(1).split()[0]), float(stock(2).split()[0])
    assert one == pytest.approx(2 * two)


def test_no_room_for_the_weights(doctor) -> None:
    found = doctor("snapkv:kv_rate=0.2", gpu_memory=0.001)("model", "policy")
    (problem,) = lines(found, "problem")
    assert problem.startswith("nothing is left for the KV pool")


def test_a_policy_that_does_not_suit_the_model(doctor) -> None:
    (problem,) = lines(doctor("speed-24")("model", "policy"), "problem")
    assert "this model has 8 layers" in problem or "speed-24" in problem


# What was measured.


@pytest.fixture
def key(doctor) -> str:
    """The demo checkpoint's, as a server has it."""
    return EvaluationNotice(identity_of(vllm_config(str(LOOKUP)))).model_key


def test_records_are_looked_for_where_servers_do(doctor, key: str) -> None:
    asked = doctor("snapkv:kv_rate=0.2")
    asked("model")
    assert EvaluationNotice(asked_for.identity_of(asked.context)).model_key == key


def test_layers_that_were_not_measured(doctor, key: str, tmp_path: Path) -> None:
    asked = doctor("fastkv:kv_rate=0.1", serve_args=ON_CPU)
    (taken,) = asked("model", "flags")  # Nothing is measured here, which would take minutes.
    assert taken.status == "ok", taken
    layer, evaluation = asked("measured")
    assert layer.status == "note" and "layer 3 stands in for it" in layer.says
    assert layer.mend.startswith(f"vllm-kvx calibrate {LOOKUP} --method fastkv --window 8")
    # Not of the layer that stands in.
    assert evaluation.mend == f"vllm-kvx evaluate {LOOKUP} --policies fastkv --save"
    record = {"method": "fastkv", "key": key, "layers": 8, "tsp_layer": 5, "criterion": "answers"}
    path = save(record | {"window": 8, "kernel": 7, "tsp_rate": 0.2, "reduction": "max"})
    asked = doctor("fastkv:kv_rate=0.1")
    measured, evaluation = asked("model", "measured")
    found = "tsp_layer=auto is layer 5 with tsp_reduction=max (calibrated"
    assert measured.status == "ok" and found in measured.says
    assert "fastkv:tsp_layer=5,tsp_reduction=max" in evaluation.says
    rates = {"window": 8, "kernel": 7, "tsp_rate": 0.4, "rates": [0.2, 0.4]}
    save(record | rates)
    measured, evaluation = doctor("fastkv:kv_rate=0.1")("model", "measured")
    assert "tsp_layer=auto is layer 5 with tsp_rate=0.4 (calibrated" in measured.says
    assert "fastkv:tsp_layer=5,tsp_rate=0.4" in evaluation.says
    path.write_text("{}")
    found = doctor("fastkv:kv_rate=0.1")("model", "measured")
    assert any("Ignoring calibration" in note for note in lines(found, "note"))


def test_a_layer_that_cannot_be_kept(doctor, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "file"))
    found = doctor("structkv:kv_rate=0.1")("model", "measured")
    assert "pivot=calibrated was not measured" in found[0].says
    assert "Every start of a server measures it, and cannot keep it" in found[0].says


@pytest.mark.parametrize(
    ("value", "says"),
    [("0", "does not start: KVX_CALIBRATION_LIMIT=0"), ("no", "must be a number")],
)
def test_a_layer_that_no_start_measures(doctor, monkeypatch, value: str, says: str) -> None:
    monkeypatch.setenv("KVX_CALIBRATION_LIMIT", value)
    (problem,) = doctor("structkv:kv_rate=0.1").problems("model", "measured")
    assert says in problem.says
    assert problem.mend.startswith(f"vllm-kvx calibrate {LOOKUP} --method structkv")


def test_evaluations_and_tuning(doctor, key: str, tmp_path: Path) -> None:
    kept = {"of_full": [0.9, 0.8, 1.0], "full": 0.9, "n": 10, "lengths": {"1024": [1, 1, 1]}}
    folder = tmp_path / "cache" / "evaluation"
    folder.mkdir(parents=True)
    record = {"key": key, "policies": {"speed-4": {**kept, "date": "2026-01-02"}}}
    (folder / f"{key}.json").write_text(json.dumps(record))
    tuning, evaluation = doctor("speed-4")("model", "measured")
    assert tuning.status == "note"
    assert tuning.mend == f"vllm-kvx tune-speed {LOOKUP} --cutoff 4 --out DIR"
    assert evaluation.status == "ok" and "kept 90.0% [80.0-100.0]" in evaluation.says


@pytest.mark.parametrize("policy", ["speed-4", "snapkv:kv_rate=0.2"])
def test_a_quantized_kv_cache_is_asked_by_its_name(doctor, policy: str) -> None:
    """Also where the flags are refused, as retention's are on CPU."""
    asked = doctor(policy, serve_args=("--kv-cache-dtype", "fp8", *ON_CPU))
    assert bool(asked.problems("model", "flags")) == (policy == "snapkv:kv_rate=0.2")
    *_, found = asked("measured")
    assert f"{policy}@fp8: nobody has measured" in found.says
    assert f"--policies {policy}@fp8 --save" in found.mend


# What `auto` stands for.


def test_auto_is_what_a_server_would_choose(doctor) -> None:
    with_model = doctor("auto:keep=0.9")
    with_model("model")
    chosen, *_ = with_model("policy")
    assert chosen.status == "note"
    assert "auto:keep=0.9: serving fier-2048: nothing was measured of this model" in chosen.says
    assert chosen.mend == f"vllm-kvx recommend {LOOKUP} --keep 0.9"
    (problem,) = doctor("auto", model=None).problems("model", "policy")
    assert problem.says.startswith("auto is chosen by what was measured of a model: no MODEL")


def test_auto_is_chosen_by_the_servers_flags(doctor) -> None:
    asked = doctor("auto", serve_args=(*ON_CPU, "--max-model-len", "1024"))
    asked("torch", "vllm", "gpu", "model")
    (fine,) = asked("flags")
    assert fine.status == "ok" and "--kv-policy fier-2048 runs with them" in fine.says
    chosen, *_ = asked("policy")
    assert "serving fier-2048" in chosen.says
    assert not [each for each in asked("measured") if each.status == "problem"]


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
