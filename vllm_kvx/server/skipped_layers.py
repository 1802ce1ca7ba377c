"""Layers that skip a quantized KV cache under policies, and what is refused beside them.

All layers are one KV group of one block size then, whose pages vLLM packs by each layer's own size.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_kvx.config.cache_dtype import dtype_of_engine, skipped_layers
from vllm_kvx.config.policy_layers import is_mixed
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.cache_dtype import SLIDING_WINDOW, split_skipped
from vllm_kvx.policy.layout import layout_of
from vllm_kvx.server.draft_checks import has_layers
from vllm_kvx.server.pipeline_checks import in_pipeline
from vllm_kvx.server.start_refusal import asked_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FLAG = "--kv-cache-dtype-skip-layers"


def beside_skipped_layers(c: "VllmConfig", settings: KVSettings) -> list[str]:
    """What keeps a server's policies from running where layers skip its quantized KV cache."""
    skipped = skipped_layers(c)
    if not skipped:
        return []
    num_layers, layout = settings.num_layers, settings.layout
    if is_mixed(c.model_config):
        return [
            "some layers of this model slide over a window or keep a state, and beside them "
            f"layers of two KV cache types were never tried under policies: drop {FLAG}"
        ]
    problems = _unknown(skipped, map(str, range(num_layers)), num_layers)
    if len(layout.stages) > 1:
        divides = [p for p in settings.policies if len(layout_of([p], num_layers).stages) > 1]
        problems.append(
            f"{', '.join(map(str, divides))} cuts layers into stages, whose pages must have one "
            f"size, and those of layers that skip a quantized KV cache are larger: drop {FLAG}, or "
            "serve policies that neither propagate nor keep unequally many entries in different "
            "layers (snapkv, criticalkv, fier and others)"
        )
    never = {
        "beside a KV connector": (
            asked_connector(c),
            "--kv-transfer-config and --kv-offloading-size",
        ),
        "in a pipeline": (in_pipeline(c), "--pipeline-parallel-size"),
        "beside a drafter with layers of its own": (has_layers(c), "--speculative-config"),
        "where the model drafts for itself": (layout.own_drafts, "--speculative-config"),
        "with lookahead=": (layout.lookahead, "lookahead= of the KV policy and kv_layout"),
    }
    problems += [
        f"layers of two KV cache types were never tried {where}: drop {FLAG}, or {flag}"
        for where, (applies, flag) in never.items()
        if applies
    ]
    return problems


def beside_stock(c: "VllmConfig") -> list[str]:
    """What names of skipped layers keep a server of `full` alone from its start: unknown ones.

    They would be in the name of the KV cache that its answers are recorded under. A drafter's
    layers may have numbers behind the model's, so that beside one no name is judged.
    """
    if c.speculative_config is not None:
        return []
    num_layers = c.model_config.get_total_num_hidden_layers()
    windows = [] if c.model_config.get_sliding_window() is None else [SLIDING_WINDOW]
    return _unknown(skipped_layers(c), [*map(str, range(num_layers)), *windows], num_layers)


def _unknown(skipped: list[str], known: Iterable[str], num_layers: int) -> list[str]:
    names = set(known)
    if unknown := [layer for layer in skipped if layer not in names]:
        return [
            f"{', '.join(unknown)}: no such layer has a KV cache that could be quantized, layers "
            f"are 0 to {num_layers - 1}: take it out of {FLAG}"
        ]
    return []


def line_of(c: "VllmConfig") -> str | None:
    """What the log says of such a server; None where all layers have one KV cache type."""
    dtype, skipped = split_skipped(dtype_of_engine(c))
    if not skipped:
        return None
    layers = f"layer {skipped[0]}" if len(skipped) == 1 else f"layers {', '.join(skipped)}"
    return (
        f"KV cache: {dtype}, but {layers} in the model's {str(c.model_config.dtype)[6:]}. Answers "
        f"over it are recorded as @{dtype_of_engine(c)}."
    )
