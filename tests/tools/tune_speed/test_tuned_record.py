"""kvx_tuned.json: what is written is read, and what is damaged says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.records.tuned_weights import FILE, TunedRecord, read

FIELDS: dict[str, Any] = {
    "policy": "speed-18",
    "original": "org/model",
    "layers": 24,
    "method": "lora",
    "loss": "self-distillation",
    "data": {"examples": 400, "tasks": ["a", "b"]},
    "training": {"steps": 200, "learning_rate": 1e-4},
    "agreement": {
        "before": {"kl": 1.25, "greedy": 0.5, "tokens": 4000},
        "after": {"kl": 0.0312, "greedy": 0.9712, "tokens": 4000},
    },
    "versions": {"torch": "2.13"},
    "command": "vllm-kvx tune-speed org/model --cutoff 18 --out tuned",
    "date": "2026-01-02T03:04:05",
}


def damaged(directory: Path, text: str) -> str:
    """What is said of a file that holds `text`."""
    path = directory / FILE
    path.write_text(text)
    with pytest.raises(ToolError) as error:
        read(directory)
    message = str(error.value)
    assert str(path) in message and "tune again, or delete it" in message
    return message


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) is None and read(tmp_path / "nowhere") is None
    record = TunedRecord(**FIELDS)
    path = record.write(tmp_path / "new")
    assert path == tmp_path / "new" / "kvx_tuned.json"
    assert json.loads(path.read_text()) == FIELDS
    assert read(tmp_path / "new") == record
    assert [file.name for file in path.parent.iterdir()] == [FILE]
    TunedRecord(**FIELDS | {"policy": "speed-9"}).write(path.parent)
    again = read(path.parent)
    assert again is not None and again.policy == "speed-9"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("speed-18:anchors=1,tail=1", "speed-18"),
        ("speed-18:tail=2,anchors=4", "speed-18:anchors=4,tail=2"),
    ],
)
def test_the_policy_becomes_canonical(given: str, name: str) -> None:
    record = TunedRecord(**FIELDS | {"policy": given})
    assert record.policy == name == str(record.propagate)
    assert record == TunedRecord(**FIELDS | {"policy": name})


def test_it_says_how_well_tuning_went() -> None:
    assert TunedRecord(**FIELDS).says() == (
        "by self-distillation of org/model, held-out agreement 97.1% of tokens, KL 0.031"
    )


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"policy": "full"}, "tuned for speed-K alone, got full"),
        ({"policy": "fier-64"}, "tuned for speed-K alone"),
        ({"policy": "fastkv:tsp_layer=3"}, "tuned for speed-K alone"),
        ({"policy": "speed-18+fier-64"}, "tuned for speed-K alone, got speed-18"),
        ({"policy": "sped-18"}, "policy: .*did you mean speed-K"),
        ({"policy": 18}, "policy must be a text, got 18"),
        ({"policy": "speed-24"}, "24 layers; use speed-1 .. speed-23"),
        ({"layers": "24"}, "layers must be a number of layers, got '24'"),
        ({"original": ""}, "original must be a text"),
        ({"data": [1]}, "data must be a JSON object"),
        ({"agreement": {"after": FIELDS["agreement"]["after"]}}, "before and after"),
    ],
)
def test_what_no_record_is(tmp_path: Path, changes: dict, names: str) -> None:
    with pytest.raises(ToolError, match=names):
        TunedRecord(**FIELDS | changes)
    damaged(tmp_path, json.dumps(FIELDS | changes))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("kl", float("nan"), "kl after must be a number, got nan"),
        ("kl", True, "kl after must be a number, got True"),
        ("greedy", 97.1, "greedy after must be a share, got 97.1"),
        ("greedy", None, "greedy after must be a number"),
        ("tokens", 0, "tokens after must be a count, got 0"),
        ("tokens", 2.5, "tokens after must be a count"),
    ],
)
def test_figures_are_figures(name: str, value: Any, says: str) -> None:
    after = FIELDS["agreement"]["after"] | {name: value}
    with pytest.raises(ToolError, match=says):
        TunedRecord(**FIELDS | {"agreement": FIELDS["agreement"] | {"after": after}})


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    whole = json.dumps(FIELDS)
    assert "is damaged" in damaged(tmp_path, whole[:-20])
    assert "it is not a JSON object" in damaged(tmp_path, "[]")
    less = {key: value for key, value in FIELDS.items() if key not in ("loss", "date")}
    assert "it has no loss, date" in damaged(tmp_path, json.dumps(less))
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(ToolError, match="is damaged"):
        read(tmp_path)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(ToolError, match=f"cannot read .*{FILE}"):
        read(tmp_path)


def test_a_later_versions_fields_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(FIELDS | {"later": 1}))
    assert read(tmp_path) == TunedRecord(**FIELDS)


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    for value in (float("inf"), object()):
        with pytest.raises(ToolError, match=f"{FILE} cannot hold this record"):
            TunedRecord(**FIELDS | {"training": {"loss": value}}).write(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ToolError, match=r"cannot write .*kvx_tuned.json"):
        TunedRecord(**FIELDS).write(tmp_path / "file")
