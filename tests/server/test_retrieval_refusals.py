"""What servers that retrieve are refused, and the blocks that they get."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.refused import Connector, OfLMCache, ThroughHost, changed
from vllm.config import CacheConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.ops import library
from vllm_kvx.policy.layout import RetrievalLayout, layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.retrieval_checks import block_size_problems, ops_problems
from vllm_kvx.server.start_checks import WITH_RETRIEVAL
from vllm_kvx.server.start_refusal import reasons

ANSWERS = "lmcache.mp.save_decode_cache"
MODE = "lmcache.mp.mp_transfer_mode"


def layers_in_blocks(stock: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The reason that refuses blocks of all layers, where CUDA ops are built; no others are."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "ops.so")
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("KVX_RETRIEVAL_OPS", raising=False)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    assert not reasons(WITH_RETRIEVAL, stock), "Triton's ops run"
    library.LIBRARY.write_text(library.record(library.key_of(), ("90a",)))
    (found,) = reasons(WITH_RETRIEVAL, stock)
    for ops, works in (("cuda", False), ("triton", True)):
        monkeypatch.setenv("KVX_RETRIEVAL_OPS", ops)
        assert bool(reasons(WITH_RETRIEVAL, stock)) != works
    monkeypatch.delenv("KVX_RETRIEVAL_OPS")
    for layout, works in (("BLHNC", False), ("LBNHC", True), ("HND", True)):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        assert bool(reasons(WITH_RETRIEVAL, stock)) != works
    return found


def test_rows_where_pages_hold_a_sidecar(stock, monkeypatch, tmp_path) -> None:
    refused = []
    for path, value, names in [
        ("model_config.get_head_size", lambda: 80, "head dimensions of 32, 64, 128, 256"),
        ("attention_config.backend", AttentionBackendEnum.FLASHINFER, "FLASH_ATTN, TRITON_ATTN"),
        ("compilation_config.pass_config.fuse_attn_quant", True, '{"fuse_attn_quant": false}'),
        ("kv_transfer_config", Connector(offload_prompt_only=False), "drop offload_prompt_only"),
        ("kv_transfer_config", OfLMCache(**{ANSWERS: True}), f"drop {ANSWERS}"),
        ("kv_transfer_config", Connector(bidirectional_kv_xfer=True), "drop bidirectional_kv_xfer"),
    ]:
        (found,) = reasons(WITH_RETRIEVAL, changed(stock, path, value))
        assert names in found
        refused.append(found)
    pipeline = changed(stock, "parallel_config.pipeline_parallel_size", 2)
    (found,) = reasons(WITH_RETRIEVAL, changed(pipeline, "model_config.is_hybrid", True))
    refused.insert(1, found)
    refused.insert(3, layers_in_blocks(stock, monkeypatch, tmp_path))
    on_gpu = changed(stock, "device_config.device_type", "cuda")
    (found,) = reasons(WITH_RETRIEVAL, changed(on_gpu, "kv_transfer_config", ThroughHost()))
    assert "drop kv_buffer_device" in found
    refused.append(found)
    copies = changed(on_gpu, "kv_transfer_config", OfLMCache(**{MODE: "engine_driven"}))
    (found,) = reasons(WITH_RETRIEVAL, copies)
    assert f"drop {MODE}" in found
    refused.insert(-2, found)
    assert refused == [row.reason for row in WITH_RETRIEVAL], "a row without a case"
    for works in (32, 64, 128, 256):
        assert not reasons(
            WITH_RETRIEVAL, changed(stock, "model_config.get_head_size", lambda works=works: works)
        )


@pytest.mark.parametrize(
    ("extra", "variable", "device", "works"),
    [
        ({}, None, "cuda", True),
        ({MODE: "lmcache_driven"}, None, "cuda", True),
        ({MODE: "engine_driven"}, None, "cuda", False),
        ({MODE: "Engine_Driven"}, "auto", "cuda", False),
        ({}, "engine_driven", "cuda", False),
        ({}, "ENGINE_DRIVEN", "cuda", False),
        # What the configuration says goes before the variable, null as well.
        ({MODE: "auto"}, "engine_driven", "cuda", True),
        ({MODE: None}, "engine_driven", "cuda", True),
        # There it is what LMCache does anyway, and torch copies.
        ({MODE: "engine_driven"}, "engine_driven", "cpu", True),
    ],
)
def test_who_copies_pages_with_a_tail(
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    variable: str | None,
    device: str,
    works: bool,
) -> None:
    """Servers without retrieval are not asked: their pages have no tail."""
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", variable)
    config = changed(stock, "device_config.device_type", device)
    config = changed(config, "kv_transfer_config", OfLMCache(**extra))
    found = reasons(WITH_RETRIEVAL, config)
    assert len(found) == (not works)
    assert works or ("unset LMCACHE_MP_TRANSFER_MODE" in found[0] and "\n" not in found[0])


@pytest.mark.parametrize(
    ("policy", "settings", "names"),
    [
        ("fier-64", {"block_size": 16}, "of 16 tokens .* --block-size to a multiple of 32"),
        ("fier-64:group=64", {"block_size": 32}, "--block-size to a multiple of 64"),
        ("quest-64", {"block_size": 16}, "--block-size to a multiple of 32"),
        ("fier-64", {"attention_backend": "FLASHINFER"}, "FlashInfer.* one of FLASH_ATTN"),
        pytest.param(
            "quest-64",
            {"tensor_parallel_size": 4},
            "--tensor-parallel-size to at most the number of KV heads",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="vLLM itself wants a GPU for every rank"
            ),
        ),
        pytest.param(
            "fier-64",
            {"dtype": "bfloat16"},
            "--dtype float32",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a row of CPU servers"),
        ),
        (
            "fier-64",
            {"compilation_config": {"pass_config": {"fuse_attn_quant": True}}},
            "its quantization cannot be fused .* --compilation-config",
        ),
        ("fier-64:group=96", {}, "group must be one of 32, 64, 128, 256, got 96"),
    ],
)
def test_what_retrieval_cannot_do(make_config, policy: str, settings: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make_config(policy, **{"dtype": "float32"} | settings)


@pytest.mark.parametrize(
    ("ops", "names"),
    [
        ("bogus", "KVX_RETRIEVAL_OPS must be one of cuda, triton, torch, got 'bogus'"),
        pytest.param(
            "cuda",
            "KVX_RETRIEVAL_OPS=cuda needs a GPU: unset it",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is of CPU servers"),
        ),
    ],
)
def test_retrieval_ops_that_there_are_not(make_config, monkeypatch, ops: str, names: str) -> None:
    monkeypatch.setenv("KVX_RETRIEVAL_OPS", ops)
    with pytest.raises(ValueError, match=names):
        make_config("fier-64", dtype="float32")
    make_config("speed-4", dtype="float32")
    for works in ("triton", "torch", ""):
        monkeypatch.setenv("KVX_RETRIEVAL_OPS", works)
        make_config("fier-64", dtype="float32")


def test_one_launch_is_on_or_off(make_config, monkeypatch) -> None:
    monkeypatch.setenv("KVX_RETRIEVAL_ONE_LAUNCH", "no")
    with pytest.raises(ValueError, match=r"KVX_RETRIEVAL_ONE_LAUNCH must be 0, .* got 'no'"):
        make_config("fier-64", dtype="float32")
    for works in ("0", "1", ""):
        monkeypatch.setenv("KVX_RETRIEVAL_ONE_LAUNCH", works)
        assert not ops_problems()


def test_cuda_ops_on_a_gpu_must_be_built(monkeypatch, tmp_path) -> None:
    """Found out without CUDA, which the API server's process must not initialise."""
    monkeypatch.setenv("KVX_RETRIEVAL_OPS", "cuda")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
    built, cache = tmp_path / "package" / "ops.so", tmp_path / "cache"
    built.parent.mkdir()
    monkeypatch.setattr(library, "LIBRARY", built)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(cache))
    (found,) = ops_problems()
    assert f"CUDA ops are not built in {built.parent} or {cache}/ops/" in found
    assert found.endswith("run `vllm-kvx build-ops`, or unset it")
    built.write_text(library.record("0123456789abcdef", ("90a",)))
    (found,) = ops_problems()
    assert f"{built} is built from other sources than this vllm-kvx: run `vllm-kvx" in found
    built.write_text(library.record(library.key_of(), ("90a",)))
    assert ops_problems() == []


