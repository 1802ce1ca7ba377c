"""What plots of a run show, and what is said where they have nothing to show."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.tools import plots as drawing
from vllm_kvx.tools.evaluate import figures
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import Summary


def summary_of(scores: Mapping[str, float], lengths: Mapping[int, int]) -> Summary:
    """Rows that are so right, on so many prompts of each length; 0 for short questions."""
    return Summary(
        Answer(
            Row.parse(row), QuestionId("notes", length, index), score, length or 20, 0.2, 0.2, "x"
        )
        for row, score in scores.items()
        for length, count in lengths.items()
        for index in range(count)
    )


def drawn(folder: Path, summary: Summary, **speed: Mapping[str, float]) -> tuple[str, set[str]]:
    """What is said, and the files."""
    pytest.importorskip("matplotlib")
    said = figures.draw_all(folder, summary, "m", speed or None)
    return said, {path.name for path in folder.iterdir()}


def test_a_plot_of_full_alone_is_not_drawn(tmp_path: Path) -> None:
    said, files = drawn(tmp_path, summary_of({"full": 1.0}, {512: 2}), snapkv={"ttft": 1.2})
    assert said.splitlines() == [
        "No plot over what is kept: full alone has answers.",
        "No plot over speed: --speed has none of these policies.",
    ]
    assert not files


def test_a_plot_without_a_right_answer_is_not_drawn(tmp_path: Path) -> None:
    said, files = drawn(tmp_path, summary_of({"full": 0.0, "snapkv": 0.0}, {512: 2}))
    assert said == "No plot: no answer is right, in full or under a policy." and not files
    assert drawn(tmp_path, summary_of({"full": 1.0, "snapkv": 0.0}, {512: 2}))[1] == {"kept.png"}


def test_a_file_of_other_speeds_is_refused_before_anything_is_asked() -> None:
    speed = {"stock@fp8": {"ttft": 1.1}, "fier-64": {"ttft": 1.3}}
    for rows in (["full", "full@fp8"], ["full", "fier-64", "snapkv"]):
        figures.check_speed("speeds.json", speed, list(map(Row.parse, rows)))
    with pytest.raises(ToolError, match=r"^--speed speeds.json has none of these policies, .* it "):
        figures.check_speed("speeds.json", speed, [Row("full"), Row("snapkv")])
    with pytest.raises(ToolError, match=r"no result of benchmarks\.engine\.compare"):
        figures.read_speed("nowhere.json")


def test_a_plot_that_is_asked_for_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda _: None)
    assert main(["calibrate", "nowhere", "--plot", "x.png"]) == 2
    assert "error: --plot: plots need matplotlib: pip install" in capsys.readouterr().err


def test_a_thicket_is_not_drawn(tmp_path: Path) -> None:
    scores = {"full": 1.0} | {f"fastkv:tsp_layer={layer}": 1.0 for layer in range(13)}
    said, files = drawn(tmp_path, summary_of(scores, {512: 2}))
    assert "13 methods of one point each cannot be told apart" in said and not files
    # A method of several points has its curve, and the figure says what it leaves out.
    scores["snapkv:kv_rate=0.2"] = scores["snapkv"] = 1.0
    summary = summary_of(scores, {512: 2})
    assert drawn(tmp_path, summary)[1] == {"kept.png"}
    pyplot = pytest.importorskip("matplotlib.pyplot")
    head = figures.kept_curves(pyplot, summary, "m").get_suptitle()
    assert "in the table alone: 13 methods of one point each" in head
    pyplot.close()


def test_every_panel_says_how_many_prompts_it_is_of() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    answers = list(summary_of({"full": 1.0, "snapkv": 0.5}, {0: 3, 512: 8})._answers)
    # One answer is missing.
    answers.pop()
    figure = figures.kept_curves(pyplot, Summary(answers), "m")
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == ["short questions, n = 3", "512 tokens, n = 7-8", "", ""]
    assert "95% confidence; n: prompts" in figure.get_suptitle()
    speed = {"snapkv": {"ttft": 1.5}}
    figure = figures.speed_points(
        pyplot, summary_of({"full": 1.0, "snapkv": 0.5}, {512: 8}), "m", speed
    )
    assert figure.get_suptitle() == "m; bars: 95% confidence; n = 8 prompts"
    assert figure.axes[1].get_title(loc="left") == "no policy was measured so"
    pyplot.close("all")
