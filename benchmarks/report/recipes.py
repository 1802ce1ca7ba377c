"""Which of the models that vLLM's recipes are about policies can run.

The recipes are at https://recipes.vllm.ai; `recipes.json` has those whose task is text, of text
alone or of images too, with the architecture of each model as far as it is known, and from where.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.model_code import ALL, NONE, RETAIN, UNKNOWN

RECIPES = Path(__file__).with_name("recipes.json")
BESIDE_WINDOWS = "speed-K, retain or retrieve"
NOT_KNOWN = "not known"


def recipes(judged: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """The head of `recipes.json`, counts of the policies that remain, and each model by itself.

    judged: what the code of an architecture says, see ``registry.judged``.
    """
    content = json.loads(RECIPES.read_text())
    models = {}
    for recipe in content.pop("recipes"):
        policies, why = _remaining(recipe, judged)
        models[recipe["model"]] = {
            **{key: value for key, value in recipe.items() if key != "model"},
            "policies": policies,
            **({"why": why} if why else {}),
        }
    counts = Counter(row["policies"] for row in models.values())
    by_class: dict[str, Counter[str]] = {}
    for row in models.values():
        by_class.setdefault(row["policies"], Counter())[row.get("architecture", NOT_KNOWN)] += 1
    return {
        **content,
        "counts": dict(counts.most_common()),
        "by_class": {kind: dict(found.most_common()) for kind, found in by_class.items()},
        "models": models,
    }


def _remaining(
    recipe: Mapping[str, Any], judged: Callable[[str], Mapping[str, Any]]
) -> tuple[str, str]:
    """Policies that a recipe's model can run, and what keeps the others from it."""
    if "architecture" not in recipe:
        return NOT_KNOWN, "its architecture"
    if "limit" in recipe:
        return NONE, recipe["limit"]
    row = judged(recipe["architecture"])
    policies, why = row["policies"], row.get("why", "")
    if row.get("by_checkpoint") and policies != NONE:
        if "language_model" not in recipe:
            return NOT_KNOWN, f"the language model; at most: {policies}"
        inner = judged(recipe["language_model"])
        order = (ALL, RETAIN, NONE, UNKNOWN)
        if order.index(inner["policies"]) > order.index(policies):
            policies, why = inner["policies"], inner.get("why", "")
        row = inner
    if policies == UNKNOWN:
        return NOT_KNOWN, why
    if policies == NONE or not (row.get("windows") or recipe.get("slides")):
        return policies, why
    if recipe.get("slides") and not row.get("lists_layers", True):
        return NONE, "its configuration does not list which layers slide over a window"
    if policies == RETAIN:
        return policies, why
    if "slides" not in recipe:
        return NOT_KNOWN, f"whether layers slide over a window; at most: {policies}"
    return (BESIDE_WINDOWS, "some layers slide") if recipe["slides"] else (policies, why)
