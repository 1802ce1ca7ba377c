"""Result files: each in a folder by its subject, with a head that says what was run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.about import KEYS, about, command_line, versions
from benchmarks.common.files import RESULTS

FOLDERS = {"answers", "engine", "old", "ops", "serving", "tests", "tuning"}
FILES = sorted(RESULTS.rglob("*.json"))
HEAD = {"what": "A file.", "command": None, "date": None, "commit": None, "device": None}


def faults(content: Any) -> list[str]:
    """What is wrong with a file's head."""
    if not isinstance(content, dict) or next(iter(content), None) != "about":
        return ["does not begin with `about`"]
    head = content["about"]
    if tuple(head) != KEYS:
        return [f"its `about` has {', '.join(head)}, not {', '.join(KEYS)}"]
    found = []
    what = head["what"]
    if not isinstance(what, str) or not re.fullmatch(r"[^\n]*\.", what):
        found.append("`what` is no sentence")
    elif ". " in what:
        found.append("`what` is more than one sentence")
    if not all(head[key] is None or isinstance(head[key], str) for key in KEYS[2:5]):
        found.append("date, commit and device are text or null")
    if head["date"] is not None and not re.match(r"\d{4}-\d\d-\d\d", head["date"]):
        found.append("the date begins with no yyyy-mm-dd")
    commands = head["command"] if isinstance(head["command"], list) else [head["command"]]
    if not commands or not all(each is None or isinstance(each, str) for each in commands):
        found.append("the command is text, several texts, or null")
    if not isinstance(head["versions"], dict | None):
        found.append("versions are by package, or null")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_what_was_run(path: Path) -> None:
    assert faults(json.loads(path.read_text(encoding="utf-8"))) == []


def test_files_lie_in_folders_by_subject() -> None:
    """Also what belongs to a file, such as its plot; and no two have one name: links go by it."""
    paths = [path for path in RESULTS.rglob("*") if path.is_file() and path.suffix != ".log"]
    assert FILES and {path.parent.relative_to(RESULTS).as_posix() for path in paths} == FOLDERS
    assert len({path.name for path in paths}) == len(paths)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"engines": {}}, "does not begin"),
        ({"engines": {}, "about": {**HEAD, "versions": None}}, "does not begin"),
        ({"about": HEAD}, "has what, command, date, commit, device, not"),
        ({"about": {**HEAD, "versions": None, "what": ""}}, "no sentence"),
        ({"about": {**HEAD, "versions": None, "what": "One. Two."}}, "more than one"),
        ({"about": {**HEAD, "versions": None, "date": "today"}}, "yyyy-mm-dd"),
        ({"about": {**HEAD, "versions": "0.32.0"}}, "by package"),
        ({"about": {**HEAD, "versions": None, "command": []}}, "command"),
    ],
)
def test_a_file_without_a_whole_head_is_refused(content: Any, says: str) -> None:
    assert any(says in fault for fault in faults(content))


def test_what_writers_make_is_whole() -> None:
    here = about("What this test makes.", command_line("benchmarks.x", ["/a/b.json", "--c d"]))
    assert faults({"about": here}) == []
    assert here["command"] == "python -m benchmarks.x b.json '--c d'"
    assert here["device"] and here["versions"] == versions()
    there = about("Another machine's.", ["a", "b"], date="2026-01-02", device="GPU")
    assert faults({"about": there}) == []
    # What is not known of another machine is not taken from this one.
    assert there["commit"] is there["versions"] is None
