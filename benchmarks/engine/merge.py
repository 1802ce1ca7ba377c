"""One results file of several that were measured side by side, on GPUs of one machine.

    python -m benchmarks.engine.merge OUT.json A.json B.json

Takes files of `benchmarks.engine.compare`, of `benchmarks.serving`, or of its `within`, with the
same model, settings and kind of GPU. Engines and servers keep the run that measured them. Where two
files have the same case, that of the later file stays, unless it failed there.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.files import kind_of, read_json, write_json
from benchmarks.engine.compare import derive
from benchmarks.engine.shapes import shape_of

# By kind: where its engines are, and what of an engine is merged one by one.
_PARTS = {
    "compare": ("engines", "cases"),
    "serving": ("servers", "settings"),
    "within": ("servers", "settings"),
}


def merge(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Raises ValueError, saying what differs, if the files do not belong together."""
    kinds = {kind_of(content) for content in contents}
    kind = next(iter(kinds), None)
    if len(kinds) != 1 or kind not in _PARTS:
        raise ValueError(
            "give files of benchmarks.engine.compare, of benchmarks.serving, or of its within"
        )
    for key in ("model", "settings"):
        if any(content[key] != contents[0][key] for content in contents):
            raise ValueError(f"the files differ in their {key}")
    if len({run["gpu"] for content in contents for run in content["runs"]}) != 1:
        raise ValueError("the files were measured on different GPUs or drivers")
    name, parts = _PARTS[kind]
    # The head of the last run, with the first file's sentence.
    last = max(contents, key=lambda content: str(content["about"]["date"]))
    head = {**last["about"], "what": contents[0]["about"]["what"]}
    merged: dict[str, Any] = {**contents[0], "about": head, "runs": [], name: {}}
    if notes := [content["note"] for content in contents if content.get("note")]:
        merged["note"] = " ".join(notes)
    for content in contents:
        before = len(merged["runs"])
        merged["runs"] += content["runs"]
        for engine, entry in content[name].items():
            _add(merged[name], engine, entry, parts, before)
    if kind == "compare":
        derive(merged, shape_of(merged["model"]))
    return merged


def _add(
    engines: dict[str, Any], engine: str, entry: Mapping[str, Any], parts: str, before: int
) -> None:
    """Adds an engine's entry, of a file with `before` runs in front of its own."""
    moved = dict(entry)
    if "run" in moved:
        moved["run"] += before
    moved[parts] = {
        case: {**result, "run": result["run"] + before} if "run" in result else dict(result)
        for case, result in entry.get(parts, {}).items()
    }
    if there := engines.get(engine):
        for each in (there, moved):
            # From here on the entry is of several runs.
            for result in each[parts].values() if "run" in each else ():
                result.setdefault("run", each["run"])
        failed = {case for case, result in moved[parts].items() if "error" in result}
        kept = {case: result for case, result in there[parts].items() if case in failed}
        moved[parts] = {**there[parts], **moved[parts], **kept}
        moved = {**there, **moved}
    engines[engine] = moved


def main(argv: Sequence[str]) -> int:
    if len(argv) < 3:
        raise SystemExit(__doc__)
    out, *files = map(Path, argv)
    try:
        merged = merge([read_json(file) for file in files])
    except ValueError as error:
        raise SystemExit(f"benchmarks.engine.merge: {error}") from error
    write_json(out, merged)
    print(f"{out}: {', '.join(merged.get('engines') or merged['servers'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
