"""Which attention backends a server's policies can use, and that vLLM chooses one of those.

On some GPUs vLLM's first choice is none: FlashInfer on Blackwell, whose pages have no room for a
sidecar. A backend that was asked for is left as it is, and refused if it cannot work. Layers whose
entries are 8-bit integers have one of our own (``int8_cache``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from vllm import platforms
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.compat.vllm_signatures import check, seams_of
from vllm_kvx.ops.paged import ATTENTION_BACKENDS, NO_SIDECAR, ONE_PLAN
from vllm_kvx.policy.cache_dtype import INT8
from vllm_kvx.policy.layout import Layout

logger = init_logger("vllm.kvx.worker")

_INT8_BACKEND = "vllm_kvx.worker.int8_cache.backend"
# What is asked for in turn.
ON_DEVICES = tuple(name for name in ATTENTION_BACKENDS if name != "CPU_ATTN")


class Unusable(NamedTuple):
    """Why policies cannot use an attention backend, and the names of those that they can."""

    reason: str
    instead: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.reason}: set --attention-backend to one of {', '.join(self.instead)}"


def why_unusable(layout: Layout, backend: Any) -> Unusable | None:
    """What keeps a server's policies from an attention backend of vLLM's; None if nothing does."""
    name = backend.get_name()
    if layout.projects and backend.forward_includes_kv_cache_update:
        return Unusable(
            f"swiftkv stores keys without attending to them, and attention backend {name} does "
            "both at once",
            ATTENTION_BACKENDS,
        )
    if not (layout.retain or layout.window or layout.sidecar) or _is_ours(backend):
        return None  # Nobody addresses keys, or it was made for that.
    reasons = {
        "retention and retrieval do not know how attention backend {} lays out keys": (
            lambda each: each not in ATTENTION_BACKENDS
        ),
        "the pages of attention backend {} have no room for retrieval's sidecar": (
            lambda each: layout.sidecar is not None and each in NO_SIDECAR
        ),
        "attention backend {} plans one batch a step, and selected tokens run in passes of their "
        "own": lambda each: layout.selects and each in ONE_PLAN,
        "attention backend {} plans one batch a step, and drafted tokens run in passes of their "
        "own": lambda each: layout.lookahead > 0 and each in ONE_PLAN,
    }
    reason = next((text for text, is_so in reasons.items() if is_so(name)), None)
    if reason is None:
        return None
    known = [each for each in ATTENTION_BACKENDS if not any(so(each) for so in reasons.values())]
    return Unusable(reason.format(name), tuple(known))


@contextmanager
def choosing_usable(layout: Layout) -> Iterator[None]:
    """Inside, vLLM chooses an attention backend that the server's policies can use.

    Where its own choice is none of them, it is asked for each of those in turn, and takes the first
    that suits the layer and the device. Where none does, its choice stays, which is refused once
    the model is loaded.
    """
    platform: Any = platforms.current_platform
    stock: Callable[..., str] = platform.get_attn_backend_cls

    def get_attn_backend_cls(
        selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.kv_cache_dtype == INT8:
            return _for_int8(attn_selector_config)
        path = stock(selected_backend, attn_selector_config, num_heads)
        if selected_backend is not None or attn_selector_config.attn_type != AttentionType.DECODER:
            return path
        first = resolve_obj_by_qualname(path)
        if (unusable := why_unusable(layout, first)) is None:
            return path
        for name in ON_DEVICES:
            # Unless the device or the layer rules it out, or its package is not there.
            with suppress(ValueError, ImportError):
                other = stock(AttentionBackendEnum[name], attn_selector_config, num_heads)
                if why_unusable(layout, resolve_obj_by_qualname(other)) is None:
                    logger.info_once(
                        "Attention backend %s takes the place of %s, vLLM's choice here: %s.",
                        *(name, first.get_name(), unusable.reason),
                    )
                    return other
        return path

    selector._cached_get_attn_backend.cache_clear()
    platform.get_attn_backend_cls = get_attn_backend_cls
    try:
        yield
    finally:
        # What was chosen here is no other engine's.
        selector._cached_get_attn_backend.cache_clear()
        del platform.get_attn_backend_cls  # The class has its own.


def _is_ours(backend: Any) -> bool:
    return getattr(backend, "__module__", None) == _INT8_BACKEND


def _for_int8(config: Any) -> str:
    """The path of the backend of our own for layers whose entries are 8-bit integers.

    Raises:
        ValueError: it cannot run such a layer, or not on this device.
        RuntimeError: it was not written for this vLLM.
    """
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from vllm_kvx.worker.int8_cache.backend import Int8AttentionBackend, register

    check(seams_of("int8"))
    # None on a CPU.
    capability: Any = platforms.current_platform.get_device_capability()
    problems = Int8AttentionBackend.validate_configuration(
        device_capability=capability, **config._asdict()
    )
    on_gpu = capability is not None
    if on_gpu and config.dtype != torch.float32 and get_flash_attn_version() is None:
        problems.append("this build of vLLM lacks FlashAttention, which reads prompts")
    if problems:
        raise ValueError(
            f"a KV cache of {INT8} under policies: {', '.join(problems)}: set another "
            "--kv-cache-dtype"
        )
    logger.info_once("Layers with a KV cache of %s have an attention backend of vllm-kvx.", INT8)
    return register()
