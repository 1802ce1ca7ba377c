"""Where result files lie, how one is written and read, and what wrote it."""

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


def read_json(path: Path, writer: str = "", *keys: str) -> dict[str, Any]:
    """The object of a JSON file that somebody named on a command line.

    writer: what writes such files, for the message. keys: what they have at least.

    Raises:
        SystemExit: the file cannot be read or is another; its one line says which and why.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SystemExit(f"{path} is not a JSON object")
    if lacking := [key for key in keys if key not in content]:
        raise SystemExit(f"{path} is not a file of {writer}: it has no {', '.join(lacking)}")
    return content


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
