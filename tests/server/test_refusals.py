"""Configurations under a policy: every row of what is refused, with the flag to change."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from support.lmcache_standin import take_lmcache
from support.refused import (
    Connector,
    OfExample,
    OfLMCache,
    ThroughHost,
    changed,
    several_engines,
)
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.compat.vllm_signatures import release_line
from vllm_kvx.server.connector_checks import WITHOUT_WHOLE_PROMPTS
from vllm_kvx.server.draft_checks import WITH_DRAFTS, WITH_OWN_DRAFTS
from vllm_kvx.server.lookahead_checks import WITH_LOOKAHEAD
from vllm_kvx.server.model_checks import WITH_PROPAGATION
from vllm_kvx.server.start_checks import (
    ALWAYS,
    WITH_PARTIAL_PREFIXES,
    WITH_POLICY,
    WITH_RETENTION,
    WITH_RETRIEVAL,
    WITH_SELECTION,
    WITH_VALUE_NORMS,
)
from vllm_kvx.server.start_refusal import applying, reasons

EXECUTOR = "parallel_config.distributed_executor_backend"


MULTIMODAL = "model_config.multimodal_config"
# Attribute, value -> what the message must name.
CASES = [
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size 1"),
    ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size 1"),
    ("parallel_config.enable_elastic_ep", True, "--enable-elastic-ep"),
    ("parallel_config.use_ubatching", True, "--enable-dbo"),
    ("parallel_config.enable_hc_sp", True, "--enable-hc-sp"),
    ("kv_transfer_config", Connector(), "--kv-transfer-config"),
    ("ec_transfer_config", Connector(), "--ec-transfer-config"),
    (MULTIMODAL, SimpleNamespace(enable_mm_embeds=True), "--enable-mm-embeds"),
    (MULTIMODAL, SimpleNamespace(mm_encoder_only=True), "--mm-encoder-only"),
    ("model_config.is_multimodal_raw_input_only_model", True, "no text alone"),
    ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ("model_config.enable_prompt_embeds", True, "--enable-prompt-embeds"),
    ("model_config.use_mla", True, "latent attention is not supported yet, and full alone remains"),
    ("model_config.hf_text_config.num_kv_shared_layers", 2, "num_kv_shared_layers"),
    ("model_config.is_attention_free", True, "keeps states"),
    ("model_config.uses_alibi", True, "ALiBi"),
    ("aux_output_config", SimpleNamespace(enabled=True), "--enable-return-routed-experts"),
    ("model_config.hf_text_config.attention_chunk_size", 64, "within chunks"),
    ("model_config.hf_text_config.v_head_dim", 8, "its values have another number"),
    ("model_config.hf_text_config.dual_chunk_attention_config", {"a": 1}, "dual_chunk"),
    ("model_config.model_class_overrides", {"a": "b"}, "--model-class-overrides"),
    ("model_config.get_sliding_window", lambda: 64, "--disable-sliding-window"),
    ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
    ("scheduler_config.disable_hybrid_kv_cache_manager", True, "--disable-hybrid-kv-cache"),
    ("scheduler_config.scheduler_cls", "their.Scheduler", "--scheduler-cls"),
    ("compilation_config.cudagraph_mode", CUDAGraphMode.FULL, "FULL_AND_PIECEWISE"),
    ("offload_config.offload_backend", "prefetch", "--offload-group-size"),
    ("attention_config.use_non_causal", True, "use_non_causal"),
    ("attention_config.hisparse_config", object(), "hisparse_config"),
]


RETENTION_CASES = [
    ("cache_config.cache_dtype", "fp8", "--kv-cache-dtype"),
    ("parallel_config.tensor_parallel_size", 64, "--tensor-parallel-size"),
    ("attention_config.backend", AttentionBackendEnum.FLEX_ATTENTION, "--attention-backend"),
]


@pytest.mark.parametrize(("path", "value", "names"), CASES)
def test_each_row_refuses(stock, path: str, value: Any, names: str) -> None:
    assert not reasons(WITH_POLICY, stock)
    found = reasons(WITH_POLICY, changed(stock, path, value))
    assert len(found) == 1
    assert names in found[0]


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8_per_token_head"])
def test_kv_cache_types_that_do_not_work(stock, monkeypatch, dtype: str) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    (found,) = reasons(WITH_POLICY, changed(stock, "cache_config.cache_dtype", dtype))
    assert "--kv-cache-dtype to one of auto, " in found


def test_every_row_has_a_case(stock, monkeypatch) -> None:
    refused = {
        r for path, value, _ in CASES for r in reasons(WITH_POLICY, changed(stock, path, value))
    }
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    (breakable,) = reasons(WITH_POLICY, stock)
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH=0" in breakable
    refused.add(breakable)
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    older = "vllm.v1.executor.ray_executor.RayDistributedExecutor"
    refused |= set(reasons(WITH_POLICY, changed(stock, EXECUTOR, older)))
    refused |= set(reasons(WITH_POLICY, several_engines(stock, "ray")))
    refused |= set(reasons(WITH_POLICY, pipeline_of_kinds(stock)))
    pipeline = changed(stock, "parallel_config.pipeline_parallel_size", 2)
    refused |= set(reasons(WITH_POLICY, changed(pipeline, "kv_transfer_config", Connector())))
    hybrid = changed(stock, "model_config.is_hybrid", True)
    refused |= set(reasons(WITH_POLICY, changed(hybrid, "kv_transfer_config", Connector())))
    embeds = changed(stock, MULTIMODAL, SimpleNamespace(enable_mm_embeds=True))
    refused |= set(reasons(WITH_POLICY, changed(embeds, "kv_transfer_config", Connector())))
    refused |= lmcache_rows(stock, monkeypatch)
    refused.add(nixl_row(stock, monkeypatch))
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    refused |= set(reasons(WITH_POLICY, changed(stock, "cache_config.cache_dtype", "nvfp4")))
    assert refused == {row.reason for row in WITH_POLICY}


def nixl_row(stock: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A NIXL that is not there."""
    nixl = ThroughHost()
    nixl.kv_buffer_device = "cuda"
    asked = changed(stock, "kv_transfer_config", nixl)
    assert not reasons(WITH_POLICY, asked)
    monkeypatch.setitem(sys.modules, "nixl", None)
    (line,) = reasons(WITH_POLICY, asked)
    assert "pip install nixl" in line
    return line


