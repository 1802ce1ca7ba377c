"""Answers on disk: taken up again, and kept where a run breaks off."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import ANSWERS_FILE, RUN_FILE, Answer, QuestionId, Store

FACTS = {"model": "m", "model_key": "k", "seed": 0, "dtype": "auto", "date": "today"}


def answer(index: int, policy: str = "full", score: float = 1.0) -> Answer:
    return Answer(
        Row.parse(policy),
        QuestionId("notes", 512, index),
        score,
        500,
        1.0,
        1.0,
        " zebra — ok.\n",
        7,
    )


def test_answers_are_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder", FACTS)
    store.add([answer(0), answer(1, "snapkv", 0.5)])
    again = Store(tmp_path / "new" / "folder", {**FACTS, "date": "tomorrow"})
    assert list(again) == [answer(0), answer(1, "snapkv", 0.5)]
    assert answer(0).key in again and answer(2).key not in again
    assert again.facts["date"] == "tomorrow"


def test_the_form_of_the_files_stays(tmp_path: Path) -> None:
    """Folders of older versions are taken up again, and other programs read them."""
    store = Store(tmp_path, FACTS)
    store.note_resolved(Row.parse("fier-64@fp8 (original)"), Row("fier-64:dense_below=0", "fp8"))
    store.add([answer(3, "fier-64@fp8 (original)", 0.5)])
    assert (tmp_path / ANSWERS_FILE).read_text(encoding="utf-8") == (
        '{"question": {"policy": "fier-64@fp8 (original)", "task": "notes", "length": 512, '
        '"index": 3}, "score": 0.5, "tokens": 500, "kept": 1.0, "read": 1.0, '
        '"text": " zebra — ok.\\n", "generated": 7}\n'
    )
    assert json.loads((tmp_path / RUN_FILE).read_text())["resolved"] == {
        "fier-64@fp8 (original)": "fier-64:dense_below=0@fp8"
    }


def test_older_answers_do_not_say_how_long_they_are(tmp_path: Path) -> None:
    Store(tmp_path, FACTS).add([answer(0)])
    path = tmp_path / ANSWERS_FILE
    path.write_text(path.read_text().replace(', "generated": 7', ""))
    store = Store(tmp_path, FACTS)
    (found,) = store
    assert found == replace(answer(0), generated=None)
    # Asked again, the later line counts.
    store.add([answer(0)])
    assert list(Store(tmp_path, FACTS)) == [answer(0)]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("full", Row("full")),
        ("full (original)", Row("full", on_original=True)),
        ("fastkv:tsp_layer=4+fier-64@fp8_e5m2", Row("fastkv:tsp_layer=4+fier-64", "fp8_e5m2")),
        ("fier-64@fp8 (original)", Row("fier-64", "fp8", on_original=True)),
    ],
)
def test_a_row_is_written_as_it_is_read(text: str, row: Row) -> None:
    assert Row.parse(text) == row and str(row) == text


def test_a_line_cut_short_is_asked_again(tmp_path: Path) -> None:
    Store(tmp_path, FACTS).add([answer(0), answer(1)])
    path = tmp_path / ANSWERS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    store = Store(tmp_path, FACTS)
    assert list(store) == [answer(0)]
    store.add([answer(1)])
    assert list(Store(tmp_path, FACTS)) == [answer(0), answer(1)]


def test_answers_hold_any_character(tmp_path: Path) -> None:
    odd = Answer(
        Row.parse("full"), QuestionId("notes", 512, 0), 1.0, 5, 1.0, 1.0, "a\u2028b\u0085c\r\n\x1e"
    )
    Store(tmp_path, FACTS).add([odd])
    assert list(Store(tmp_path, FACTS)) == [odd]


def test_a_hubs_weights_may_come_with_the_first_run(tmp_path: Path) -> None:
    Store(tmp_path, {**FACTS, "model_key": "config", "config_key": "config"}).add([answer(0)])
    store = Store(tmp_path, {**FACTS, "config_key": "config"})
    assert answer(0).key in store and store.facts["model_key"] == "k"
    with pytest.raises(ToolError, match="model_key"):
        Store(tmp_path, {**FACTS, "model_key": "config", "config_key": "config"})


def test_a_full_disk_keeps_what_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path, FACTS).add([answer(0)])

    def no_space(self: Path, *args: object, **kwargs: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    with pytest.raises(ToolError, match="What is done is kept"):
        Store(tmp_path, FACTS)
    monkeypatch.undo()
    assert list(Store(tmp_path, FACTS)) == [answer(0)]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    Store(tmp_path, FACTS).add([answer(0)])
    with (tmp_path / ANSWERS_FILE).open("a") as file:
        file.write('{"question": {"policy": "full"}}\n')
    with pytest.raises(ToolError, match=rf"{ANSWERS_FILE}:2 is no answer.*another --output"):
        Store(tmp_path, FACTS)


@pytest.mark.parametrize("name", ["model_key", "seed", "dtype", "text", "kv_cache_dtype"])
def test_another_runs_folder_is_refused(tmp_path: Path, name: str) -> None:
    Store(tmp_path, FACTS).add([answer(0)])
    with pytest.raises(ToolError, match=rf"{name}.*choose another --output"):
        Store(tmp_path, {**FACTS, name: "other"})
    # One that ended before its first answer stands in nobody's way.
    Store(tmp_path / "none", FACTS).note_resolved(Row("full"), Row("full", "fp8"))
    assert Store(tmp_path / "none", {**FACTS, name: "other"}).facts["resolved"] == {}


def test_an_original_comes_to_a_run_and_stays(tmp_path: Path) -> None:
    tuned = {**FACTS, "original": "base", "original_key": "b"}
    Store(tmp_path, FACTS).add([answer(0)])
    Store(tmp_path, tuned).add([answer(0, "full (original)")])
    # A run without it asks for fewer rows, and forgets nothing.
    store = Store(tmp_path, {**FACTS, "original": None, "original_key": None})
    assert store.facts["original"] == "base" and len(list(store)) == 2
    for name in ("original", "original_key"):
        with pytest.raises(ToolError, match=rf"{name} 'b.*', this run has 'other': choose another"):
            Store(tmp_path, {**tuned, name: "other"})
    # Its weights may come with the first run too.
    Store(tmp_path / "hub", {**tuned, "original_key": "config"})
    store = Store(tmp_path / "hub", {**tuned, "original_config_key": "config"})
    assert store.facts["original_key"] == "b"


def test_layers_that_changed_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, FACTS)
    store.note_resolved(Row("fastkv"), Row("fastkv:tsp_layer=4"))
    store = Store(tmp_path, FACTS)
    store.note_resolved(Row("fastkv"), Row("fastkv:tsp_layer=4"))
    with pytest.raises(ToolError, match="fastkv is now fastkv:tsp_layer=5: choose another"):
        store.note_resolved(Row("fastkv"), Row("fastkv:tsp_layer=5"))


def test_what_an_older_run_was_over_is_known(tmp_path: Path) -> None:
    over_fp8 = FACTS | {"kv_cache_dtype": "fp8"}
    Store(tmp_path, over_fp8).add([answer(0)])
    run = json.loads((tmp_path / RUN_FILE).read_text())
    run["resolved"] = {"full": "full", "snapkv": "snapkv"}
    (tmp_path / RUN_FILE).write_text(json.dumps(run))
    store = Store(tmp_path, over_fp8)
    assert store.facts["resolved"] == {"full": "full@fp8", "snapkv": "snapkv@fp8"}
    store.note_resolved(Row("snapkv"), Row("snapkv", "fp8"))


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, FACTS)
    store.add([answer(0)])
    opened = Path.open

    def no_space(self: Path, *args: object, **kwargs: object) -> object:
        if self.name == ANSWERS_FILE and "a" in args:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", no_space)
    with pytest.raises(ToolError, match=r"No space left on device\. What is done is kept"):
        store.add([answer(1)])
    monkeypatch.undo()
    assert list(Store(tmp_path, FACTS)) == [answer(0)]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match="cannot write results"):
        Store(tmp_path / "file", FACTS)


def test_an_unreadable_run_file(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text("{")
    with pytest.raises(ToolError, match=r"run\.json is not readable"):
        Store(tmp_path, FACTS)
    (tmp_path / RUN_FILE).write_text(json.dumps([]))
    Store(tmp_path, FACTS)
