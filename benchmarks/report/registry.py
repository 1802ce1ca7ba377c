"""Which of vLLM's models policies can run, by what their code says; one JSON.

    KVX_CPU=1 python -m benchmarks.report.registry --out benchmarks/results/tests/registry.json

Counted are the names of vLLM's registry of text generation, and apart from them those of models
that also read images or sound, of which policies serve the text. Layers that slide over a window
are a matter of a checkpoint's configuration: models whose code knows windows are told apart, and
where some layers slide, policies that retain or retrieve remain. So is the language model that a
wrapper wraps, where the configuration names that. What only a loaded model shows, such as unequal
heads, is not counted.
"""

import argparse
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json

RETAIN, ALL, NONE, UNKNOWN = "retain or retrieve", "all policies", "full alone", "not importable"


def judged(name: str) -> dict[str, Any]:
    """What keeps policies from the architecture `name`, and those that remain."""
    from vllm.model_executor.models.registry import ModelRegistry

    try:
        model = ModelRegistry.models[name].load_model_cls()
        code = inspect.getsource(sys.modules[model.__module__])
    except Exception as error:  # Of a package that is not here.
        return {"policies": UNKNOWN, "why": f"{type(error).__name__}: {error}"[:120]}
    found = {"class": model.__name__, "windows": "sliding_window" in code}
    if getattr(model, "is_attention_free", False):
        return {**found, "policies": NONE, "why": "layers that keep a state"}
    is_hybrid = getattr(model, "is_hybrid", False)
    if _takes_no_text_alone(model, code):
        return {**found, "policies": NONE, "why": "takes no text alone"}
    if "MLAAttention" in code or "MultiHeadLatentAttentionWrapper" in code:
        return {**found, "policies": NONE, "why": "latent attention"}
    if "AttentionLayerBase" in code and not is_hybrid:
        return {**found, "policies": NONE, "why": "attention of its own kind"}
    if "alibi" in code and name.startswith(("Bloom", "MPT")):
        return {**found, "policies": NONE, "why": "ALiBi"}
    if model.__name__.startswith("Transformers"):
        return {**found, "policies": RETAIN, "why": "run by Transformers' code"}
    if is_hybrid:
        return {**found, "policies": RETAIN, "why": "some layers keep a state"}
    if not getattr(model, "supports_pp", False):
        return {**found, "policies": RETAIN, "why": "no SupportsPP"}
    return {**found, "policies": ALL}


def _takes_no_text_alone(model: Any, code: str) -> bool:
    flags = ("supports_multimodal_raw_input_only", "supports_transcription_only")
    if any(getattr(model, flag, False) for flag in flags):
        return True
    return re.search(r"\b(Whisper)?CrossAttention\b", code) is not None


def counted(names: Iterable[str]) -> tuple[dict[str, int], dict[str, Any]]:
    """How many of `names` run what, and each by itself."""
    models = {name: judged(name) for name in sorted(names)}
    counts = Counter(
        (row["policies"], "windows possible" if row.get("windows") else "no windows")
        for row in models.values()
    )
    return {f"{kind}, {windows}": n for (kind, windows), n in sorted(counts.items())}, models


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
    }
    write_json(args.out, content)
    for title, found in (("text", counts), ("text of wrappers", wrapper_counts)):
        for kind, n in found.items():
            print(f"{n:4} {title}: {kind}")


if __name__ == "__main__":
    main()