def lmcache_rows(stock: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Adapters, a way to store that nobody tried, and an LMCache that is not there.

    Adapters beside vLLM's example of a connector, too.
    """
    take_lmcache(monkeypatch)
    asked = changed(stock, "kv_transfer_config", OfLMCache())
    assert not reasons(WITH_POLICY, asked)
    found = reasons(WITH_POLICY, changed(asked, "lora_config", object()))
    example = changed(stock, "kv_transfer_config", OfExample())
    assert not reasons(WITH_POLICY, example)
    found += reasons(WITH_POLICY, changed(example, "lora_config", object()))
    lazy = OfLMCache(**{"lmcache.mp.lazy_offload": True})
    found += reasons(WITH_POLICY, changed(stock, "kv_transfer_config", lazy))
    monkeypatch.setenv("LMCACHE_USE_UPSTREAM_MP", "1")
    found += reasons(WITH_POLICY, asked)
    names = (
        "--enable-lora",
        "by their tokens alone",
        "drop lmcache.mp.lazy_offload",
        "lmcache==0.5.6",
    )
    for line, says in zip(found, names, strict=True):
        assert says in line
    return set(found)


def pipeline_of_kinds(config: Any) -> Any:
    """A pipeline of two ranks, one of which has no layer with full attention."""
    config = changed(config, "parallel_config.pipeline_parallel_size", 2)
    kinds = ["sliding_attention"] * 4 + ["full_attention"] * 4
    return changed(config, "model_config.hf_text_config.layer_types", kinds)


def test_engines_of_one_server(stock) -> None:
    assert not reasons(WITH_POLICY, several_engines(stock, "mp"))
    (reason,) = reasons(WITH_POLICY, several_engines(stock, "ray"))
    assert "--data-parallel-backend mp" in reason


def test_rays_older_executor(stock, monkeypatch) -> None:
    class RayDistributedExecutor:
        pass

    class Theirs(RayDistributedExecutor):
        pass

    def found(backend: Any) -> list[str]:
        return reasons(WITH_POLICY, changed(stock, EXECUTOR, backend))

    older = "vllm.v1.executor.ray_executor.RayDistributedExecutor"
    newer = "vllm.v1.executor.ray_executor_v2.RayExecutorV2"
    for backend in (RayDistributedExecutor, Theirs, older):
        (reason,) = found(backend)
        assert "--distributed-executor-backend mp" in reason
    for works in ("ray", "mp", "uni", "external_launcher", newer, object, None):
        assert not found(works)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    if release_line(vllm.__version__) == "0.32":
        (reason,) = found("ray")
        assert "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in reason
    else:
        assert not found("ray"), "there is no older one any more"
    assert not found("mp")


@pytest.mark.skipif(torch.cuda.is_available(), reason="two rows are of CPU servers")
def test_rows_where_entries_can_be_dropped(stock) -> None:
    exact = changed(stock, "model_config.dtype", torch.float32)
    assert not reasons(WITH_RETENTION, exact)
    refused = []
    by_head = SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})
    cases = [
        *RETENTION_CASES[:2],
        ("quant_config", by_head, "--kv-cache-dtype bfloat16"),
        *RETENTION_CASES[2:],
        ("model_config.dtype", torch.bfloat16, "--dtype float32"),
    ]
    for path, value, names in cases:
        (found,) = reasons(WITH_RETENTION, changed(exact, path, value))
        assert names in found
        refused.append(found)
    assert refused == [row.reason for row in (*WITH_RETENTION[1:], WITH_RETENTION[0])], (
        "a row without a case"
    )


def test_rows_of_weights_and_prefixes(stock) -> None:
    adapters, events = (
        changed(stock, "lora_config", object()),
        changed(stock, "kv_events_config", Connector()),
    )
    assert reasons(WITH_VALUE_NORMS, adapters) == [row.reason for row in WITH_VALUE_NORMS]
    assert reasons(WITH_PARTIAL_PREFIXES, events) == [row.reason for row in WITH_PARTIAL_PREFIXES]
    for table in (WITH_VALUE_NORMS, WITH_PARTIAL_PREFIXES):
        assert not reasons(table, stock)


def test_rows_for_every_policy(stock, monkeypatch) -> None:
    assert not reasons(ALWAYS, stock)
    (found,) = reasons(ALWAYS, changed(stock, "model_config.runner_type", "pooling"))
    assert "pooling" in found
    compiled = changed(stock, "compilation_config.mode", CompilationMode.VLLM_COMPILE)
    (found,) = reasons(ALWAYS, compiled)
    assert "--enforce-eager" in found
    (found,) = reasons(ALWAYS, changed(stock, "use_v2_model_runner", False))
    assert "VLLM_USE_V2_MODEL_RUNNER" in found
    for model, cache, is_refused in (
        (torch.float32, "bfloat16", True),
        (torch.bfloat16, "float16", True),
        (torch.bfloat16, "bfloat16", False),
        (torch.float32, "fp8", False),
        (torch.float32, "fp8_e5m2", False),
        (torch.float32, "fp8_per_token_head", True),
        (torch.float32, "turboquant_k8v4", True),
    ):
        typed = changed(
            changed(stock, "model_config.dtype", model), "cache_config.cache_dtype", cache
        )
        assert bool(reasons(ALWAYS, typed)) == (is_refused and not torch.cuda.is_available())
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    (found,) = reasons(ALWAYS, stock)
    assert "VLLM_USE_RUST_FRONTEND" in found


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
def test_kv_cache_types_that_work(stock, dtype: str) -> None:
    assert not reasons(WITH_POLICY, changed(stock, "cache_config.cache_dtype", dtype))


@pytest.mark.parametrize("mode", [m for m in CUDAGraphMode if m is not CUDAGraphMode.FULL])
def test_graph_modes_that_work(stock, mode: CUDAGraphMode) -> None:
    assert not reasons(WITH_POLICY, changed(stock, "compilation_config.cudagraph_mode", mode))


def test_pooling_leaves_nothing_to_change(stock) -> None:
    pooling = changed(stock, "model_config.runner_type", "pooling")
    found = reasons((*ALWAYS, *WITH_POLICY), changed(pooling, "kv_transfer_config", Connector()))
    assert len(found) == 1 and "pooling models" in found[0]


TABLES = (
    *ALWAYS,
    *WITH_POLICY,
    *WITH_RETENTION,
    *WITH_PROPAGATION,
    *WITH_PARTIAL_PREFIXES,
    *WITHOUT_WHOLE_PROMPTS,
    *WITH_VALUE_NORMS,
    *WITH_DRAFTS,
    *WITH_LOOKAHEAD,
    *WITH_OWN_DRAFTS[1:],  # The first one applies where there is no drafter.
    *WITH_SELECTION,
    *WITH_RETRIEVAL,
)


@pytest.mark.parametrize(
    ("changes", "on_cpu", "names"),
    [
        (
            {"attention_config.backend": AttentionBackendEnum.FLASHINFER},
            False,
            "no room for retrieval's sidecar: set --attention-backend to one of FLASH_ATTN, TRITON",
        ),
        (
            {
                "cache_config.cache_dtype": "nvfp4",
                "quant_config": SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"}),
            },
            False,
            "--kv-cache-dtype bfloat16 or float16, or serve",
        ),
        ({"cache_config.cache_dtype": "fp8_per_token_head"}, True, "drop --kv-cache-dtype"),
        ({"cache_config.cache_dtype": "fp8_ds_mla"}, True, "drop --kv-cache-dtype"),
        (
            {
                "kv_transfer_config": Connector(),
                "scheduler_config.disable_hybrid_kv_cache_manager": True,
            },
            True,
            "--kv-transfer-config",
        ),
        (
            {
                "parallel_config.data_parallel_size": 2,
                "parallel_config.data_parallel_backend": "ray",
                EXECUTOR: "vllm.v1.executor.ray_executor.RayDistributedExecutor",
            },
            True,
            "--data-parallel-backend mp",
        ),
    ],
)
def test_reasons_about_one_setting_are_one(
    stock, monkeypatch, changes: dict[str, Any], on_cpu: bool, names: str
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    config = changed(stock, "model_config.dtype", torch.float32)
    for path, value in changes.items():
        config = changed(config, path, value)
    assert len(applying(TABLES, config)) >= 1
    (found,) = reasons(TABLES, config)
    assert names in found


def test_ways_out_lead_out(stock, monkeypatch) -> None:
    """A value that one reason offers is not refused by another one."""
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    for name in ("FLASH_ATTN", "TRITON_ATTN"):
        backend = getattr(AttentionBackendEnum, name)
        assert not reasons(TABLES, changed(stock, "attention_config.backend", backend))
    for dtype in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"):
        assert not reasons(TABLES, changed(stock, "cache_config.cache_dtype", dtype))
