"""What a server refuses at start, and what to change: one row each.

A request's refusals, its 400s, are in ``request_check``, which asks ``policy/`` for most of them.
"""

import os
from typing import TYPE_CHECKING, Any

from vllm_kvx.config.policy_layers import is_mixed, num_kv_heads
from vllm_kvx.ops.paged import ATTENTION_BACKENDS, NO_SIDECAR, ONE_PLAN
from vllm_kvx.policy.cache_dtype import KV_CACHE_DTYPES, UNSCALED
from vllm_kvx.server.connector_checks import BESIDE_CONNECTORS, RETRIEVAL_BESIDE_CONNECTORS
from vllm_kvx.server.model_checks import OF_MODEL
from vllm_kvx.server.pipeline_checks import ONE_RANK, in_pipeline
from vllm_kvx.server.start_refusal import (
    BACKEND,
    CACHE_DTYPE,
    MODEL,
    NO_POLICY,
    ON_GPUS,
    RAY,
    Refusal,
    asked_backend,
    asked_connector,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEAD_DIMS = (32, 64, 128, 256)

# Layouts of vLLM's whose outermost dimension is the block, as far as pages may have a tail.
LAYERS_IN_BLOCKS = ("BLNHC", "BLHNC")


# A server of `full` alone runs vLLM's own code, but its requests are checked all the same.
ALWAYS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.model_config.runner_type == "pooling",
        "pooling models generate nothing that a KV policy could save: drop the KV policy",
        NO_POLICY,
    ),
    Refusal(
        lambda c: not c.use_v2_model_runner and _is_cpu(),
        "this CPU server uses vLLM's Model Runner V1: set KVX_CPU=1, which runs Model Runner "
        "V2 under Triton's interpreter, and do not set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    Refusal(
        lambda c: not c.use_v2_model_runner and not _is_cpu(),
        "this server uses vLLM's Model Runner V1: unset VLLM_USE_V2_MODEL_RUNNER or set it to 1",
    ),
    Refusal(
        lambda c: (
            _is_cpu()
            and c.cache_config.cache_dtype in UNSCALED
            and str(c.model_config.dtype) != f"torch.{c.cache_config.cache_dtype}"
        ),
        "vLLM's CPU attention reads a KV cache of another type than the model's as if it were the "
        "model's: drop --kv-cache-dtype",
        CACHE_DTYPE,
    ),
    Refusal(
        lambda c: _is_cpu() and c.cache_config.cache_dtype not in KV_CACHE_DTYPES,
        "vLLM's CPU attention does not have this KV cache type, and vLLM does not check it: drop "
        "--kv-cache-dtype",
        CACHE_DTYPE,
    ),
    Refusal(
        # Of Model Runner V1 too, so that one start says what V2 needs besides KVX_CPU.
        lambda c: _is_cpu() and c.compilation_config.mode.name != "NONE",
        "on CPU Triton's interpreter stands in for a compiler, which torch.compile cannot use: add "
        "--enforce-eager",
    ),
    Refusal(
        lambda c: _env("VLLM_USE_RUST_FRONTEND"),
        "the Rust front end does not check a request's KV policy: unset VLLM_USE_RUST_FRONTEND",
    ),
)

