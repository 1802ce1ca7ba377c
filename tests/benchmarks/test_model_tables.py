"""The tables of models in docs/use/models.md are those of the file that they are made of."""

from pathlib import Path

import pytest

from benchmarks.report import model_tables
from benchmarks.report.model_code import ALL, NONE


def test_the_page_has_what_was_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_tables.main(["--check"]) == 0
    page = tmp_path / "page.md"
    page.write_text(model_tables.PAGE.read_text().replace("| `full` alone | 29 |", "| | 28 |"))
    command = ["--page", str(page)]
    assert model_tables.main([*command, "--check"]) == 1
    assert "run python -m benchmarks.report.model_tables" in capsys.readouterr().out
    assert model_tables.main(command) == 0
    assert page.read_text() == model_tables.PAGE.read_text()
    page.write_text("# No place")
    assert model_tables.main(command) == 1


def test_names_are_counted_by_what_remains() -> None:
    models = {
        "A": {"policies": ALL, "windows": True},
        "B": {"policies": ALL, "by_checkpoint": True},
        "C": {"policies": NONE, "why": "latent attention"},
    }
    recipes = {
        "a": {"policies": ALL, "architecture": "AForCausalLM"},
        "b": {"policies": NONE, "architecture": "CForCausalLM", "why": "X: latent attention"},
        "c": {"policies": NONE, "architecture": "CForCausalLM", "why": "latent attention"},
        "d": {"policies": "not known", "why": "its architecture"},
    }
    counted = {"models": models, "wrappers": {}, "recipes": {"models": recipes}}
    lines = model_tables.tables(counted)
    more = "1 know windows, 1 by the language model that a checkpoint names"
    assert f"| all | 2 ({more}) |  |" in lines and "| `full` alone | 1 |  |" in lines
    assert "| all | 1 | A |" in lines
    assert "| `full` alone | 2 | latent attention: C (2) |" in lines
    assert "| not known | 1 | its architecture |" in lines
