"""The recall table's direct evaluation, against the dense reference."""

import random
import re

import pytest
from reference import fastkv, fier

from benchmarks.answers import recall, recall_data
from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.equations import retrieval

LENGTH, BUDGET = 256, 64


def test_lookups_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_data, "ANSWER_BUDGETS", (BUDGET,))
    monkeypatch.setattr(recall_data, "ANSWER_METHODS", (("fier", 32), ("quest", 16)))
    path = recall.ROOT / "tests/checkpoints/lookup-8l"
    demo, model = recall_data.Demo(path, LENGTH), fastkv.load(path)
    found = list(demo.lookups(1, 2))
    prompt = make_prompt(0, LENGTH, demo.tokenizer, values=3)[0]
    notes = re.findall(r"^- (\w+)((?: \w+){3}\.)$", prompt, re.MULTILINE)
    seen = set()
    for (key, value), answers in zip(random.Random(0).sample(notes, 2), found, strict=True):
        question = demo.tokenizer.encode(f"{prompt.rpartition(' ')[0]} {key}")
        wanted = demo.tokenizer.encode(value, add_special_tokens=False)
        wanted.append(demo.tokenizer.eos_token_id)
        assert len(question) == LENGTH and answers.pop(None)
        for reading, right in answers.items():
            assert reading is not None
            method, group, reduction, budget = reading
            if reduction != "softmax":  # A policy's is the one of halved products.
                reduction = reduction.removesuffix("/2")
                retrieve = fier.Retrieve(budget, group, method == "quest", reduction)
                read = fier.score(model, question, wanted, retrieve)
                assert (read.argmax == wanted) == right, reading
                seen.add(right)
    assert seen == {True, False}, "all are right, or none: that shows little"


def test_scores_are_those_of_the_policy() -> None:
    step = next(recall_data.planted(1, 200))
    signs, scales, zeros = retrieval.quantize_keys(step.keys[:, :192], 32)
    ours = recall_data.score(step.query, step.keys, "fier", 32)
    assert ours.allclose(retrieval.token_scores(step.query, signs, scales, zeros), atol=1e-3)
    ours = recall_data.score(step.query, step.keys, "quest", 32)
    assert ours.allclose(retrieval.page_scores(step.query, scales, zeros), atol=1e-3)


def test_answers_are_compared_in_pairs() -> None:
    found: list[dict[recall_data.Key | None, bool]] = [
        {None: True} | {key: key[2] != "sum" or i % 2 == 0 for key in recall_data.answer_keys()}
        for i in range(3)
    ]
    rows = {(r["method"], r["group"], r["reduction"]): r for r in recall.summarise_answers(found)}
    assert rows["quest", 16, "max"]["right"]["64"] == 1 and "to_max" not in rows["quest", 16, "max"]
    assert rows["quest", 16, "sum"]["right"]["64"] == 0.66667
    assert rows["quest", 16, "sum"]["to_max"]["64"] == [0, 1]
    assert list(rows["fier", 128, "sum"]["right"]) == ["128", "256", "512"]
