"""Which of vLLM's models policies can run, by what their code says; one JSON.

    KVX_CPU=1 python -m benchmarks.report.registry --out benchmarks/results/tests/registry.json

Counted are the names of vLLM's registry of text generation, and apart from them those of models
that also read images or sound, of which policies serve the text. A model is judged by the classes
that its own class reaches (`model_code`), and one that wraps a language model by that as well.
Layers that slide over a window are a matter of a checkpoint's configuration: models whose code
knows windows are told apart, and where some layers slide, speed-K, methods that select at a layer
with full attention, and policies that retain or retrieve remain. Where a wrapper takes the language
model that a checkpoint names, its own code is an upper bound, and is counted as such. The models of
vLLM's recipes are counted besides, see `recipes`. What only a loaded model shows, such as unequal
heads, is not counted.
"""

import argparse
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.report.model_code import ALL, NONE, ORDER, RETAIN, UNKNOWN, ModelCode
from benchmarks.report.recipes import recipes


@functools.cache
def judged(name: str) -> dict[str, Any]:
    """What keeps policies from the architecture `name`, and those that remain.

    `language_models` of the answer are the architectures that it has vLLM make; `by_checkpoint`
    says that a checkpoint names that, so that `policies` are the most that may remain.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    try:
        model = ModelRegistry.models[name].load_model_cls()
        code = ModelCode(model)
    except Exception as error:  # Of a package that is not here.
        return {"policies": UNKNOWN, "why": f"{type(error).__name__}: {error}"[:120]}
    is_transformers = model.__name__.startswith("Transformers")
    windows = "sliding_window" in code.source and not is_transformers
    found: dict[str, Any] = {"class": model.__name__, "windows": windows}
    if "hybrid_layer_pattern" in code.source:
        found["lists_layers"] = False  # As layer_types do, by which a server knows what slides.
    policies, why = _judged(name, model, code)
    inner = [each for each in dict.fromkeys(code.named) if code.asks and each != name]
    for each in inner:
        row = judged(each)
        found["windows"] = found["windows"] or row.get("windows", False)
        if not row.get("lists_layers", True):
            found["lists_layers"] = False
        if row["policies"] in ORDER and ORDER.index(row["policies"]) > ORDER.index(policies):
            policies, why = row["policies"], f"{each}: {row['why']}"
    if inner:
        found["language_models"] = inner
    elif code.asks and policies != NONE:
        found["by_checkpoint"] = True
    return {**found, "policies": policies, **({"why": why} if why else {})}


def _judged(name: str, model: type, code: ModelCode) -> tuple[str, str]:
    """Policies that remain by a model's own code, and what keeps the others from it."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    if getattr(model, "is_attention_free", False):
        return NONE, "layers that keep a state"
    if _takes_no_text_alone(model, code):
        return NONE, "takes no text alone"
    if model.__name__.startswith("Transformers"):
        return RETAIN, "run by Transformers' code"
    if code.has_latent_attention:
        return NONE, "latent attention"
    is_hybrid = getattr(model, "is_hybrid", False)
    if not is_hybrid and any(issubclass(each, AttentionLayerBase) for each in code.classes):
        return NONE, "attention of its own kind"
    if "ChunkedLocalAttention" in code.source:
        return NONE, "attention within chunks"
    if "alibi" in code.source and name.startswith(("Bloom", "MPT")):
        return NONE, "ALiBi"
    if is_hybrid:
        return RETAIN, "some layers keep a state"
    if not getattr(model, "supports_pp", False):
        return RETAIN, "no SupportsPP"
    return ALL, ""


def _takes_no_text_alone(model: type, code: ModelCode) -> bool:
    flags = ("supports_multimodal_raw_input_only", "supports_transcription_only")
    if any(getattr(model, flag, False) for flag in flags):
        return True
    return re.search(r"\b(Whisper)?CrossAttention\b", code.source) is not None


def counted(names: Iterable[str]) -> tuple[dict[str, int], dict[str, Any]]:
    """How many of `names` run what, and each by itself."""
    models = {name: judged(name) for name in sorted(names)}
    counts = Counter(
        ", ".join(
            [
                row["policies"],
                *(["windows possible"] if row.get("windows") and row["policies"] != NONE else []),
                *(["at most, by the checkpoint"] if row.get("by_checkpoint") else []),
            ]
        )
        for row in models.values()
    )
    return dict(sorted(counts.items())), models


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.report.registry")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from vllm.model_executor.models import registry

    counts, models = counted(registry._TEXT_GENERATION_MODELS)
    wrapper_counts, wrappers = counted(registry._MULTIMODAL_MODELS)
    what = "Which of vLLM's models policies can run, by what their code says."
    content = {
        "about": about(what, command_line("benchmarks.report.registry", sys.argv[1:])),
        "counts": counts,
        "wrapper_counts": wrapper_counts,
        "models": models,
        "wrappers": wrappers,
        "recipes": (of_recipes := recipes(judged)),
    }
    write_json(args.out, content)
    titles = ("text", "text of wrappers", "recipe")
    for title, found in zip(titles, (counts, wrapper_counts, of_recipes["counts"]), strict=True):
        for kind, n in found.items():
            print(f"{n:4} {title}: {kind}")


if __name__ == "__main__":
    main()
