"""Configurations under a policy: what is set, and what is refused with the flag to change."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from support import inside
from support.configs import GLM_AIR, engine_args, own_drafts, speculative, write_config
from vllm.config import CacheConfig, CompilationMode, CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.cache.draft_slots import reserve_slots
from vllm_kvx.compat.vllm_signatures import release_line
from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.config.wording import in_python
from vllm_kvx.ops import library
from vllm_kvx.policy.layout import RetrievalLayout, check_fits, layout_of
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
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
from vllm_kvx.server.validate import SCHEDULER, WORKERS, machinery_rows


class Changed:
    """`base` with some attributes replaced; vLLM's own objects would check the values."""

    def __init__(self, base: Any, **changes: Any) -> None:
        self._base = base
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def changed(config: Any, path: str, value: Any) -> Any:
    head, _, rest = path.partition(".")
    return Changed(config, **{head: changed(getattr(config, head), rest, value) if rest else value})


class Connector:
    kv_connector = ec_connector = "SomeConnector"
    enable_kv_cache_events = True

    kv_buffer_device = "cuda"

    def __init__(self, **extra: Any) -> None:
        self.get_from_extra_config = extra.get


class ThroughHost(Connector):
    kv_connector, kv_buffer_device = "NixlConnector", "cpu"


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
    ("cache_config.kv_cache_dtype_skip_layers", ["0"], "--kv-cache-dtype-skip-layers"),
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


@pytest.fixture(scope="module")
def stock(llama: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_args(llama)).create_engine_config()


@pytest.mark.parametrize(("path", "value", "names"), CASES)
def test_each_row_refuses(stock, path: str, value: Any, names: str) -> None:
    assert not reasons(WITH_POLICY, stock)
    found = reasons(WITH_POLICY, changed(stock, path, value))
    assert len(found) == 1
    assert names in found[0]


@pytest.mark.parametrize("dtype", ["nvfp4", "int8_per_token_head"])
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
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    refused |= set(reasons(WITH_POLICY, changed(stock, "cache_config.cache_dtype", "nvfp4")))
    assert refused == {row.reason for row in WITH_POLICY}


def pipeline_of_kinds(config: Any) -> Any:
    """A pipeline of two ranks, one of which has no layer with full attention."""
    config = changed(config, "parallel_config.pipeline_parallel_size", 2)
    kinds = ["sliding_attention"] * 4 + ["full_attention"] * 4
    return changed(config, "model_config.hf_text_config.layer_types", kinds)


def several_engines(config: Any, backend: str) -> Any:
    config = changed(config, "parallel_config.data_parallel_size", 2)
    return changed(config, "parallel_config.data_parallel_backend", backend)


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


def compressed(strategy: str) -> dict[str, Any]:
    """A config.json's entry of weights that llm-compressor left as they are, with an fp8 cache."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme | {"symmetric": True},
    }


@pytest.mark.parametrize("policy", ["snapkv:kv_rate=0.1", "fier-64", "fastkv:tsp_layer=3"])
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
    assert refused == [row.reason for row in WITH_RETRIEVAL], "a row without a case"
    for works in (32, 64, 128, 256):
        assert not reasons(
            WITH_RETRIEVAL, changed(stock, "model_config.get_head_size", lambda works=works: works)
        )


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


def test_cuda_ops_on_a_gpu_must_be_built(monkeypatch, tmp_path) -> None:
    """Found out without CUDA, which the API server's process must not initialise."""
    monkeypatch.setenv("KVX_RETRIEVAL_OPS", "cuda")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
    built, cache = tmp_path / "package" / "ops.so", tmp_path / "cache"
    built.parent.mkdir()
    monkeypatch.setattr(library, "LIBRARY", built)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(cache))
    (found,) = inside.ops_problems()
    assert f"CUDA ops are not built in {built.parent} or {cache}/ops/" in found
    assert found.endswith("run `vllm-kvx build-ops`, or unset it")
    built.write_text(library.record("0123456789abcdef", ("90a",)))
    (found,) = inside.ops_problems()
    assert f"{built} is built from other sources than this vllm-kvx: run `vllm-kvx" in found
    built.write_text(library.record(library.key_of(), ("90a",)))
    assert inside.ops_problems() == []


