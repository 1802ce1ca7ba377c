"""The recall table of real checkpoints, against the policy's math and the dense reference."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fastkv, fier

from benchmarks.answers import recall, recall_attention, recall_data, recall_model
from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.tools.tasks.base import Sample
from vllm_kvx.tools.tasks.prompts import EncodedSample

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = recall.ROOT / "tests/checkpoints/lookup-8l"
LENGTH, ROWS = 200, 40


@pytest.mark.parametrize(("method", "group"), recall_model.METHODS)
@pytest.mark.parametrize("reduction", recall_data.REDUCTIONS)
def test_steps_choose_what_the_policy_chooses(method: str, group: int, reduction: str) -> None:
    """Steps of one pass, across the ends of groups, against one step at a time."""
    step = next(recall_data.planted(1, LENGTH + ROWS))
    query = torch.randn(8, ROWS, 128, generator=torch.Generator().manual_seed(1))
    products = recall_data.score(query.flatten(0, 1), step.keys, method, group)
    products = products.unflatten(0, (8, ROWS))
    key = method, group, reduction
    scores = recall_attention.unit_scores(products, 2, LENGTH, LENGTH + ROWS, key, step.scaling)
    unit = 1 if method == "fier" else group
    for row, budget in product((0, 23, 24, ROWS - 1), (128, 160)):
        seen = LENGTH + row + 1
        alone = recall_data.score(query[:, row], step.keys[:, :seen], method, group)
        expected = recall_data.select(alone, 2, seen, step.scaling, (*key, budget))
        for head in range(2):
            best = scores[head, row].topk(budget // unit).indices
            reads = (best[:, None] * unit + torch.arange(unit)).flatten()
            assert reads[reads < seen].sort().values.equal(expected[head].sort().values)


def test_metrics_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = (128, 256)
    monkeypatch.setattr(recall, "BUDGETS", budgets)
    monkeypatch.setattr(recall_model, "BUDGETS", budgets)
    step = next(recall_data.planted(1, 600))
    ours = recall_model.measure(step.query[:, None], step.keys, 599, step.scaling)
    theirs = recall.measure(step)
    assert {(*key, budget) for key in ours for budget in budgets} == set(theirs)
    for (key, sums), (i, budget) in product(ours.items(), enumerate(budgets)):
        for metric, count in (("mass", 8), ("overlap", 2)):
            expected = sum(theirs[*key, budget][metric]) / count
            assert sums[metric][i] / count == pytest.approx(expected, abs=1e-4), (key, budget)
        assert sums["sharp"][i] == pytest.approx(sum(theirs[*key, budget]["sharp"]), abs=1e-4)


def test_answers_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_model, "BUDGETS", (64,))
    monkeypatch.setattr(recall_model, "ANSWER_METHODS", (("fier", 32), ("quest", 16)))
    model = recall_attention.Model(CHECKPOINT, torch.device("cpu"), torch.float32)
    reference = fastkv.load(CHECKPOINT)
    prompt, answer = make_prompt(3, 250, model.tokenizer, values=3)
    ids = model.tokenizer.encode(prompt)
    tokens = model.answer(ids, 8)
    assert model.tokenizer.decode(tokens) == answer
    # A group of 32 and two pages are filled while the rest runs.
    tokens += model.tokenizer.encode(" Once upon a time" * 3, add_special_tokens=False)[:7]
    assert len(ids) + len(tokens) > 257
    readings = recall_model.readings()
    right, likely = model.read(tokens, readings)
    assert right.shape == likely.shape == (len(readings), len(tokens) - 1)
    for row, reading in zip(right, readings, strict=True):
        retrieve = fier.Retrieve(10_000)
        if reading is not None:
            method, group, reduction, budget = reading
            if reduction not in ("max", "softmax/2"):
                continue
            reduction = reduction.removesuffix("/2")
            retrieve = fier.Retrieve(budget, group, method == "quest", reduction)
        read = fier.score(reference, ids, tokens, retrieve)
        expected = [a == b for a, b in zip(read.argmax[1:], tokens[1:], strict=True)]
        assert row.tolist() == expected, reading


def test_an_answer_ends_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    class Words:
        tokenizer: Any = type("Tokenizer", (), {"decode": lambda _, ids, **kw: " ".join(ids)})()

    prompt = EncodedSample(Sample("", ("b c",)), (), ())
    words: Any = ["a", "b", "c", "d"]
    model: Any = Words()
    assert recall_model.cut(words, prompt, model, "niah_single_2") == (words[:3], 1.0)
    assert recall_model.cut(words[::-1], prompt, model, "niah_single_2") == (words[::-1], 0.0)


def test_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    recall.main(
        [
            *("--model", str(CHECKPOINT), "--lengths", "300", "--prompts", "2", "--steps", "2"),
            *("--tasks", "notes_3", "--out", str(out)),
        ]
    )
    table = capsys.readouterr().out
    assert "### right" in table and "| fier 32, softmax/2 |" in table
    results = json.loads(out.read_text())
    assert set(results["data"]) == {"all", "300"}
    data = results["data"]["all"]
    assert data["samples"] == data["answered_right"] == 2 and data["full_agrees"] == 1
    row = next(row for row in data["rows"] if row["reduction"] == "sum" and row["group"] == 32)
    assert set(row["right"]) == set(row["mass_to_max"]) == set(map(str, recall_model.BUDGETS))
