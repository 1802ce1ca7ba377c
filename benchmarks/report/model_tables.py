"""docs/use/models.md's tables of models, from what `benchmarks.report.registry` counted.

    python -m benchmarks.report.model_tables
    python -m benchmarks.report.model_tables --check

The tables stand between two lines of the page, BEGIN and END. `--check` writes nothing, and fails
when they are not what the file says.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.files import RESULTS, ROOT
from benchmarks.report.model_code import ALL, NONE, RETAIN
from benchmarks.report.readme import with_table
from benchmarks.report.recipes import BESIDE_WINDOWS, NOT_KNOWN

REGISTRY = RESULTS / "tests" / "registry.json"
PAGE = ROOT / "docs" / "use" / "models.md"
BEGIN, END = "<!-- tables of models -->", "<!-- /tables of models -->"
# By the file's words, the page's.
_POLICIES = {
    ALL: "all",
    BESIDE_WINDOWS: "`speed-K`; `fastkv`, `structkv` and `gemfilter` at a layer with full "
    "attention; those that retain or retrieve",
    RETAIN: "those that retain or retrieve",
    NONE: "`full` alone",
    NOT_KNOWN: "not known",
}
_ENDS = re.compile(r"(ForCausalLM|ForConditionalGeneration|ForBlockDiffusion|Generation)$")


def tables(counted: Mapping[str, Any]) -> list[str]:
    """Lines of both tables: names of vLLM's registry, and its recipes, by policies that remain.

    counted: the content of REGISTRY.
    """
    text, wrappers = (_of_names(counted[name]) for name in ("models", "wrappers"))
    lines = [
        "| policies, by vLLM's code | names of text generation "
        "| names that also read images or sound |",
        "|---|---|---|",
    ]
    for policies in dict.fromkeys([*(ALL, RETAIN, NONE), *text, *wrappers]):
        shown = _POLICIES.get(policies, policies)
        lines.append(f"| {shown} | {text.get(policies, '')} | {wrappers.get(policies, '')} |")
    recipes = counted["recipes"]
    lines += ["", "| policies | recipes | architectures |", "|---|---|---|"]
    for policies, shown in _POLICIES.items():
        of_them = {m: r for m, r in recipes["models"].items() if r["policies"] == policies}
        lines.append(f"| {shown} | {len(of_them)} | {_architectures(of_them)} |")
    return lines


def _of_names(models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By policies, how many names remain with them, in words."""
    found: dict[str, str] = {}
    for policies in dict.fromkeys(row["policies"] for row in models.values()):
        rows = [row for row in models.values() if row["policies"] == policies]
        more = []
        if windows := sum(row.get("windows", False) for row in rows if policies == ALL):
            more.append(f"{windows} know windows")
        if by_checkpoint := sum(row.get("by_checkpoint", False) for row in rows):
            more.append(f"{by_checkpoint} by the language model that a checkpoint names")
        found[policies] = str(len(rows)) + (f" ({', '.join(more)})" if more else "")
    return found


def _architectures(models: Mapping[str, Mapping[str, Any]]) -> str:
    """The architectures of recipes by why other policies do not remain, most common first."""
    by_reason: dict[str, Counter[str]] = {}
    for row in models.values():
        # What is about a language model comes behind its name, and what remains at most at the end.
        why = re.sub(r"^\w+: (?=[a-z])|;.*$", "", row.get("why", ""))
        if "Error: " in row.get("why", ""):
            why = "a module that cannot be imported"
        name = _ENDS.sub("", row.get("architecture", ""))
        by_reason.setdefault(why, Counter())[name] += 1
    return "; ".join(
        f"{why}: {_names(found)}".removeprefix(": ").replace(": (", " (").removesuffix(": ")
        for why, found in sorted(by_reason.items(), key=lambda each: -each[1].total())
    )


def _names(found: Counter[str]) -> str:
    return ", ".join(f"{name} ({n})".strip() if n > 1 else name for name, n in found.most_common())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.report.model_tables", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="fail if the tables are not so")
    parser.add_argument("--counted", type=Path, default=REGISTRY, help="what registry wrote")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    old = args.page.read_text(encoding="utf-8")
    try:
        lines = tables(json.loads(args.counted.read_text(encoding="utf-8")))
        new = with_table(old, lines, BEGIN, END)
    except ValueError as error:
        print(f"{args.page.name}: {error}", file=sys.stderr)
        return 1
    if args.check:
        if wrong := old != new:
            print(f"{args.page.name}: not so; run python -m benchmarks.report.model_tables")
        return int(wrong)
    args.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