WITH_POLICY: tuple[Refusal, ...] = (
    *OF_MODEL,
    Refusal(
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "decode context parallelism is not supported yet: set --decode-context-parallel-size 1",
    ),
    Refusal(
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "prefill context parallelism is not supported yet: set --prefill-context-parallel-size 1",
    ),
    Refusal(
        lambda c: _executor_runs_without_worker(c),
        "Ray's older executor calls the model runner past the worker, whose steps a policy needs: "
        "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND or set it to 1, or set "
        "--distributed-executor-backend mp",
        RAY,
    ),
    Refusal(
        lambda c: (
            c.parallel_config.data_parallel_size > 1
            and c.parallel_config.data_parallel_backend == "ray"
        ),
        "data parallelism by Ray's actors is not supported yet: set --data-parallel-backend mp",
        RAY,
    ),
    Refusal(
        lambda c: c.parallel_config.enable_elastic_ep,
        "elastic expert parallelism is not supported: drop --enable-elastic-ep",
    ),
    Refusal(
        lambda c: c.parallel_config.use_ubatching,
        "microbatching is not supported yet: drop --enable-dbo and --ubatch-size",
    ),
    Refusal(
        lambda c: c.parallel_config.enable_hc_sp,
        "sequence parallelism is not supported yet: drop --enable-hc-sp",
    ),
    *BESIDE_CONNECTORS,
    Refusal(
        lambda c: getattr(getattr(c, "aux_output_config", None), "enabled", False),
        "which experts tokens were routed to is recorded by rows of a whole batch, which policies "
        "may run in parts: drop --enable-return-routed-experts",
    ),
    Refusal(
        lambda c: c.ec_transfer_config and c.ec_transfer_config.ec_connector,
        "encoder cache connectors are not supported: drop --ec-transfer-config",
    ),
    Refusal(
        lambda c: c.model_config.enable_prompt_embeds,
        "prompt embeddings are not supported yet: drop --enable-prompt-embeds",
    ),
    Refusal(
        lambda c: c.model_config.model_class_overrides,
        "KV policies bring their own model class: drop --model-class-overrides",
    ),
    Refusal(
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "fast prefill by KV sharing is not supported: drop --kv-sharing-fast-prefill",
    ),
    Refusal(
        lambda c: not _is_cpu() and c.cache_config.cache_dtype not in KV_CACHE_DTYPES,
        f"this KV cache type is not supported yet: set --kv-cache-dtype to one of "
        f"{', '.join(KV_CACHE_DTYPES)}",
        CACHE_DTYPE,
    ),
    Refusal(
        lambda c: c.scheduler_config.disable_hybrid_kv_cache_manager and not _unifies(c),
        "a policy's layers need KV cache groups of their own: drop "
        "--disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        lambda c: c.compilation_config.cudagraph_mode.name == "FULL",
        "CUDA graphs of whole mixed batches cannot leave out rows: set --compilation-config "
        '\'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\' or FULL_DECODE_ONLY',
    ),
    Refusal(
        lambda c: _env("VLLM_USE_BREAKABLE_CUDAGRAPH"),
        "breakable CUDA graphs would replay past a policy's prefill: set "
        "VLLM_USE_BREAKABLE_CUDAGRAPH=0 (VLLM_BATCH_INVARIANT=1 may have set it)",
    ),
    Refusal(
        lambda c: (
            c.offload_config.offload_backend == "prefetch"
            or c.offload_config.prefetch.offload_group_size > 0
        ),
        "prefetched weights assume that every step runs every layer: drop --offload-group-size; "
        "--cpu-offload-gb works",
    ),
    Refusal(
        lambda c: c.attention_config.use_non_causal,
        "bidirectional attention is not supported: drop use_non_causal from --attention-config",
    ),
    Refusal(
        lambda c: c.attention_config.hisparse_config,
        "HiSparse is not supported: drop hisparse_config from --attention-config",
    ),
    Refusal(
        lambda c: c.scheduler_config.scheduler_cls is not None,
        "KV policies bring their own scheduler: drop --scheduler-cls",
    ),
)


# Where entries can be dropped, or keys are scored.
WITH_RETENTION: tuple[Refusal, ...] = (
    Refusal(
        lambda c: _is_cpu() and str(c.model_config.dtype) != "torch.float32",
        "vLLM's CPU attention interleaves keys of this type, which retention and retrieval cannot "
        "address: set --dtype float32",
    ),
    Refusal(
        lambda c: _is_cpu() and c.cache_config.cache_dtype.startswith("fp8"),
        "retention and retrieval cannot address 8-bit keys on CPU: drop --kv-cache-dtype",
        CACHE_DTYPE,
    ),
    Refusal(
        lambda c: c.parallel_config.tensor_parallel_size > num_kv_heads(c.model_config),
        "with more ranks than KV heads, two ranks would choose different entries of one head: set "
        "--tensor-parallel-size to at most the number of KV heads",
        MODEL,
    ),
    Refusal(
        lambda c: _has_scales_by_head(c) and c.cache_config.cache_dtype not in UNSCALED,
        "this checkpoint has fp8 scales for each KV head (kv_cache_scheme with strategy "
        "attn_head), and retention and retrieval know one a layer: set --kv-cache-dtype bfloat16 "
        "or float16, or serve one that was quantized with strategy tensor",
        CACHE_DTYPE,
    ),
    Refusal(
        lambda c: str(asked_backend(c)) not in ("None", *ATTENTION_BACKENDS),
        "retention and retrieval do not know how this attention backend lays out keys: drop "
        f"--attention-backend, or set it to one of {ON_GPUS}",
        BACKEND,
    ),
)


# Where keys are scored by projected values (``Layout.value_norms``).
WITH_VALUE_NORMS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.lora_config,
        "score=critical, which criticalkv has, rates values by the output projections of the base "
        "model, which adapters change: use score=attention, snapkv in criticalkv's place, or drop "
        "--enable-lora and serve a model that the adapter is merged into",
    ),
)