def test_retrieval_knows_few_head_dimensions(make_config, model_dir) -> None:
    odd = model_dir(head_dim=80)
    with pytest.raises(ValueError, match=r"head dimensions of 32, .* or drop fier or quest from"):
        make_config("fier-64", model=odd, dtype="float32")
    make_config("snapkv:kv_rate=0.1", model=odd, dtype="float32")


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        ("fastkv:tsp_layer=3", []),
        ("structkv:pivot=online", []),
        ("gemfilter:layer=3", []),
        ("speed-4", ["fastkv:tsp_layer=3"]),
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


@pytest.mark.parametrize("policy", ["snapkv:kv_rate=0.1", "streamingllm", "speed-4", "swiftkv-4"])
def test_flashinfer_where_a_step_is_one_pass(make_config, policy: str) -> None:
    make_config(policy, dtype="float32", attention_backend="FLASHINFER")


def test_rows_where_selected_tokens_run_passes(stock) -> None:
    flashinfer = changed(stock, "attention_config.backend", AttentionBackendEnum.FLASHINFER)
    in_pipeline = changed(stock, "parallel_config.pipeline_parallel_size", 2)
    refused = reasons(WITH_SELECTION, in_pipeline) + reasons(WITH_SELECTION, flashinfer)
    assert refused == [row.reason for row in WITH_SELECTION]
    assert not reasons(WITH_SELECTION, stock)


def test_rows_where_tokens_are_drafted_behind_prompts(stock) -> None:
    assert not reasons(WITH_LOOKAHEAD, stock)
    of_experts = changed(stock, "model_config.is_moe", True)
    asked = [
        changed(stock, "speculative_config", drafted_by("ngram")),
        changed(stock, "parallel_config.pipeline_parallel_size", 2),
        changed(stock, "model_config.is_hybrid", True),
        changed(stock, "model_config.uses_mrope", True),
        changed(stock, "lora_config", object()),
        changed(of_experts, "parallel_config.data_parallel_size", 2),
        changed(stock, "parallel_config.enable_eplb", True),
        changed(stock, "attention_config.backend", AttentionBackendEnum.FLASHINFER),
    ]
    found = [reasons(WITH_LOOKAHEAD, config) for config in asked]
    assert found == [[row.reason] for row in WITH_LOOKAHEAD]
    assert not reasons(WITH_LOOKAHEAD, of_experts)


@pytest.mark.parametrize("name", ["snapkv:lookahead=4", "criticalkv:lookahead=4"])
def test_a_server_that_looks_ahead(make_config, name: str) -> None:
    assert not lines_of(make_config, name)
    room = {"additional_config": {"kv_layout": [name]}}
    (found,) = lines_of(make_config, "full", **room, **NGRAM)
    assert "drop --speculative-config, or leave out lookahead=" in found


def test_rows_where_tokens_are_drafted(stock) -> None:
    assert not reasons(WITH_DRAFTS, stock)
    in_time = changed(stock, "scheduler_config.async_scheduling", False)
    ahead = changed(stock, "scheduler_config.async_scheduling", True)
    ngram, suffix = drafted_by("ngram"), drafted_by("suffix")
    for method in ("ngram", "draft_model", "eagle", "eagle3", "mtp"):
        works = changed(in_time, "speculative_config", drafted_by(method))
        assert not reasons(WITH_DRAFTS, works), method
    found = [
        *reasons(WITH_DRAFTS, changed(ahead, "speculative_config", ngram)),
        *reasons(WITH_DRAFTS, changed(in_time, "speculative_config", suffix)),
    ]
    assert found == [row.reason for row in WITH_DRAFTS[:2]]
    assert "set it to draft_model, eagle, eagle3, mtp, ngram, or drop" in found[1]
    # What would be refused whatever is scheduled ahead is told first.
    assert reasons(WITH_DRAFTS, changed(ahead, "speculative_config", suffix)) == found[1:]
    for form in UNTRIED:
        other = changed(in_time, "speculative_config", drafted_by("mtp", form))
        assert reasons(WITH_DRAFTS, other) == [WITH_DRAFTS[2].reason], form
    state = changed(in_time, "model_config.is_hybrid", True)
    assert reasons(WITH_DRAFTS, changed(state, "speculative_config", ngram)) == [
        WITH_DRAFTS[4].reason
    ]
    rows = changed(in_time, "model_config.uses_mrope", True)
    by_layers = changed(rows, "speculative_config", drafted_by("mtp"))
    assert reasons(WITH_DRAFTS, by_layers) == [WITH_DRAFTS[7].reason]
    for method in ("ngram", "draft_model", "eagle", "eagle3"):
        assert not reasons(WITH_DRAFTS, changed(rows, "speculative_config", drafted_by(method)))
    for method in ("draft_model", "eagle3", "mtp"):
        beside = changed(state, "speculative_config", drafted_by(method))
        assert WITH_DRAFTS[3].reason in reasons(WITH_DRAFTS, beside), method


