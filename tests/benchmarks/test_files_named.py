"""Files and folders that a command line names, and that are not there or are others."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.common.files import read_json
from benchmarks.report.page import main as report


def test_says_which_file_and_why(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(SystemExit, match=r"cannot read .*a\.json: No such file"):
        read_json(path)
    with pytest.raises(SystemExit, match="Is a directory"):
        read_json(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit, match="is not JSON"):
        read_json(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit, match="is not JSON"):
        read_json(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(SystemExit, match="is not a JSON object"):
        read_json(path)
    path.write_text('{"model": "m"}', encoding="utf-8")
    with pytest.raises(SystemExit, match="is not a file of evaluate: it has no scores"):
        read_json(path, "evaluate", "model", "scores")
    assert read_json(path, "evaluate", "model") == {"model": "m"}


# before: the arguments before the file's name.
@pytest.mark.parametrize(
    ("module", "before"),
    [
        ("answers.pooled", ()),
        ("answers.quality", ("name",)),
        ("engine.merge", ("out.json", "b.json")),
    ],
)
@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    before: tuple[str, ...],
    content: str | None,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "b.json") if content is not None else ():
        (folder / name).write_text(content or "", encoding="utf-8")
    monkeypatch.chdir(folder)
    named = str(folder if module.endswith("quality") else folder / "run.json")
    command = import_module(f"benchmarks.{module}")
    argv = [*before, named]
    monkeypatch.setattr(sys, "argv", [module, *argv])
    with pytest.raises(SystemExit) as ended:
        command.main(argv) if module.endswith("merge") else command.main()
    message = str(ended.value.code)
    assert message and "\n" not in message
    assert sorted(path.name for path in folder.iterdir()) == (
        [] if content is None else ["b.json", "run.json"]
    )


def test_a_run_whose_answers_are_none(tmp_path: Path) -> None:
    from benchmarks.answers.quality import read

    facts = {"command": "c", "model": "m"}
    (tmp_path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (tmp_path / "answers.jsonl").write_text("[]\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"answers\.jsonl:1 is no answer of this tool"):
        read([tmp_path])


def test_shards_that_are_none(tmp_path: Path) -> None:
    from benchmarks.answers.kvpress_yardstick import parse_args

    args = parse_args(["merge", str(tmp_path / "a.json")])
    with pytest.raises(SystemExit, match="cannot read"):
        args.run(args)
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="kvpress_yardstick run: it has no settings, prompts"):
        args.run(args)


def test_a_report_of_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would delete the plots that are there."""
    with pytest.raises(SystemExit):
        report(["--results", str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err


def test_a_report_of_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"a\.json is not JSON"):
        report(["--results", str(tmp_path)])
