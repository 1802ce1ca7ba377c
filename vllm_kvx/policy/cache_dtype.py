"""KV cache dtypes that policies run over, and how a name says that one changes answers."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvx.policy.policy import KVPolicy

# The policy without a part: stock attention over all entries.
FULL = "full"
# Whose entries are stored as they are, whatever scales a checkpoint has.
UNSCALED = ("bfloat16", "float16")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
# With a scale for each token and KV head; see ``why_not_over``.
INT8 = "int8_per_token_head"
# The least compute capability of GPUs that run policies over it: FlashAttention reads prompts.
INT8_CAPABILITY = (8, 0)
# `auto` takes the checkpoint's type.
KV_CACHE_DTYPES = ("auto", *UNSCALED, *FP8, INT8)
_LOSSLESS = (None, "auto", *UNSCALED)

# vLLM's option of the layers that keep the model's dtype, and what it takes beside their numbers.
SKIP_LAYERS = "kv_cache_dtype_skip_layers"
SLIDING_WINDOW = "sliding_window"
_SKIP = "-skip-"
_SKIPPED = rf"([0-9]+|{SLIDING_WINDOW})"
# A regular expression of what may stand behind the @ of a name.
DTYPE_PATTERN = rf"[a-z0-9_]+({_SKIP}{_SKIPPED}(-{_SKIPPED})*)?"


def at_dtype(dtype: str | None) -> str:
    """What a policy's name has behind it over such a KV cache: `@fp8`; see `dtype_name`."""
    name = dtype_name(dtype)
    return f"@{name}" if name else ""


def dtype_name(dtype: str | None) -> str:
    """What names and records call such a KV cache: `fp8`, or `fp8-skip-0-1`.

    Nothing for 16-bit ones, which are taken as lossless, and for `auto`: see `dtype_of_engine`.
    """
    quantized, skipped = split_skipped(dtype or "auto")
    if quantized in _LOSSLESS:
        return ""
    return with_skipped("fp8" if quantized == "fp8_e4m3" else quantized, skipped)


def with_skipped(dtype: str, skipped: Iterable[str]) -> str:
    """One name of a dtype and of the layers that keep the model's own: `fp8-skip-0-1`.

    skipped: as vLLM takes them, numbers of layers or `sliding_window`, in any order.
    """
    each = sorted(set(skipped), key=lambda layer: (not layer.isdigit(), layer.zfill(9)))
    return f"{dtype}{_SKIP}{'-'.join(each)}" if each else dtype


def split_skipped(name: str) -> tuple[str, list[str]]:
    """The dtype and the skipped layers that `with_skipped` made `name` of."""
    dtype, _, skipped = name.partition(_SKIP)
    return dtype, skipped.split("-") if skipped else []


def cache_options(name: str) -> dict[str, Any]:
    """The options of an engine whose KV cache has such a name; they replace those of another."""
    dtype, skipped = split_skipped(name)
    return {"kv_cache_dtype": dtype, SKIP_LAYERS: skipped}


def dtype_in(options: Mapping[str, Any]) -> str | None:
    """The name of the KV cache that options of an engine ask for; None where they do not say."""
    dtype: str | None = options.get("kv_cache_dtype")
    skipped = options.get(SKIP_LAYERS)
    return with_skipped(dtype or "auto", map(str, skipped)) if skipped else dtype


def is_dtype_name(name: str) -> bool:
    """Whether it is formed as what may stand behind the @ of a name."""
    return re.fullmatch(DTYPE_PATTERN, name) is not None


def split_dtype(name: str) -> tuple[str, str | None]:
    """Policy and KV cache dtype of a name; None where it leaves that to the engine."""
    policy, _, dtype = name.partition("@")
    return policy, dtype or None


def why_not_over(dtype: str | None, policy: "KVPolicy") -> str | None:
    """Why `policy` does not run over a KV cache of such a dtype; None where it does.

    dtype: one of `KV_CACHE_DTYPES`, or the name of one with the layers that skip it.
    """
    if split_skipped(dtype or "auto")[0] != INT8 or policy.keeps_prompts:
        return None
    return f"drops or moves entries, or has tokens skip layers, which was never tried over {INT8}"
