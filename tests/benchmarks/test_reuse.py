"""What is counted of selections that are used again: who reads what, and a checkpoint's answers."""

import json
from pathlib import Path

import torch
from support.models import LOOKUP

from benchmarks.answers import reuse


def test_a_choice_has_the_newest_entries_and_none_that_come_later() -> None:
    torch.manual_seed(0)
    first, rows, budget = 100, 5, reuse.RECENT + 4
    score = torch.rand(2, rows, first + rows)
    reads = reuse.choices(score, first, budget)
    for row in range(rows):
        seen = first + 1 + row
        assert not reads[:, row, seen:].any()
        assert reads[:, row, seen - reuse.RECENT : seen].all()
        assert reads[:, row].sum(dim=-1).tolist() == [budget, budget]
        older = score[0, row, : seen - reuse.RECENT]
        assert set(older.topk(4).indices.tolist()) <= set(reads[0, row].nonzero()[:, 0].tolist())


def test_a_step_goes_by_the_first_of_its_span_and_reads_what_came_since() -> None:
    first, rows, span = 100, 5, 3
    reads = torch.zeros(1, rows, first + rows, dtype=torch.bool)
    reads[0, torch.arange(rows), torch.arange(rows)] = True
    found = reuse.since(reads, first, span)
    for row in range(rows):
        seen = first + 1 + row
        older = found[0, row, : seen - reuse.RECENT].nonzero()[:, 0].tolist()
        assert older == [row // span * span]
        assert found[0, row, seen - reuse.RECENT : seen].all() and not found[0, row, seen:].any()


def test_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "reuse.json"
    tasks = ("--tasks", "notes", "--prompts", "1", "--length", "400")
    reuse.main(["--model", str(LOOKUP), "--out", str(out), *tasks])
    rows = {(row["budget"], row["choice"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == len(reuse.BUDGETS) * (2 + 3 * len(reuse.SPANS))
    for share in reuse.BUDGETS:
        masses = [row["mass"] for (budget, _), row in rows.items() if budget == share]
        assert all(0 < mass <= 1 for mass in masses)
        assert rows[share, "own"]["mass"] >= rows[share, "layers:6"]["mass"]
