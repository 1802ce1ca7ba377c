"""LongBench: its metrics against values by hand, its prompts, and files that are no good."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks import longbench_metrics as metrics
from vllm_kvx.tools.tasks.base import FixedTask
from vllm_kvx.tools.tasks.longbench import LongBench
from vllm_kvx.tools.tasks.longbench_formats import FORMATS
from vllm_kvx.tools.tasks.table import tasks_named

ROW = {
    "input": "What is it?",
    "context": "It is a {zebra}.",
    "answers": ["a zebra", "the animal"],
    "length": 4,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "0",
}


def write(folder: Path, name: str, *rows: "dict[str, Any] | str") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def spaced_jieba(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jieba that cuts at every space, and keeps the spaces as it does."""
    module = ModuleType("jieba")
    module.__spec__ = ModuleSpec("jieba", None)
    module.setLogLevel = lambda level: None  # type: ignore[attr-defined]
    module.cut = lambda text, cut_all: iter(text.replace(" ", "| |").split("|"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jieba", module)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither jieba nor rouge is installed."""
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)


def test_f1() -> None:
    assert metrics.f1("The zebra!", "a zebra") == 1
    # Two of four words, two of three.
    assert metrics.f1("zebra eats green grass", "The zebra, green: one.") == pytest.approx(
        2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)
    )
    assert metrics.f1("zebra zebra", "zebra") == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert metrics.f1("", "zebra") == metrics.f1("horse", "zebra") == 0


@pytest.mark.usefixtures("spaced_jieba")
def test_f1_zh() -> None:
    assert metrics.f1_zh("厦门 大学 。", "厦门 大学。") == 1
    # One of three words, one of two; punctuation and spaces are none.
    assert metrics.f1_zh("在 厦门 ， 中国", "厦门 大学") == pytest.approx(
        2 * (1 / 3) * 0.5 / (5 / 6)
    )
    assert metrics.f1_zh("", "厦门 大学") == 0


def test_f1_zh_with_jieba() -> None:
    pytest.importorskip("jieba")
    assert metrics.f1_zh("厦门大学", "厦门大学。") == 1
    # 南京大学 is one word, and so is 厦门大学.
    assert metrics.f1_zh("南京大学", "厦门大学") == 0
    # Of 会议, 在, 厦门大学 and 举行 one is right.
    assert metrics.f1_zh("会议在厦门大学举行", "厦门大学。") == pytest.approx(2 * 0.25 / 1.25)


def test_rouge_l() -> None:
    pytest.importorskip("rouge")
    assert metrics.rouge_l("the cat sat", "the cat sat") == pytest.approx(1)
    # The longest common subsequence has two words of three and of four.
    assert metrics.rouge_l("the cat sat", "the dog sat down") == pytest.approx(
        2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    )
    assert metrics.rouge_l("", "the cat") == metrics.rouge_l("...", "the cat") == 0


@pytest.mark.usefixtures("spaced_jieba")
def test_rouge_l_zh() -> None:
    pytest.importorskip("rouge")
    assert metrics.rouge_l_zh("厦门 大学", "厦门 大学") == pytest.approx(1)
    assert metrics.rouge_l_zh("北京", "厦门 大学") == 0


def test_classification() -> None:
    classes = ["City", "Country", "Other location", "State", "Capital City"]
    assert metrics.classification("City", "City", classes) == 1
    assert metrics.classification("City or Country", "City", classes) == 0.5
    assert metrics.classification("State", "City", classes) == 0
    assert metrics.classification("nothing", "City", classes) == 0
    # A class within the right one does not count against it.
    assert metrics.classification("Capital City", "Capital City", classes) == 1


def test_numbers() -> None:
    assert metrics.count("There are 5 of 7.", "5") == 0.5
    assert metrics.count("five", "5") == 0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1
    assert metrics.retrieval("Paragraph 1 or 12", "Paragraph 12") == 0.5
    assert metrics.retrieval("段落3", "段落3") == 1
    assert metrics.retrieval("段落13", "段落3") == 0


def test_code_similarity() -> None:
    assert metrics.code_similarity("\n\nreturn x\nreturn y", "return x") == 1
    assert metrics.code_similarity("```python\n# a comment\nreturn x", "return x") == 1
    # Six of seven characters on either side.
    assert metrics.code_similarity("abcdefx", "abcdefy") == round(200 * 6 / 14) / 100 == 0.86
    assert metrics.code_similarity("# nothing", "return x") == 0
    assert metrics.code_similarity("", "") == 1


