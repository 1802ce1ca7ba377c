"""Models that policies run, and what they are refused: by attention, by layers, by decoder."""

from typing import Any

import pytest
from support.refused import Changed, changed, several_engines
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.server.model_checks import WITH_PROPAGATION
from vllm_kvx.server.start_checks import WITH_POLICY, WITH_RETENTION, WITH_SELECTION
from vllm_kvx.server.start_refusal import reasons


def model(kind: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()} | changes


@pytest.mark.parametrize(
    "changes",
    [
        model("Mistral", sliding_window=None),
        model("Qwen2"),
        # Qwen2 checkpoints name a window and do not use it.
        model("Qwen2", sliding_window=64, use_sliding_window=False, max_window_layers=4),
        model("Qwen3", head_dim=32),
        model("Gemma", head_dim=32),
        model("Qwen3Moe", model_type="qwen3_moe", head_dim=32, num_experts=4),
    ],
)
def test_models_that_work(make_config, model_dir, changes: dict) -> None:
    assert make_config("speed-4", model=model_dir(**changes)).scheduler_config.scheduler_cls


PROPAGATION_CASES = [
    ("model_config._model_info.architecture", "TransformersForCausalLM", "--model-impl vllm"),
    ("model_config._model_info.supports_pp", False, "SupportsPP"),
    ("compilation_config.fast_moe_cold_start", True, "fast_moe_cold_start"),
    (
        "attention_config.backend",
        AttentionBackendEnum.HPC_ATTN,
        "--attention-backend to one of FLASH_ATTN, TRITON_ATTN",
    ),
]


@pytest.mark.parametrize(("path", "value", "names"), PROPAGATION_CASES)
def test_what_propagation_needs(stock, path: str, value: Any, names: str) -> None:
    """And retention and retrieval do not."""
    config = Changed(changed(stock, path, value))
    if "architecture" in path:
        config = Changed(stock, model_config=Changed(stock.model_config))
        config.model_config.using_transformers_backend = lambda: True
    (reason,) = reasons(WITH_PROPAGATION, config)
    assert names in reason
    assert not reasons(WITH_POLICY, config)


def test_experts_of_several_engines(stock) -> None:
    config = changed(several_engines(stock, "mp"), "model_config.is_moe", True)
    (reason,) = reasons(WITH_PROPAGATION, config)
    assert "--data-parallel-size 1" in reason and "snapkv" in reason
    assert not reasons(WITH_PROPAGATION, several_engines(stock, "mp"))
    assert not reasons(WITH_POLICY, config)


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        ("fastkv:tsp_layer=3,kv_rate=0.1", []),
        ("structkv:pivot=online,kv_rate=0.1", []),
        ("gemfilter:layer=3,rate=0.4", []),
        ("speed-4", ["fastkv:tsp_layer=3,kv_rate=0.1"]),
        # Requests may name gemfilter:layer=3 there.
        ("speed-4", ["snapkv:kv_rate=0.1"]),
    ],
)
def test_flashinfer_plans_one_pass_a_step(make_config, policy: str, room: list[str]) -> None:
    settings = {"dtype": "float32", "additional_config": {"kv_layout": room}}
    with pytest.raises(ValueError, match=r"FlashInfer holds .* to one of FLASH_ATTN, TRITON_ATTN"):
        make_config(policy, attention_backend="FLASHINFER", **settings)
    for works in ("FLASH_ATTN", "TRITON_ATTN"):
        make_config(policy, attention_backend=works, **settings)


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_rate=0.1", "streamingllm:recent=1020", "speed-4", "swiftkv-4"]
)
def test_flashinfer_where_a_step_is_one_pass(make_config, policy: str) -> None:
    make_config(policy, dtype="float32", attention_backend="FLASHINFER")


def test_rows_where_selected_tokens_run_passes(stock) -> None:
    flashinfer = changed(stock, "attention_config.backend", AttentionBackendEnum.FLASHINFER)
    in_pipeline = changed(stock, "parallel_config.pipeline_parallel_size", 2)
    refused = reasons(WITH_SELECTION, in_pipeline) + reasons(WITH_SELECTION, flashinfer)
    assert refused == [row.reason for row in WITH_SELECTION]
    assert not reasons(WITH_SELECTION, stock)


def test_a_backend_for_full_attention_alone(make_config) -> None:
    by_kind = {"backend_per_kind": {"full_attention": "FLASHINFER"}}
    with pytest.raises(ValueError, match="--attention-backend"):
        make_config("fier-64", dtype="float32", attention_config=by_kind)
    make_config("snapkv:kv_rate=0.1", dtype="float32", attention_config=by_kind)
    other = {"backend_per_kind": {"sliding_window": "FLEX_ATTENTION"}}
    make_config("fier-64", dtype="float32", attention_config=other)


