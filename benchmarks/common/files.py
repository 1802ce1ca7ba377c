"""Where result files lie, how one is written, and what wrote it."""

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def write_json(path: Path, content: Any) -> None:
    """Writes the whole file or nothing: readers never see half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def kind_of(content: Any) -> str | None:
    """What wrote a file, such as compare, serving, within or evaluate; None is another."""
    if not isinstance(content, dict):
        return None
    marks = {
        "compare": ("engines", "settings", "runs", "model"),
        "serving": ("servers", "settings", "runs", "model"),
        "turns": ("policies", "cold", "load", "runs"),
        "evaluate": ("cells", "model", "tasks"),
        "speed_sweep": ("cutoffs",),
    }
    settings = content.get("settings")
    is_within = isinstance(settings, dict) and "within" in settings
    if is_within and all(key in content for key in marks["serving"]):
        return "within"
    known = (kind for kind, keys in marks.items() if all(k in content for k in keys))
    untuned = any(isinstance(each, dict) and "by_cutoff" in each for each in content.values())
    return next(known, "speed_untuned" if untuned else None)
