"""What a server with policies refuses of KV connectors, and what to change: one row each."""

import os
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING

from vllm_kvx.config.connectors import LMCACHE, NIXL
from vllm_kvx.config.policy_layers import is_mixed
from vllm_kvx.server.pipeline_checks import in_pipeline
from vllm_kvx.server.start_refusal import CONNECTOR, Refusal, asked_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvx.policy.policy import KVPolicy

# KV connectors that a policy was tried with, or whose code was read for what it copies.
CONNECTORS = ("OffloadingConnector", EXAMPLE := "ExampleConnector", NIXL, LMCACHE)
# Whether the former leaves generated tokens alone; it does unless told otherwise.
_PROMPTS = "offload_prompt_only"
# The same of LMCache, whose own connector it is that vLLM takes unless a variable is set.
_ANSWERS, _UPSTREAM = "lmcache.mp.save_decode_cache", "LMCACHE_USE_UPSTREAM_MP"
# Where LMCache has that connector.
_LMCACHES = "lmcache.integration.vllm"
# Whether LMCache stores blocks when they are about to be evicted; it does at once unless told.
_LAZY = "lmcache.mp.lazy_offload"
# Who copies blocks, LMCache's server or the engine; on a GPU it is the server unless told.
_MODE, _MODE_VARIABLE = "lmcache.mp.mp_transfer_mode", "LMCACHE_MP_TRANSFER_MODE"
# Whether NIXL hands blocks back from servers that decode; it does not unless told.
_BACK = "bidirectional_kv_xfer"
# Whether NIXL meets servers of the same kind alone; it does unless told otherwise.
_MEETS = "enforce_handshake_compat"

# Beside every policy but `full` alone.
_UNKNOWN = Refusal(
    lambda c: asked_connector(c) not in (None, *CONNECTORS),
    f"policies know {', '.join(CONNECTORS)} as KV connectors (--kv-offloading-size sets up "
    "the first), and no other: name one of these as kv_connector, or drop --kv-transfer-config",
    CONNECTOR,
)
BESIDE_CONNECTORS: tuple[Refusal, ...] = (
    _UNKNOWN,
    Refusal(
        lambda c: asked_connector(c) and in_pipeline(c),
        "KV connectors were never tried with policies in a pipeline: set --pipeline-parallel-size "
        "1, or drop --kv-transfer-config and --kv-offloading-size",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) and is_mixed(c.model_config),
        "KV connectors are not supported yet where only some layers of a model have full "
        "attention: drop --kv-transfer-config and --kv-offloading-size",
        CONNECTOR,
    ),
    Refusal(
        # vLLM would end once the weights are loaded.
        lambda c: asked_connector(c) == NIXL and find_spec("nixl") is None,
        f"{NIXL} needs NIXL, which is not installed: pip install nixl, or drop "
        "--kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == LMCACHE and c.lora_config,
        "LMCache finds prompts by their tokens and cache_salt, whichever adapter computed them: "
        "drop --enable-lora, or --kv-transfer-config and --kv-offloading-backend",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == EXAMPLE and c.lora_config,
        f"{EXAMPLE} finds prompts by their tokens alone, whichever adapter computed them: drop "
        "--enable-lora, or --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == LMCACHE and _is_told(c, _LAZY),
        "LMCache was never tried with policies where it stores blocks as they are evicted: drop "
        f"{_LAZY} from --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == LMCACHE and _is_other(),
        f"{LMCACHE} is to store prompts alone and to let requests pass by, which policies know of "
        f"LMCache's own in 0.5.6: pip install lmcache==0.5.6, and leave {_UPSTREAM} unset",
        CONNECTOR,
    ),
)

# Where prompts retrieve.
RETRIEVAL_BESIDE_CONNECTORS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: _stores_answers(c),
        "tokens that are generated under retrieval leave other entries than a prompt's would, and "
        f"no request may load these: drop {_PROMPTS} from --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == LMCACHE and _is_told(c, _ANSWERS),
        "tokens that are generated under retrieval leave other entries than a prompt's would, and "
        f"no request may load these: drop {_ANSWERS} from --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == LMCACHE and _engine_copies(c),
        "on a GPU LMCache's mode engine_driven copies as if pages held keys and values alone, and "
        f"those of retrieval hold more: drop {_MODE} from --kv-transfer-config and unset "
        f"{_MODE_VARIABLE}, so that LMCache's server copies",
        CONNECTOR,
    ),
    Refusal(
        lambda c: _hands_answers_back(c),
        "a server that prefills would load what another has generated under retrieval, which are "
        f"other entries than a prompt's would be: drop {_BACK} from --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == NIXL and _through_host(c),
        "NIXL was never tried with buffers on the host: drop kv_buffer_device from "
        "--kv-transfer-config",
        CONNECTOR,
    ),
)

