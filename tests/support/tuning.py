"""What tests of `vllm-kvx tune-speed` ask for, and what they look at."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.models import LOOKUP
from vllm_kvx.cli import main
from vllm_kvx.tools.tune_speed import command, sources

SIZES = ("--max-length", "512", "--batch-tokens", "2048", "--held-out", "8")
MADE = ("--lookups", "1", "--recitals", "0.25", "--count", "40", "--answer-tokens", "16")
SHORT = ("--max-length", "64", "--batch-tokens", "512", "--held-out", "4", "--lr", "1e-3")


def arguments(out: Path, *more: str, model: Path | str = LOOKUP, cutoff: int = 3) -> list[str]:
    return ["tune-speed", str(model), "--cutoff", str(cutoff), "--out", str(out), *more]


def tune(out: Path, *more: str, model: Path | str = LOOKUP, cutoff: int = 3) -> int:
    return main(arguments(out, *more, model=model, cutoff=cutoff))


def stored(path: Path) -> Any:
    return json.loads(path.read_text())


def last_error(capture: pytest.CaptureFixture[str]) -> str:
    (line,) = capture.readouterr().err.strip().splitlines()[-1:]
    head, _, message = line.partition("error: ")
    assert head == "vllm-kvx tune-speed: "
    return message


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither training nor an engine."""

    def started(*args: Any, **options: Any) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr(command, "run_training", started)
    monkeypatch.setattr(sources, "Teacher", started)


def dialogues(count: int = 24) -> list[dict[str, Any]]:
    """Each with one answer for all."""
    words = ("north", "south", "east", "west")
    return [
        {"messages": [{"role": "user", "content": f"{number} {words[number % 4]} of the lake?"}]}
        for number in range(count)
    ]


def answered(count: int = 24) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": " The answer is hidden."}
    return [{"messages": [*each["messages"], answer]} for each in dialogues(count)]


def lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def copy(source: Path, target: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    """The demo model with other fields in its files; None leaves one out."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            fields = {"config.json": config, "tokenizer_config.json": tokenizer}.get(path.name, {})
            found = stored(path) | fields
            text = json.dumps({name: value for name, value in found.items() if value is not None})
            (target / path.name).write_text(text)
        else:
            (target / path.name).symlink_to(path)
    return target