# Where some requests compute or keep some layers alone (``Layout.shares_whole_prefixes``).
WITH_PARTIAL_PREFIXES: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.kv_events_config and c.kv_events_config.enable_kv_cache_events,
        "with policies that propagate, or keep unequally many entries in different layers "
        "(pyramidkv), some layers' blocks may be cached without the others', and KV cache events "
        "would promise prefixes that not every request may read: drop --kv-events-config, or "
        "these policies from the KV policy and kv_layout",
    ),
)


# Where selected tokens run in passes of their own (``Layout.selects``).
WITH_SELECTION: tuple[Refusal, ...] = (
    Refusal(
        in_pipeline,
        "selected tokens run passes of their own over layers that several ranks of the pipeline "
        f"have: {ONE_RANK}, or drop fastkv, structkv and gemfilter from the KV policy and "
        "kv_layout, and beside speed-K or selfonly-K those that score by a window (snapkv, "
        "pyramidkv, criticalkv)",
    ),
    Refusal(
        lambda c: asked_backend(c) in ONE_PLAN,
        "FlashInfer holds the plan of one batch, and selected tokens run in passes of their own, "
        f"which are planned in the same step: set --attention-backend to one of {ON_GPUS}",
        BACKEND,
    ),
)


# Where pages hold a sidecar; besides those of WITH_RETENTION, as its keys are addressed alike.
WITH_RETRIEVAL: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.model_config.get_head_size() not in HEAD_DIMS,
        f"retrieval knows head dimensions of {', '.join(map(str, HEAD_DIMS))}: serve another "
        "model, or drop fier or quest from the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: in_pipeline(c) and is_mixed(c.model_config),
        "retrieval was never tried in a pipeline of a model only some of whose layers have full "
        f"attention: {ONE_RANK}, or drop fier or quest from the KV policy",
    ),
    Refusal(
        lambda c: asked_backend(c) in NO_SIDECAR,
        "FlashInfer's pages have no room for retrieval's sidecar: set --attention-backend to one "
        f"of {ON_GPUS}",
        BACKEND,
    ),
    Refusal(
        lambda _: _env("VLLM_KV_CACHE_LAYOUT") in LAYERS_IN_BLOCKS and _may_run_cuda_ops(),
        "this KV cache layout puts all layers into each block, where retrieval's CUDA ops were "
        "never tried: unset VLLM_KV_CACHE_LAYOUT, or set KVX_RETRIEVAL_OPS=triton",
    ),
    Refusal(
        lambda c: c.compilation_config.pass_config.fuse_attn_quant,
        "retrieval writes attention's output unquantized, so its quantization cannot be fused into "
        'attention: set --compilation-config \'{"pass_config": {"fuse_attn_quant": false}}\'',
    ),
    *RETRIEVAL_BESIDE_CONNECTORS,
)


def _unifies(c: "VllmConfig") -> bool:
    """Whether vLLM itself gives all layers one KV cache group, which is told as what asks for it.

    A KV connector may have it do so, and attention in chunks, which no model that is served has.
    """
    chunk = getattr(c.model_config, "attention_chunk_size", None)
    return asked_connector(c) is not None or chunk is not None


def _has_scales_by_head(c: "VllmConfig") -> bool:
    """Whether the checkpoint's KV cache has a scale for each head."""
    scheme = getattr(c.quant_config, "kv_cache_scheme", None)
    return scheme is not None and scheme.get("strategy") == "attn_head"


def _executor_runs_without_worker(c: "VllmConfig") -> bool:
    """Whether the executor is Ray's older one; the backend may be its class or its path, too."""
    backend = c.parallel_config.distributed_executor_backend
    if backend == "ray":
        # 0.33 has the newer one alone, and no such variable.
        return not _env("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    names = [base.__name__ for base in backend.__mro__] if isinstance(backend, type) else [backend]
    return any(str(name).rpartition(".")[2] == "RayDistributedExecutor" for name in names)


def _may_run_cuda_ops() -> bool:
    """Whether retrieval runs in CUDA, as far as can be known without touching CUDA."""
    from vllm_kvx.ops.retrieval import cuda as cuda_ops
    from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE

    wanted = os.environ.get(BACKEND_VARIABLE, "")
    return wanted in ("", "cuda") and not _is_cpu() and not cuda_ops.not_built()


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _env(name: str, *where_gone: Any) -> Any:
    """vLLM's variable; `where_gone` is its value in a release that does not have it."""
    import vllm.envs

    return getattr(vllm.envs, name, *where_gone)
