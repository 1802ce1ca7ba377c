"""A KV cache of 8-bit integers with scales: which policies run over it, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.int8 import NAME
from support.refused import Connector, changed, drafted_by, lines_of
from vllm import platforms
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from vllm_kvx.cache.kv_cache_specs import policy_kv_cache_specs
from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.cache_dtype import at_dtype, why_not_over
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.int8_cache import FULL_OVER_INT8, OVER_INT8
from vllm_kvx.server.start_refusal import reasons
from vllm_kvx.tools.doctor.findings import Context, Request
from vllm_kvx.tools.doctor.sizes import Pool, Sizes
from vllm_kvx.worker.int8_cache.backend import Int8AttentionBackend

OVER = {"dtype": "float32", "kv_cache_dtype": NAME}


@pytest.mark.parametrize(
    ("policy", "layout"),
    [("fier-64", []), ("full", ["quest-64"]), ("fier-64:reuse_layers=2", ["full"])],
)
def test_policies_that_run(make_config, policy: str, layout: list[str]) -> None:
    config = make_config(policy, additional_config={"kv_layout": layout}, **OVER)
    assert at_dtype(dtype_of_engine(config)) == f"@{NAME}"


@pytest.mark.parametrize(
    "policy",
    ["snapkv:kv_rate=0.2", "speed-4", "swiftkv-4", "knorm:kv_rate=0.2", "streamingllm:kv_rate=0.2"],
)
def test_policies_that_do_not(make_config, policy: str) -> None:
    for name, layout in ((policy, []), ("fier-64", [policy])):
        with pytest.raises(ValueError, match=rf"- {policy}\S* drops or moves entries, .*: serve"):
            make_config(name, additional_config={"kv_layout": layout}, **OVER)
    beside = f"{policy}+fier-64"
    assert why_not_over(NAME, parse_policy(beside)) == why_not_over(NAME, parse_policy(policy))
    assert why_not_over(f"{NAME}-skip-0-1", parse_policy(policy)) is not None
    assert why_not_over("fp8", parse_policy(policy)) is None
    assert why_not_over(NAME, parse_policy("fier-64")) is None


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("kv_transfer_config", Connector(), "--kv-transfer-config"),
        ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size 1"),
        ("speculative_config", drafted_by("ngram"), "--speculative-config"),
        ("cache_config.kv_cache_dtype_skip_layers", ["0"], "--kv-cache-dtype-skip-layers"),
    ],
)
def test_each_reason(make_config, path: str, value: Any, told: str) -> None:
    config = make_config("fier-64", **OVER)
    assert not reasons(OVER_INT8, config)
    (reason,) = reasons(OVER_INT8, changed(config, path, value))
    assert told in reason and "\n" not in reason


def test_what_depends_on_the_batch_or_another_backend(make_config, monkeypatch) -> None:
    (line,) = lines_of(make_config, "fier-64", kv_cache_dtype=NAME, attention_backend="TRITON_ATTN")
    assert "drop --attention-backend" in line
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert any(
        "VLLM_BATCH_INVARIANT" in line
        for line in lines_of(make_config, "fier-64", kv_cache_dtype=NAME)
    )


@pytest.mark.parametrize(("capability", "is_served"), [((7, 5), False), ((8, 0), True)])
def test_older_gpus(make_config, monkeypatch, capability: tuple[int, int], is_served: bool) -> None:
    config = make_config("fier-64", **OVER)
    monkeypatch.setattr(
        platforms.current_platform,
        "get_device_capability",
        lambda device_id=0: DeviceCapability(*capability),
    )
    assert Int8AttentionBackend.supports_compute_capability(DeviceCapability(*capability)) == (
        is_served
    )
    found = reasons(OVER_INT8, config)
    if is_served:
        assert not found
        return
    assert len(found) == 1 and "capability 8.0 or later" in found[0] and "\n" not in found[0]
    assert found[0].endswith("set another --kv-cache-dtype")


def test_windows_beside_full_attention(make_config, model_dir) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    windows = {"layer_types": kinds, "sliding_window": 64, "use_sliding_window": True}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 0}
    mixed = model_dir(**windows, **qwen)
    with pytest.raises(ValueError, match=r"slide over a window .*: set another --kv-cache-dtype"):
        make_config("fier-64", model=mixed, **OVER)


def test_full_alone_is_vllms_own(make_config) -> None:
    """Which has no such cache on a CPU."""
    with pytest.raises(ValueError, match="CPU attention has no KV cache of int8_per_token_head"):
        make_config("full", **OVER)
    assert not reasons(FULL_OVER_INT8, make_config("full", dtype="float32"))


def test_pages_and_what_doctor_counts(make_config) -> None:
    """Entries of a byte, 1-bit keys, and two scales an entry, which vLLM's own pages have, too."""
    config = make_config("fier-64", **OVER)
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None
    sizes = Sizes.of(Context(Request(), vllm_config=config))
    heads, dim, block = sizes.kv_heads, sizes.head_dim, sizes.block_size
    stock = FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=dim,
        dtype=torch.int8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
    )
    layers: list[Any] = [SimpleNamespace(get_kv_cache_spec=lambda _: stock) for _ in range(8)]
    policy_kv_cache_specs(layers, settings)
    ours = layers[0].get_kv_cache_spec(config)
    entries, scales = block * heads * 2 * dim, block * heads * 2 * 4
    codes = heads * (block * dim // 8 + block // 32 * 2 * dim * 2)
    assert ours.unpadded_page_size_bytes == entries
    assert ours.page_size_bytes == entries + codes + scales
    assert sizes.page_bytes() == entries + scales
    pool = Pool.of(settings.policy, settings.layout, sizes, 10_000)
    assert pool.token_bytes == pytest.approx(8 * ours.page_size_bytes / block, rel=1e-2)
    assert pool.stock_token_bytes == pytest.approx(8 * (entries + scales) / block, rel=1e-2)
    # Two of eight layers in float32.
    config.cache_config.kv_cache_dtype_skip_layers = ["0", "1"]
    sizes = Sizes.of(Context(Request(), vllm_config=config))
    assert sizes.page_bytes() * 8 == 2 * 4 * entries + 6 * (entries + scales)