UNTRIED = "parallel_drafting", "enable_adaptive_verification", "several layers", "shared layers"


def drafted_by(method: str, form: str = "") -> SimpleNamespace:
    """What vLLM says of a drafter, of a form in which none was tried."""
    return SimpleNamespace(
        method=method,
        parallel_drafting=form == "parallel_drafting",
        enable_adaptive_verification=form == "enable_adaptive_verification",
        use_multi_module_mtp=lambda: form == "several layers",
        use_gemma4_mtp=lambda: form == "shared layers",
    )


NGRAM = {"speculative_config": speculative(3)}


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "snapkv:kv_rate=0.1",
        "pyramidkv:kv_rate=0.1",
        "fier-64",
        "quest-64",
        "speed-4+fier-64",
        "swiftkv-4",
        "snapkv:kv_rate=0.1,after=4",
    ],
)
def test_ngram_drafts_under_policies(make_config, policy: str) -> None:
    config = make_config("snapkv:kv_rate=0.1", dtype="float32", **NGRAM)
    assert config.scheduler_config.async_scheduling is False
    assert not lines_of(make_config, policy, **NGRAM)


def test_what_a_rejected_draft_would_leave_without_entries(make_config) -> None:
    """A request is refused what the server is refused at start, and so is a server with room."""
    (found,) = lines_of(make_config, "selfonly-4", **NGRAM)
    assert "selfonly-4 keeps the last token's entry alone" in found
    room = {"additional_config": {"kv_layout": ["selfonly-4"]}}
    assert lines_of(make_config, "speed-4", **room, **NGRAM) == [found]
    settings = KVSettings.from_vllm_config(make_config("speed-4", dtype="float32", **NGRAM))
    assert settings is not None
    with pytest.raises(PolicyError, match="drop --speculative-config, or run speed-K"):
        check_fits(settings.parse("selfonly-4"), settings.layout, settings.num_layers)
    check_fits(settings.parse("speed-4:anchors=2"), settings.layout, settings.num_layers)


@pytest.fixture
def eagle(tmp_path: Path) -> dict[str, Any]:
    """The arguments of an engine whose tokens an EAGLE-3 head drafts."""
    head = tmp_path / "head"
    head.mkdir()
    model = write_config(head, num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])
    drafter = {"method": "eagle3", "model": model, "num_speculative_tokens": 3}
    return {"speculative_config": drafter, "async_scheduling": False}


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_rate=0.1", "fier-64", "snapkv:kv_rate=0.1,after=4", "streamingllm"]
)
def test_drafts_by_states_under_policies(make_config, eagle, policy: str) -> None:
    assert not lines_of(make_config, policy, **eagle)


@pytest.mark.parametrize("policy", ["speed-4", "swiftkv-4", "speed-4+fier-64", "selfonly-4"])
def test_tokens_without_states_to_draft_from(make_config, eagle, policy: str) -> None:
    """A request is refused what the server is refused at start, and so is a server with room."""
    *_, found = lines_of(make_config, policy, **eagle)
    assert f"under {policy.removesuffix('+fier-64')} some tokens have none" in found
    room = {"additional_config": {"kv_layout": [policy]}}
    assert lines_of(make_config, "full", **room, **eagle)[-1] == found
    settings = KVSettings.from_vllm_config(
        make_config("snapkv:kv_rate=0.1", dtype="float32", **eagle)
    )
    assert settings is not None
    with pytest.raises(PolicyError, match="policy that retains or retrieves, or set the method"):
        check_fits(settings.parse("speed-4"), settings.layout, settings.num_layers)


