"""Layers that skip a quantized KV cache: what is refused beside them, and what the log says."""

from pathlib import Path
from typing import Any

import pytest
from support import cpu_fp8
from support.refused import Connector, changed

from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.cache_dtype import at_dtype, cache_options, dtype_in, split_skipped
from vllm_kvx.server.skipped_layers import FLAG, beside_skipped_layers, line_of

SKIPS = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1", "0"]}
OVER_FP8 = {"dtype": "float32", **SKIPS}


@pytest.fixture(autouse=True)
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_fp8.use(monkeypatch)


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        ("full", ["snapkv:kv_rate=0.2", "criticalkv:kv_rate=0.2", "streamingllm:kv_rate=0.2"]),
        ("fier-64", ["full", "snapkv:kv_rate=0.2+fier-64", "snapkv:kv_rate=0.2,after=8"]),
        ("quest-64", []),
    ],
)
def test_policies_of_one_stage(make_config, caplog, policy: str, layout: list[str]) -> None:
    config = make_config(policy, additional_config={"kv_layout": layout}, **OVER_FP8)
    assert dtype_of_engine(config) == "fp8-skip-0-1"
    assert line_of(config) == (
        "KV cache: fp8, but layers 0, 1 in the model's float32. Answers over it are recorded as "
        "@fp8-skip-0-1."
    )


@pytest.mark.parametrize(
    ("policy", "layout", "told"),
    [
        ("speed-4", [], "speed-4"),
        ("fastkv:tsp_layer=3,kv_rate=0.1", [], "fastkv:tsp_layer=3"),
        ("structkv:pivot=3,kv_rate=0.1", [], "structkv:pivot=3"),
        ("swiftkv-4", [], "swiftkv-4"),
        ("gemfilter:layer=2,rate=0.4", [], "gemfilter:layer=2,rate=0.4"),
        ("pyramidkv:kv_rate=0.2", [], "pyramidkv:kv_rate=0.2"),
        ("fier-64", ["speed-4+fier-64", "snapkv:kv_rate=0.2"], r"speed-4\+fier-64"),
    ],
)
def test_policies_of_several_stages_are_refused(
    make_config, policy: str, layout: list[str], told: str
) -> None:
    with pytest.raises(ValueError, match=rf"- {told}\S* cuts layers into stages, .* drop {FLAG}"):
        make_config(policy, additional_config={"kv_layout": layout}, **OVER_FP8)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("cache_config.kv_cache_dtype_skip_layers", ["0", "8"], "8: no such layer"),
        ("cache_config.kv_cache_dtype_skip_layers", ["sliding_window"], "layers are 0 to 7"),
        ("kv_transfer_config", Connector(), "--kv-transfer-config"),
        ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size"),
    ],
)
def test_each_reason(make_config, path: str, value: Any, told: str) -> None:
    config = make_config("snapkv:kv_rate=0.2", **OVER_FP8)
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None and not beside_skipped_layers(config, settings)
    (problem,) = beside_skipped_layers(changed(config, path, value), settings)
    assert told in problem and FLAG in problem


def test_what_drafts_is_refused(make_config, model_dir) -> None:
    own = {"method": "kvx", "num_speculative_tokens": 2}
    draft_model = own | {"method": "draft_model", "model": model_dir()}
    for drafts, told in ((own, "drafts for itself"), (draft_model, "layers of its own")):
        with pytest.raises(ValueError, match=rf"never tried .*{told}: drop {FLAG}"):
            make_config("fier-64", speculative_config=drafts, **OVER_FP8)
    with pytest.raises(ValueError, match=rf"never tried with lookahead=: drop {FLAG}"):
        make_config("snapkv:kv_rate=0.2,lookahead=8", **OVER_FP8)


def test_windows_beside_full_attention(make_config, model_dir) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    windows = {"layer_types": kinds, "sliding_window": 64, "use_sliding_window": True}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 0}
    mixed = model_dir(**windows, **qwen)
    with pytest.raises(ValueError, match=rf"slide over a window .*: drop {FLAG}"):
        make_config("snapkv:kv_rate=0.2", model=mixed, **OVER_FP8)


def test_nothing_to_skip(make_config) -> None:
    """Without quantization there is one type, whatever layers are named; full alone is stock."""
    config = make_config("speed-4", dtype="float32", kv_cache_dtype_skip_layers=["0", "99"])
    assert dtype_of_engine(config) == "auto" and line_of(config) is None
    assert dtype_of_engine(make_config("full", **OVER_FP8)) == "fp8-skip-0-1"


def test_full_alone(make_config) -> None:
    """Stock vLLM passes over names that no layer has, and records of answers would have them."""
    for unknown in ("8", "sliding_window"):
        skips = {"dtype": "float32"} | SKIPS | {"kv_cache_dtype_skip_layers": ["0", unknown]}
        with pytest.raises(ValueError, match=rf"- {unknown}: no such layer .* out of {FLAG}"):
            make_config("full", **skips)


def test_names() -> None:
    assert at_dtype("fp8_e4m3-skip-0-1") == "@fp8-skip-0-1"
    assert at_dtype("auto-skip-0") == at_dtype("bfloat16") == at_dtype(None) == ""
    assert at_dtype("fp8_e5m2") == "@fp8_e5m2"
    assert split_skipped("fp8-skip-2-sliding_window") == ("fp8", ["2", "sliding_window"])
    assert dtype_in(SKIPS) == "fp8-skip-0-1" and dtype_in({}) is None
    assert dtype_in({"kv_cache_dtype_skip_layers": ["10", "2"]}) == "auto-skip-2-10"
    assert cache_options("fp8-skip-0-1") == SKIPS | {"kv_cache_dtype_skip_layers": ["0", "1"]}
    # Layers that other options name do not skip this one.
    assert SKIPS | cache_options("fp8") == {
        "kv_cache_dtype": "fp8",
        "kv_cache_dtype_skip_layers": [],
    }


def test_doctor_counts_pages_of_both_sizes(make_config, tmp_path: Path) -> None:
    from vllm_kvx.tools.doctor.findings import Context, Request
    from vllm_kvx.tools.doctor.sizes import Sizes

    sizes = Sizes.of(Context(Request(), vllm_config=make_config("snapkv:kv_rate=0.2", **OVER_FP8)))
    assert sizes.page_bytes() * 8 == 2 * sizes.block_size * 2 * 32 * (2 * 4 + 6 * 1)