def test_all_data_sets_are_there() -> None:
    assert len(FORMATS) == 21
    assert {name for name, form in FORMATS.items() if not form.chat} == {
        *("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
    }
    for form in FORMATS.values():
        assert "{context}" in form.prompt
        text = form.prompt.format(context="C{1}", input="I")
        assert "C{1}" in text and "{context}" not in text and "{input}" not in text
    sums = {name for name, form in FORMATS.items() if "{input}" not in form.prompt}
    assert sums == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def test_samples_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, "qasper", ROW, "", ROW | {"answers": ["x\u2028y"]})
    write(tmp_path, "lcc", ROW | {"answers": ["return x"]})
    tasks = tasks_named(["longbench"], tmp_path)
    assert [task.name for task in tasks] == ["longbench_qasper", "longbench_lcc"]
    task, code = tasks
    assert isinstance(task, FixedTask) and isinstance(code, FixedTask)
    assert task.chat and not code.chat and task.max_tokens == 128
    first, second = task.samples()
    assert "Article: It is a {zebra}.\n\n Answer" in first.text
    assert first.text.endswith("Question: What is it?\n\nAnswer:")
    assert first.references == ("a zebra", "the animal") and second.references == ("x\u2028y",)
    # The best of the references.
    assert task.score("An animal", first) == 1
    assert task.score("zebra animal", first) == pytest.approx(2 / 3)
    assert code.score("return x", code.samples()[0]) == 1


def test_the_first_line_alone_counts(tmp_path: Path) -> None:
    write(tmp_path, "trec", ROW | {"answers": ["City"], "all_classes": ["City", "State"]})
    task = LongBench("trec", tmp_path)
    (sample,) = task.samples()
    assert task.score("\nCity\nQuestion: State", sample) == 1
    assert task.score("State\nCity", sample) == 0


BROKEN = {
    "not JSON": ('{"input": ', "it is not JSON: Expecting value"),
    "no object": ("[1]", "it is no JSON object"),
    "no context": ('{"input": "x", "answers": ["x"]}', 'the field "context" is missing; it must'),
    "a number": ('{"context": "x", "input": 3}', '"input" is 3; it must be a string'),
    "a text for answers": (
        json.dumps(ROW | {"answers": "zebra"}),
        '"answers" is "zebra"; it must be a list of strings',
    ),
    "no answers": (json.dumps(ROW | {"answers": []}), r'"answers" is \[\]; it must be a list'),
    "no classes": (json.dumps(ROW), '"all_classes" is null; it must be a list of strings'),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_line_is_named(fault: str, tmp_path: Path) -> None:
    line, message = BROKEN[fault]
    good = ROW | {"all_classes": ["a zebra"]}
    write(tmp_path, "trec", good, good, line, good)
    with pytest.raises(ToolError, match=rf"trec.jsonl, line 3: {message}"):
        LongBench("trec", tmp_path).samples()


def test_other_files_that_are_no_good(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="no such folder"):
        tasks_named(["longbench"], tmp_path / "nowhere")
    with pytest.raises(ToolError, match="none of LongBench's files: they are named narrativeqa"):
        tasks_named(["longbench"], tmp_path)
    path = write(tmp_path, "qasper")
    with pytest.raises(ToolError, match=r"qasper.jsonl holds no samples"):
        LongBench("qasper", tmp_path).samples()
    with pytest.raises(ToolError, match=r"lcc.jsonl: no such file; the folder has qasper"):
        LongBench("lcc", tmp_path).samples()
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"input": "\xff"}\n')
    with pytest.raises(ToolError, match=r"qasper.jsonl, line 2: it is not UTF-8 text"):
        LongBench("qasper", tmp_path).samples()


@pytest.mark.usefixtures("without")
def test_missing_libraries_are_named_at_once(tmp_path: Path) -> None:
    for name, libraries in (("multifieldqa_zh", "jieba"), ("vcsum", "jieba and rouge")):
        write(tmp_path, name, ROW)
        with pytest.raises(ToolError, match=rf"needs {libraries}: pip install 'vllm-kvx\[eval\]'"):
            LongBench(name, tmp_path).samples()


def test_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no route\nmore of it")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fail))
    with pytest.raises(ToolError, match=r"from the hub \(no route\): give a folder"):
        LongBench("qasper", None).samples()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ToolError, match="huggingface_hub is missing"):
        LongBench("qasper", None).samples()


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(ROW) + "\n{}\n")
        archive.writestr("data/hotpotqa.jsonl", json.dumps(ROW))
    hub = SimpleNamespace(hf_hub_download=lambda repo, file, repo_type: str(path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert len(LongBench("hotpotqa", None).samples()) == 1
    with pytest.raises(ToolError, match=r"THUDM/LongBench: qasper.jsonl, line 2: the field"):
        LongBench("qasper", None).samples()