def test_retrieval_knows_few_head_dimensions(make_config, model_dir) -> None:
    odd = model_dir(head_dim=80)
    with pytest.raises(ValueError, match=r"head dimensions of 32, .* or drop fier or quest from"):
        make_config("fier-64", model=odd, dtype="float32")
    make_config("snapkv:kv_rate=0.1", model=odd, dtype="float32")


def sidecar_of(policy: str) -> RetrievalLayout:
    sidecar = layout_of([parse_policy(policy)], 8).sidecar
    assert sidecar is not None
    return sidecar


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        *(("fier-64", 32), ("fier-64:group=64", 64), ("fier-128:group=128", 128)),
        *(("quest-64", 32), ("quest-64:page=64", 64)),
    ],
)
def test_blocks_become_whole_groups(make_config, policy: str, size: int) -> None:
    # vLLM's own size, but for CPU; and one that will do.
    for stock, taken in ((16, size), (4 * size, 4 * size)):
        cache_config = CacheConfig()
        config = SimpleNamespace(cache_config=cache_config)
        assert block_size_problems(config, sidecar_of(policy).group, stock) == []
        # Marked as chosen: else the attention backend's preference would replace it.
        assert (cache_config.block_size, cache_config.user_specified_block_size) == (taken, True)
    # On CPU 0.33 says 16 here, and takes 128 once the model is loaded.
    made = make_config(policy, dtype="float32").cache_config
    assert made.block_size == (size if torch.cuda.is_available() else 128)
    chosen = make_config(policy, dtype="float32", block_size=2 * size).cache_config
    assert chosen.block_size == 2 * size