def lines(error: Any) -> list[str]:
    return [line[4:] for line in str(error.value).splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize(
    "policy", ["speed-4", "fastkv:tsp_layer=3,kv_rate=0.1", "snapkv:kv_rate=0.1", "fier-64"]
)
def test_layers_that_store_keys_themselves(make_config, policy: str) -> None:
    """HY-V3's under HPC_ATTN; each policy has one reason, whatever it does."""
    with pytest.raises(ValueError) as error:
        make_config(policy, dtype="float32", attention_backend="HPC_ATTN")
    (line,) = lines(error)
    assert "--attention-backend" in line and "TRITON_ATTN" in line
    make_config("full", attention_backend="HPC_ATTN")


@pytest.mark.parametrize(
    ("policy", "changes", "says"),
    [
        ("speed-4", model("Mistral", sliding_window=64), "--disable-sliding-window"),
        ("snapkv:kv_rate=0.1", model("Mistral", sliding_window=64), "--disable-sliding-window"),
        ("speed-1", model("Gemma2", head_dim=32), "use speed-2 or a higher cut"),
        (
            "fastkv:tsp_layer=4,kv_rate=0.1",
            model("Gemma2", head_dim=32),
            "use tsp_layer=3 or tsp_layer=5",
        ),
        (
            "structkv:pivot=0,kv_rate=0.1",
            model("Gemma2", head_dim=32),
            "layer 0 slides over a window",
        ),
        (
            "structkv:pivot=online,kv_rate=0.1",
            model("Gemma2", head_dim=32),
            "use pivot=calibrated or pivot=",
        ),
        ("gemfilter:layer=2,rate=0.4", model("Gemma2", head_dim=32), "use layer=1 or layer=3"),
        ("selfonly-4", model("Gemma2", head_dim=32), "gemfilter can run, not selfonly-4"),
        ("speed-4+fier-64", model("Gemma2", head_dim=32), "beside nothing that retrieves"),
        ("speed-4+snapkv:kv_rate=0.1", model("Gemma2", head_dim=32), "beside nothing that retains"),
        (
            "fastkv:tsp_layer=3,kv_rate=0.1+quest-64",
            model("Gemma2", head_dim=32),
            "leave retrieval out",
        ),
        (
            "fastkv:tsp_layer=3,kv_rate=1+pyramidkv:kv_rate=0.1",
            model("Gemma2", head_dim=32),
            "pyramidkv divides layers",
        ),
    ],
)
def test_models_that_do_not(make_config, model_dir, policy: str, changes: dict, says: str) -> None:
    with pytest.raises(ValueError) as error:
        make_config(policy, model=model_dir(**changes), dtype="float32")
    assert len(lines(error)) == 1 and says in lines(error)[0]


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_rate=0.1", "fier-64", "fastkv:tsp_layer=3,kv_rate=0.1"]
)
def test_models_that_cap_their_logits(make_config, model_dir, policy: str) -> None:
    capped = model_dir(**model("Gemma2", head_dim=32, layer_types=["full_attention"] * 8))
    make_config(policy, model=capped, dtype="float32")


def test_kv_heads_are_those_of_full_layers(make_config, model_dir) -> None:
    """Gemma 4's layers that slide have others, and heads of another size."""
    gemma4: dict[str, Any] = {"sliding_window": 64, "attention_k_eq_v": True}
    gemma4 |= {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1}
    path = model_dir(**model("Gemma4", model_type="gemma4_text", **gemma4))
    config = make_config("snapkv:kv_rate=0.1", model=path, dtype="float32")
    assert config.model_config.get_total_num_kv_heads() > 1
    (reason,) = reasons(WITH_RETENTION, changed(config, "parallel_config.tensor_parallel_size", 2))
    assert "--tensor-parallel-size to at most the number of KV heads" in reason
    sharing = model_dir(**model("Gemma4", model_type="gemma4_text", num_kv_shared_layers=2))
    with pytest.raises(ValueError, match="num_kv_shared_layers"):
        make_config("snapkv:kv_rate=0.1", model=sharing, dtype="float32")


def test_a_disabled_window_works(make_config, model_dir) -> None:
    directory = model_dir(**model("Mistral", sliding_window=64))
    make_config("speed-4", model=directory, disable_sliding_window=True, max_model_len=64)


def test_the_policy_must_suit_the_model(make_config) -> None:
    with pytest.raises(ValueError, match=r"8 layers; use speed-1 \.\. speed-7"):
        make_config("speed-8")