def test_rows_where_the_model_drafts_for_itself(stock) -> None:
    """As behind a prompt, but for what stands in for it in vLLM's configuration."""
    own = changed(stock, "speculative_config", drafted_by("ngram"))
    assert not reasons(WITH_OWN_DRAFTS, own)
    assert reasons(WITH_OWN_DRAFTS, stock) == [WITH_OWN_DRAFTS[0].reason]
    mixed = changed(own, "model_config.is_hybrid", True)
    lora = changed(own, "lora_config", object())
    assert reasons(WITH_OWN_DRAFTS, mixed) == [WITH_OWN_DRAFTS[2].reason]
    assert reasons(WITH_OWN_DRAFTS, lora) == [WITH_OWN_DRAFTS[4].reason]
    assert all("method kvx" in row.reason for row in WITH_OWN_DRAFTS)


OWN = {"speculative_config": own_drafts(3, "fier-64")}


@pytest.mark.parametrize("policy", ["full", "fier-32", "fier-128"])
def test_the_model_drafts_for_itself(make_config, policy: str) -> None:
    config = make_config(policy, dtype="float32", **OWN)
    assert config.speculative_config.method == "ngram"
    assert config.additional_config["kv_drafts"] == {"policy": "fier-64", "cache_to_weights": 0}
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.async_scheduling is False
    reserve_slots()
    reserve_slots()
    assert config.num_lookahead_tokens == 3
    assert make_config(policy, dtype="float32", **NGRAM).num_lookahead_tokens == 0
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None and not settings.stock and settings.layout.sidecar is not None
    # A request may name what reads less, and no policy that leaves something out.
    check_fits(settings.parse("fier-64"), settings.layout, settings.num_layers)
    with pytest.raises(PolicyError, match="use full, fier or quest"):
        check_fits(settings.parse("streamingllm"), settings.layout, settings.num_layers)


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_rate=0.1", "streamingllm", "speed-4", "swiftkv-4", "knorm:kv_rate=0.1"]
)
def test_what_leaves_entries_out_where_the_model_drafts(make_config, policy: str) -> None:
    (found,) = lines_of(make_config, policy, **OWN)
    room = {"additional_config": {"kv_layout": [policy]}}
    assert lines_of(make_config, "full", **room, **OWN) == [found]
    assert f"{policy.removesuffix(':kv_rate=0.1')} leaves some out" in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"policy": "snapkv:kv_rate=0.1"}, "set it to fier-256 or another policy that retrieves"),
        ({"policy": "snapkv:kv_rate=0.1+fier-64"}, "retrieves and does nothing else"),
        ({"policy": "full"}, "retrieves and does nothing else"),
        ({"policy": "fier-64:dense_below=0"}, "leave out dense_below"),
        ({"policy": "fier"}, "policy of --speculative-config: "),
        ({"policy": 64}, "policy of --speculative-config: "),
        ({"policy": "quest-64"}, "one server holds one sidecar"),
        ({"cache_to_weights": -1}, "must be a number of at least 0"),
        ({"cache_to_weights": True}, "must be a number of at least 0"),
        ({"cache_to_weights": float("nan")}, "must be a number of at least 0"),
        ({"num_speculative_tokens": None}, "needs num_speculative_tokens"),
        ({"prompt_lookup_max": 3}, "not 'prompt_lookup_max'"),
    ],
)
def test_what_the_drafter_may_not_be(make_config, changes: dict[str, Any], why: str) -> None:
    drafter = OWN["speculative_config"] | changes
    drafter = {key.replace("_", "-"): value for key, value in drafter.items()}
    with pytest.raises(ValueError) as refused:
        make_config("fier-32", dtype="float32", speculative_config=drafter)
    # In Python's words.
    assert in_python(why) in str(refused.value) or why in str(refused.value)


