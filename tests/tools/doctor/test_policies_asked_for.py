"""What doctor says of the policy that a server would run, and what was measured of it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import cpu_fp8
from support.configs import planned_kv_cache, vllm_config, write_config
from support.findings import ON_CPU, lines
from support.models import LOOKUP
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvx.cache.kv_cache_specs import policy_kv_cache_specs
from vllm_kvx.cache.pool_capacity import pool_tokens
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.ops.retrieval import one_launch
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import recommendation
from vllm_kvx.records.layers import save
from vllm_kvx.server import auto_policy
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.server.validate import identity_of
from vllm_kvx.tools.doctor import asked as asked_for
from vllm_kvx.tools.doctor.findings import Context, Request
from vllm_kvx.tools.doctor.plan import rows_of
from vllm_kvx.tools.doctor.reads import reads
from vllm_kvx.tools.doctor.sizes import GIB, Pool, Sizes

LAYERS = 8


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


def test_from_where_on_a_server_retrieves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its worker says: of one request earlier where one launch does a layer of so long ones."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    model = write_config(tmp_path, **heads, head_dim=128, max_position_embeddings=32768)
    config = vllm_config(model, "fier-2048", dtype="float32", block_size=32, max_model_len=32768)
    config.model_config.dtype = torch.bfloat16  # As a GPU would have it.
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4]
    context = Context(Request(), ops=("cuda", "it is built"), vllm_config=config)
    sizes, policy = Sizes.of(context), parse_policy("fier-2048")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    longest: list[tuple[Any, ...]] = []

    def longest_of(*asked: Any) -> tuple[int, int, tuple[int, ...]]:
        longest.append(asked)
        return 132, 16, (40_000, 32_768, 32_768, 32_767)

    monkeypatch.setattr(one_launch, "longest_of", longest_of)
    own = "from 16384 tokens on, from 12288 in a step of its own, from "
    (found,) = reads(context, policy, sizes)
    assert found.status == "ok" and own in found.says
    assert longest == [(32, 8, 128, config.scheduler_config.max_num_seqs, torch.device("cuda"))]
    three = f"{policy} reads parts of contexts from 16384 tokens on, from "
    for name in ("fier-2048:reduction=sum", "fier-2048:reuse_layers=2", "quest-2048"):
        (found,) = reads(context, parse_policy(name), sizes)
        assert "in a step of its own" not in found.says
    (found,) = reads(context, policy, replace(sizes, kv_heads=1))
    assert "in a step of its own" not in found.says
    for other in ("fp8", "int8_per_token_head", "float16"):
        with monkeypatch.context() as changed:
            changed.setattr(config.cache_config, "cache_dtype", other)
            (found,) = reads(context, policy, Sizes.of(context))
            assert "in a step of its own" not in found.says
    monkeypatch.setattr(config.model_config.hf_text_config, "attn_logit_softcapping", 50.0, False)
    (found,) = reads(context, policy, sizes)
    assert "in a step of its own" not in found.says
    monkeypatch.setattr(config.model_config.hf_text_config, "attn_logit_softcapping", None)
    monkeypatch.setenv(one_launch.VARIABLE, "0")
    (found,) = reads(context, policy, sizes)
    assert found.says.startswith(three) and "in a step of its own" not in found.says
    assert len(longest) == 1
    # One request replays a graph for eight, which takes three launches.
    monkeypatch.delenv(one_launch.VARIABLE)
    config.compilation_config.cudagraph_capture_sizes = [8]
    (found,) = reads(context, policy, sizes)
    assert "in a step of its own" not in found.says and len(longest) == 2


def test_many_groups_are_told(doctor, tmp_path: Path) -> None:
    """A layer between two cuts makes groups of one layer."""
    model = write_config(tmp_path, num_hidden_layers=12)
    near = "fastkv:tsp_layer=6,tsp_rate=0.4,kv_rate=0.4"
    asked = doctor("speed-8:tail=2", layout=(near,), model=model, gpu_memory=1.0)
    (many,) = [each for each in asked("model", "policy") if "KV groups of 1 layers" in each.says]
    assert many.status == "note"
    assert many.mend == "have policies cut the model at the same layers, or several layers apart"
    asked = doctor("speed-8:tail=2", model=model, gpu_memory=1.0)
    assert any("2 + 1 KV groups of 4 layers" in n for n in lines(asked("model", "policy"), "ok"))


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


def test_auto_is_what_a_server_would_choose(doctor) -> None:
    with_model = doctor("auto:keep=0.9")
    with_model("model")
    chosen, *_ = with_model("policy")
    assert chosen.status == "note"
    assert "auto:keep=0.9: serving fier-4096: nothing was measured of this model" in chosen.says
    assert chosen.mend == f"vllm-kvx recommend {LOOKUP} --keep 0.9"
    (problem,) = doctor("auto", model=None).problems("model", "policy")
    assert problem.says.startswith("auto is chosen by what was measured of a model: no MODEL")


def test_auto_is_chosen_by_the_servers_flags(doctor) -> None:
    asked = doctor("auto", serve_args=(*ON_CPU, "--max-model-len", "1024"))
    asked("torch", "vllm", "gpu", "model")
    (fine,) = asked("flags")
    assert fine.status == "ok" and "--kv-policy fier-4096 runs with them" in fine.says
    chosen, *_ = asked("policy")
    assert "serving fier-4096" in chosen.says
    assert not [each for each in asked("measured") if each.status == "problem"]


@pytest.mark.skipif(not ON_CPU, reason="the fp8 cache is a stand-in of CPUs")
def test_auto_is_chosen_by_the_layers_that_skip_a_cache(doctor, monkeypatch) -> None:
    cpu_fp8.use(monkeypatch)
    named = []
    load = recommendation.load

    def noted(key: str, kv_cache_dtype: str = "", *more: Any) -> Any:
        named.append(kv_cache_dtype)
        return load(key, kv_cache_dtype, *more)

    monkeypatch.setattr(auto_policy, "load", noted)
    flags = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "1", "0")
    asked = doctor("auto", serve_args=(*ON_CPU, *flags))
    (fine,) = asked("torch", "vllm", "gpu", "model", "flags")
    assert fine.status == "ok", fine
    assert named and set(named) == {"fp8-skip-0-1"}
