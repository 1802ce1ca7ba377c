"""What servers that retain are refused: types, windows, layers, the stash, KV connectors."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import GLM_AIR
from support.refused import Connector, ThroughHost, changed
from vllm.logger import init_logger

from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.server.connector_checks import WITHOUT_WHOLE_PROMPTS
from vllm_kvx.server.start_checks import WITH_RETENTION
from vllm_kvx.server.start_refusal import reasons


def compressed(strategy: str) -> dict[str, Any]:
    """A config.json's entry of weights that llm-compressor left as they are, with an fp8 cache."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme | {"symmetric": True},
    }


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_rate=0.1", "fier-64", "fastkv:tsp_layer=3,kv_rate=0.1"]
)
def test_scales_by_head_are_refused(make_config, model_dir, policy: str) -> None:
    by_head = model_dir(quantization_config=compressed("attn_head"))
    for dtype in ("auto", "fp8"):
        with pytest.raises(ValueError, match=r"scales for each KV head .* --kv-cache-dtype bfloat"):
            make_config(policy, model=by_head, kv_cache_dtype=dtype)
    # No layer's entries are looked up.
    make_config("speed-4", model=by_head)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3", "bfloat16"])
def test_the_checkpoints_own_kv_cache_dtype_is_known(make_config, model_dir, dtype: str) -> None:
    scaled = model_dir(quantization_config=compressed("tensor"))
    found = dtype_of_engine(make_config("speed-4", model=scaled, kv_cache_dtype=dtype))
    assert found == ("fp8" if dtype == "auto" else dtype)
    assert dtype_of_engine(make_config("speed-4")) == "auto"


def test_scales_that_are_not_used_or_one_a_layer(stock) -> None:
    def says_head(strategy: str, dtype: str) -> bool:
        scheme = SimpleNamespace(kv_cache_scheme={"strategy": strategy})
        config = changed(changed(stock, "quant_config", scheme), "cache_config.cache_dtype", dtype)
        return any("attn_head" in reason for reason in reasons(WITH_RETENTION, config))

    assert says_head("attn_head", "auto") and says_head("attn_head", "fp8_e5m2")
    assert not says_head("attn_head", "bfloat16") and not says_head("tensor", "fp8")


@pytest.mark.parametrize(
    ("policy", "settings", "names"),
    [
        ("snapkv:kv_rate=0.1", {"dtype": "bfloat16"}, "--dtype float32"),
        (
            "snapkv:kv_rate=0.1,window=40",
            {"max_num_batched_tokens": 32},
            "window of 40 .* to at most 32",
        ),
        (
            "snapkv:kv_rate=0.2,window=8,after=32+fier-64",
            {"max_num_batched_tokens": 32},
            "window of 40 .* window=, and after= or lookahead= with it, to at most 32",
        ),
        (
            "fastkv:kv_rate=0.1",
            {},
            r"fastkv: tsp_layer .* \(its weights are dummies\): write tsp_layer=<int>",
        ),
        ("fastkv:tsp_layer=8,kv_rate=0.1", {}, "8 layers; use tsp_layer=0 .. tsp_layer=7"),
    ],
)
def test_what_retention_cannot_do(make_config, policy: str, settings: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make_config(policy, **{"dtype": "float32"} | settings)


@pytest.mark.parametrize("policy", ["fastkv:kv_rate=0.1", "structkv:kv_rate=0.1"])
def test_a_layer_that_calibrate_cannot_measure(make_config, model_dir, policy: str) -> None:
    """No advice to run what cannot work: it loads few architectures, and none that wraps one."""
    glm = model_dir(**GLM_AIR, num_nextn_predict_layers=0)
    with pytest.raises(ValueError) as refused:
        make_config(policy, model=glm, dtype="float32")
    said = str(refused.value)
    assert "cannot measure it (architecture: Glm4MoeForCausalLM): write " in said
    assert "=<int>" in said and "beforehand" not in said


def test_chunks_shorter_than_a_window_are_warned_of(make_config, monkeypatch) -> None:
    lines: list[str] = []
    logger = init_logger("vllm.kvx")
    monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
    for threshold in (0, 8, 7):
        make_config(
            "snapkv:kv_rate=0.1,window=8", dtype="float32", long_prefill_token_threshold=threshold
        )
        warned = [line for line in lines if "token-threshold" in line]
        assert bool(warned) == (threshold == 7)
    assert "threshold 7 cuts" in warned[0] and "set it to at least 8" in warned[0]


def test_the_stash_must_hold_the_longest_prompt(make_config) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
    small = {"kv_stash_tokens": 511}
    with pytest.raises(ValueError, match=r"kv_stash_tokens .* at least --max-model-len, 512"):
        make_config("fastkv:tsp_layer=3,kv_rate=0.1", additional_config=small, **options)
    make_config(
        "fastkv:tsp_layer=3,kv_rate=0.1", additional_config={"kv_stash_tokens": 512}, **options
    )


def test_a_known_tsp_layer_goes_to_all_processes(make_config, monkeypatch) -> None:
    from vllm_kvx.server import measured_layers as resolve

    monkeypatch.setattr(resolve, "layer_of", lambda *_: resolve.Found(5, "measured"))
    config = make_config("fastkv:kv_rate=0.1", dtype="float32")
    assert config.additional_config == {
        "kv_policy": "fastkv:kv_rate=0.1",
        "kv_measured": {"tsp_layer": 5},
    }
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None
    assert str(settings.policy) == "fastkv:tsp_layer=5" == str(settings.parse("fastkv:kv_rate=0.1"))
    assert settings.layout.later_starts == (6,)


def test_rows_of_what_is_kept(stock) -> None:
    """Where vLLM's own configuration would check the values, too."""
    on_gpu = changed(stock, "device_config.device_type", "cuda")
    nixl = ThroughHost()
    nixl.kv_buffer_device = "cuda"
    assert not reasons(WITHOUT_WHOLE_PROMPTS, changed(on_gpu, "kv_transfer_config", nixl))
    refused = []
    for connector, says in (
        (Connector(), "name it as kv_connector"),
        (ThroughHost(bidirectional_kv_xfer=True), "drop bidirectional_kv_xfer"),
        (ThroughHost(), "drop kv_buffer_device"),
        (ThroughHost(enforce_handshake_compat=False), "drop enforce_handshake_compat"),
    ):
        if says != "drop kv_buffer_device":
            connector.kv_buffer_device = "cuda"
        config = changed(on_gpu, "kv_transfer_config", connector)
        (found,) = reasons(WITHOUT_WHOLE_PROMPTS, config)
        assert says in found
        refused.append(found)
    masks = changed(on_gpu, "model_config.return_sampling_mask", True)
    (found,) = reasons(WITHOUT_WHOLE_PROMPTS, changed(masks, "kv_transfer_config", nixl))
    assert "drop --return-sampling-mask" in found
    refused.append(found)
    assert refused == [row.reason for row in WITHOUT_WHOLE_PROMPTS], "a row without a case"