# Where prompts may end up with fewer entries than tokens in any layer (``Layout.keeps_prompts``).
_STORES_WHOLE_PROMPTS = Refusal(
    lambda c: asked_connector(c) not in (None, NIXL),
    "KV connectors and KV offloading store blocks of whole prompts, which policies that retain "
    f"or propagate do not leave, and only {NIXL} hands over what is kept: name it as "
    "kv_connector, drop --kv-transfer-config and --kv-offloading-size, or drop all policies "
    "but full, fier and quest from the KV policy and kv_layout, which know "
    f"{', '.join(CONNECTORS)}",
    CONNECTOR,
)
WITHOUT_WHOLE_PROMPTS: tuple[Refusal, ...] = (
    _STORES_WHOLE_PROMPTS,
    Refusal(
        lambda c: asked_connector(c) == NIXL and _hands_answers_back(c),
        "a server that prefills cannot go on from what another has kept of a prompt: drop "
        f"{_BACK} from --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == NIXL and _through_host(c),
        "NIXL was never tried with buffers on the host: drop kv_buffer_device from "
        "--kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == NIXL and _meets_all(c),
        "servers without policies would take what is kept of a prompt for all of it, and NIXL's "
        f"check keeps them apart: drop {_MEETS} from --kv-transfer-config",
        CONNECTOR,
    ),
    Refusal(
        lambda c: asked_connector(c) == NIXL and c.model_config.return_sampling_mask,
        "what could have been sampled in the place of the first token is not handed over: drop "
        "--return-sampling-mask, or --kv-transfer-config",
    ),
)


def beside_connectors(policy: "KVPolicy") -> str | None:
    """Why a server with a KV connector cannot run `policy`; None if it can."""
    if policy.num_generated:
        return (
            f"{policy} waits for generated tokens, and a prompt is handed over before there are "
            "any: leave out after=, or drop --kv-transfer-config"
        )
    return None


def not_imported(connector: str, keeps_prompts: bool) -> str | None:
    """What is refused of `connector` where vLLM cannot import something; None if nothing is.

    keeps_prompts: whether all policies keep whole prompts, see ``KVPolicy.keeps_prompts``.
    """
    if not keeps_prompts and connector != NIXL:
        return _STORES_WHOLE_PROMPTS.reason
    if connector not in CONNECTORS:
        return _UNKNOWN.reason
    if connector == LMCACHE and (error := _lack_of_lmcache()) is not None:
        return (
            f"{LMCACHE} needs LMCache, which cannot be imported ({error}): pip install "
            "lmcache==0.5.6, or drop --kv-transfer-config and --kv-offloading-backend"
        )
    return None


def _lack_of_lmcache() -> ImportError | None:
    """Why LMCache's own connector cannot be imported; None if it can."""
    try:
        import_module(f"{_LMCACHES}.lmcache_mp_connector")
    except ImportError as error:
        return error
    return None


def _stores_answers(c: "VllmConfig") -> bool:
    """Whether a KV connector was told to store generated tokens, too."""
    config = c.kv_transfer_config
    return config is not None and not config.get_from_extra_config(_PROMPTS, True)


def _is_told(c: "VllmConfig", key: str) -> bool:
    """Whether a KV connector was told to do what it leaves by default."""
    config = c.kv_transfer_config
    return config is not None and bool(config.get_from_extra_config(key, False))


def _engine_copies(c: "VllmConfig") -> bool:
    """Whether LMCache was told that the engine copies blocks, on a GPU.

    LMCache 0.5.6 then builds what it tells its CUDA kernels of a page
    (``transfer_context/base.py``) without the distance between pages, which is larger than one's
    keys and values where 1-bit keys or page bounds lie behind them. On a CPU torch copies, by
    the tensors' own strides.
    """
    config = c.kv_transfer_config
    if config is None or c.device_config.device_type == "cpu":
        return False
    # A key that is there goes before the variable, be it null, which is LMCache's default.
    mode = config.get_from_extra_config(_MODE, os.environ.get(_MODE_VARIABLE, ""))
    return str(mode).lower() == "engine_driven"


def _is_other() -> bool:
    """Whether vLLM would take a connector that cannot leave generated tokens out, or a request.

    That is vLLM's own, also where LMCache's cannot be imported, or another version of LMCache's.
    ``external_prefixes`` has what it passes by, and calls what is looked for here.
    """
    if os.environ.get(_UPSTREAM):
        return True
    try:
        metadata = import_module(f"{_LMCACHES}.lmcache_mp_metadata")
        connector = import_module(f"{_LMCACHES}.lmcache_mp_connector")
        store = metadata.LMCacheMPRequestMetadata.GetStoreMetadata
        return not (
            "save_decode_cache" in signature(store).parameters
            and hasattr(metadata.LMCacheMPRequestState, "BYPASS_LMCACHE")
            and hasattr(connector.LMCacheMPConnector, "_get_or_create_request_tracker")
        )
    except (ImportError, AttributeError):
        return True


def _hands_answers_back(c: "VllmConfig") -> bool:
    """Whether servers that prefill may fetch what servers that decode have generated."""
    config = c.kv_transfer_config
    return config is not None and bool(config.get_from_extra_config(_BACK, False))


def _meets_all(c: "VllmConfig") -> bool:
    """Whether NIXL was told to meet servers of any kind."""
    config = c.kv_transfer_config
    return config is not None and not config.get_from_extra_config(_MEETS, True)


def _through_host(c: "VllmConfig") -> bool:
    """Whether a KV connector copies blocks by way of the host's memory."""
    config = c.kv_transfer_config
    is_cpu = c.device_config.device_type == "cpu"
    return config is not None and config.kv_buffer_device == "cpu" and not is_cpu