def test_a_drafter_without_a_policy_or_a_policy_without_one(make_config) -> None:
    with pytest.raises(ValueError, match="set --kv-policy full too"):
        make_config(None, **OWN)
    inner = {"kv_drafts": {"policy": "fier-64", "cache_to_weights": 0}}
    (found,) = lines_of(make_config, "full", additional_config=inner)
    assert "set the method of --speculative-config to kvx" in found
    with pytest.raises(ValueError, match="remove it, and set --speculative-config"):
        make_config("full", dtype="float32", additional_config={"kv_drafts": "fier-64"})


def test_what_no_test_drafts_beside(make_config) -> None:
    offloads = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    (found,) = lines_of(make_config, "fier-64", kv_transfer_config=offloads, **NGRAM)
    assert "beside a KV connector" in found


# Policies, and whether layers may hold unequally much; whether the output projections' weights are
# read.
@pytest.mark.parametrize(
    ("policy", "unequal", "reads_weights"),
    [
        ("snapkv:kv_rate=0.1", False, False),
        ("streamingllm", False, False),
        ("knorm:kv_rate=0.1", False, False),
        ("fier-64", False, False),
        ("snapkv:kv_rate=0.1+quest-64", False, False),
        ("pyramidkv:kv_rate=0.1", True, False),
        ("criticalkv:kv_rate=0.1", False, True),
        ("speed-4", True, False),
        ("fastkv:tsp_layer=3", True, False),
        ("structkv:pivot=online", True, False),
        ("fastkv:tsp_layer=3,kv_rate=1+criticalkv:kv_rate=0.1", True, True),
        ("snapkv:score=critical", False, True),
        ("pyramidkv:score=critical", True, True),
        ("fastkv:tsp_layer=3,score=critical", True, True),
        ("structkv:pivot=3,score=critical", True, True),
    ],
)
def test_adapters_and_events(make_config, policy: str, unequal: bool, reads_weights: bool) -> None:
    """Refused by what a policy needs, whether the server runs it or has room for it."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    beside = {"additional_config": {"kv_layout": [policy]}}
    for name, room in ((policy, {}), ("full", beside)):
        found = lines_of(make_config, name, enable_lora=True, **room)
        assert ["rates values" in line for line in found] == [True] * reads_weights
        found = lines_of(make_config, name, kv_events_config=events, **room)
        assert ["--kv-events-config" in line for line in found] == [True] * unequal
        off = events | {"enable_kv_cache_events": False}
        assert not lines_of(make_config, name, kv_events_config=off, **room)


@pytest.mark.parametrize(
    ("policy", "connector", "says"),
    [
        ("fier-64", "OffloadingConnector", None),
        ("quest-64", "ExampleConnector", None),
        ("fier-64", "NixlConnector", None),
        ("fier-64", "LMCacheConnectorV1", "policies know OffloadingConnector, ExampleConnector"),
        ("snapkv:kv_rate=0.1", "LMCacheConnectorV1", "fier and quest from the KV policy"),
        ("snapkv:kv_rate=0.1", "OffloadingConnector", "copy blocks of whole prompts"),
        ("snapkv:kv_rate=0.1", "NixlConnector", "copy blocks of whole prompts"),
        ("speed-4", "OffloadingConnector", "copy blocks of whole prompts"),
        ("snapkv:kv_rate=0.1+fier-64", "ExampleConnector", "copy blocks of whole prompts"),
    ],
)
def test_connectors(make_config, policy: str, connector: str, says: str | None) -> None:
    """Refused once, whether the server runs the policy or has room for it."""
    asked = {"kv_connector": connector, "kv_role": "kv_both"}
    for name, room in (
        (policy, {}),
        ("full", {"additional_config": {"kv_layout": [policy]}}),
    ):
        found = lines_of(make_config, name, kv_transfer_config=asked, **room)
        assert len(found) == (says is not None) and all(str(says) in line for line in found)


@pytest.mark.parametrize(
    ("policy", "connector", "key", "value"),
    [
        ("fier-64", "OffloadingConnector", "offload_prompt_only", False),
        ("quest-64", "NixlConnector", "bidirectional_kv_xfer", True),
    ],
)
def test_generated_tokens_are_not_handed_on(
    make_config, policy: str, connector: str, key: str, value: bool
) -> None:
    asked: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    asked["kv_connector_extra_config"] = {key: value}
    (line,) = lines_of(make_config, policy, kv_transfer_config=asked)
    assert f"drop {key}" in line
    make_config("full", kv_transfer_config=asked)


def lines_of(make_config: Any, policy: str, **settings: Any) -> list[str]:
    """What such a server is refused for."""
    try:
        make_config(policy, dtype="float32", **settings)
    except ValueError as error:
        return [line for line in str(error).splitlines() if line.startswith("  - ")]
    return []


def test_rows_of_weights_and_prefixes(stock) -> None:
    adapters, events = (
        changed(stock, "lora_config", object()),
        changed(stock, "kv_events_config", Connector()),
    )
    assert reasons(WITH_VALUE_NORMS, adapters) == [row.reason for row in WITH_VALUE_NORMS]
    assert reasons(WITH_PARTIAL_PREFIXES, events) == [row.reason for row in WITH_PARTIAL_PREFIXES]
    for table in (WITH_VALUE_NORMS, WITH_PARTIAL_PREFIXES):
        assert not reasons(table, stock)


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
        assert inside.block_size_problems(config, sidecar_of(policy).group, stock) == []
        # Marked as chosen: else the attention backend's preference would replace it.
        assert (cache_config.block_size, cache_config.user_specified_block_size) == (taken, True)
    # On CPU 0.33 says 16 here, and takes 128 once the model is loaded.
    made = make_config(policy, dtype="float32").cache_config
    assert made.block_size == (size if torch.cuda.is_available() else 128)
    chosen = make_config(policy, dtype="float32", block_size=2 * size).cache_config
    assert chosen.block_size == 2 * size


@pytest.mark.parametrize(
    ("policy", "settings", "names"),
    [
        ("snapkv:kv_rate=0.1", {"dtype": "bfloat16"}, "--dtype float32"),
        ("snapkv:window=40", {"max_num_batched_tokens": 32}, "window of 40 .* to at most 32"),
        (
            "fastkv:kv_rate=0.1",
            {},
            r"fastkv: tsp_layer .* \(its weights are dummies\): write tsp_layer=<int>",
        ),
        ("fastkv:tsp_layer=8", {}, "8 layers; use tsp_layer=0 .. tsp_layer=7"),
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
        make_config("snapkv:window=8", dtype="float32", long_prefill_token_threshold=threshold)
        warned = [line for line in lines if "token-threshold" in line]
        assert bool(warned) == (threshold == 7)
    assert "threshold 7 cuts" in warned[0] and "set it to at least 8" in warned[0]


def test_the_stash_must_hold_the_longest_prompt(make_config) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
    small = {"kv_stash_tokens": 511}
    with pytest.raises(ValueError, match=r"kv_stash_tokens .* at least --max-model-len, 512"):
        make_config("fastkv:tsp_layer=3", additional_config=small, **options)
    make_config("fastkv:tsp_layer=3", additional_config={"kv_stash_tokens": 512}, **options)


def test_a_known_tsp_layer_goes_to_all_processes(make_config, monkeypatch) -> None:
    from vllm_kvx.config.settings import KVSettings
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


def test_a_policy_sets_scheduler_worker_and_check(make_config) -> None:
    stock = make_config()
    config = make_config("speed-4", additional_config={"theirs": 1})
    kind = "Async" if config.scheduler_config.async_scheduling else ""
    assert config.scheduler_config.async_scheduling == stock.scheduler_config.async_scheduling
    assert (
        config.scheduler_config.scheduler_cls == f"vllm_kvx.cache.scheduler.{kind}PolicyScheduler"
    )
    assert config.parallel_config.worker_cls == WORKERS[stock.parallel_config.worker_cls]
    (check,) = config.model_config.logits_processors
    assert check.startswith("vllm_kvx.server.request_check:")
    assert config.additional_config == {"kv_policy": "speed-4", "theirs": 1}


def test_full_alone_is_stock_but_for_the_check(make_config) -> None:
    stock, config = make_config(), make_config("full")
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == stock.parallel_config.worker_cls
    assert len(config.model_config.logits_processors) == 1
    roomy = make_config("full", additional_config={"kv_layout": ["speed-4"]})
    assert roomy.scheduler_config.scheduler_cls


def test_users_logits_processors_stay(make_config) -> None:
    config = make_config("speed-4", logits_processors=["their.module:Processor"])
    assert config.model_config.logits_processors[0] == "their.module:Processor"
    assert len(config.model_config.logits_processors) == 2


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"scheduler_cls": "their.Scheduler"}, "--scheduler-cls"),
        ({"worker_cls": "their.Worker"}, "--worker-cls"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    ],
)
def test_real_settings_are_refused(make_config, kwargs: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make_config("speed-4", **kwargs)
    make_config(None, **kwargs)


def test_all_reasons_at_once(make_config) -> None:
    with pytest.raises(ValueError) as error:
        make_config("speed-4", enable_prompt_embeds=True, scheduler_cls="their.Scheduler")
    assert "--enable-prompt-embeds" in str(error.value)
    assert "--scheduler-cls" in str(error.value)


def test_full_alone_refuses_little(make_config) -> None:
    make_config("full", enable_lora=True, scheduler_cls="their.Scheduler")


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


def test_a_backend_for_full_attention_alone(make_config) -> None:
    by_kind = {"backend_per_kind": {"full_attention": "FLASHINFER"}}
    with pytest.raises(ValueError, match="--attention-backend"):
        make_config("fier-64", dtype="float32", attention_config=by_kind)
    make_config("snapkv:kv_rate=0.1", dtype="float32", attention_config=by_kind)
    other = {"backend_per_kind": {"sliding_window": "FLEX_ATTENTION"}}
    make_config("fier-64", dtype="float32", attention_config=other)


@pytest.mark.parametrize(
    "policy", ["speed-4", "fastkv:tsp_layer=3", "snapkv:kv_rate=0.1", "fier-64"]
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
        ("fastkv:tsp_layer=4", model("Gemma2", head_dim=32), "use tsp_layer=3 or tsp_layer=5"),
        ("structkv:pivot=0", model("Gemma2", head_dim=32), "layer 0 slides over a window"),
        ("structkv:pivot=online", model("Gemma2", head_dim=32), "use pivot=calibrated or pivot="),
        ("gemfilter:layer=2", model("Gemma2", head_dim=32), "use layer=1 or layer=3"),
        ("selfonly-4", model("Gemma2", head_dim=32), "gemfilter can run, not selfonly-4"),
        ("speed-4+fier-64", model("Gemma2", head_dim=32), "beside nothing that retrieves"),
        ("speed-4+snapkv:kv_rate=0.1", model("Gemma2", head_dim=32), "beside nothing that retains"),
        ("fastkv:tsp_layer=3+quest-64", model("Gemma2", head_dim=32), "leave retrieval out"),
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


@pytest.mark.parametrize("policy", ["snapkv:kv_rate=0.1", "fier-64", "fastkv:tsp_layer=3"])
def test_models_that_cap_their_logits(make_config, model_dir, policy: str) -> None:
    capped = model_dir(**model("Gemma2", head_dim=32, layer_types=["full_attention"] * 8))
    make_config(policy, model=capped, dtype="float32")


def lines(error: Any) -> list[str]:
    return [line[4:] for line in str(error.value).splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ("their.Worker", "drop --worker-cls"),
        ("vllm.v1.worker.xpu_worker.XPUWorker", "serve on one of these, or drop the KV policy"),
    ],
)
def test_other_workers(stock, worker: str, says: str) -> None:
    (row,) = machinery_rows(changed(stock, "parallel_config.worker_cls", worker))
    assert row.reason.endswith(f"cannot extend {worker}: {says}")


def test_nothing_is_measured_for_a_server_that_cannot_run(make_config, monkeypatch) -> None:
    from vllm_kvx.server import measure_at_start as at_start

    monkeypatch.setattr(at_start, "measured", lambda *_: pytest.fail("it measures"))
    with pytest.raises(ValueError, match=r"\n  - .*--scheduler-cls"):
        make_config(
            "fastkv:kv_rate=0.1",
            dtype="float32",
            scheduler_cls="their.Scheduler",
            load_format="auto",
        )


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
        ({"cache_config.cache_dtype": "int8_per_token_head"}, True, "drop --kv-cache-dtype"),
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
