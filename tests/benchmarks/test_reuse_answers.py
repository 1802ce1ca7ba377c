"""Answers by choices that are used again: what is read, against the choices of every step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LOOKUP
from torch import Tensor

from benchmarks.answers import reuse, reuse_answers, reuse_model
from benchmarks.answers.reuse_model import ReuseModel, Way
from benchmarks.checkpoint.prompts import make_prompt
from vllm_kvx.equations import retrieval
from vllm_kvx.policy.retrieval_layers import OF_PAPERS

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 64
EVERY = ("own", "steps:2", "steps:40", "layers:2", "own/1-bit", "layers:4/1-bit")


@pytest.fixture(scope="module")
def model() -> ReuseModel:
    return ReuseModel(LOOKUP, torch.device("cpu"), torch.float32)


def question(model: ReuseModel) -> tuple[list[int], str]:
    """A prompt of some 250 tokens, and its answer of three words."""
    prompt, answer = make_prompt(3, 250, model.tokenizer, values=3)
    return model.tokenizer.encode(prompt), answer


def ways(*names: str, budget: int = BUDGET) -> list[Way]:
    return [Way.parse(name, budget) for name in names]


def steps(model: ReuseModel, each: list[Way], count: int) -> list[dict[int, Tensor]]:
    """What the ways read by layer, (W, G, N) bool, in each step of an answer they all give.

    Queries and keys of the first layer that retrieves are then the same in all.
    """
    ids, _ = question(model)
    said = model.tokenizer.encode(" Once upon a time there was" * 9, add_special_tokens=False)
    found: list[dict[int, Tensor]] = []
    prefilled = False

    def say(_: Any, __: Any, out: Any) -> Any:
        nonlocal prefilled
        if prefilled:
            found.append({layer: reads.clone() for layer, reads in model.reads.items()})
        prefilled = True
        out.logits[:] = 0
        out.logits[..., said[len(found)]] = 1
        return out

    hook = model.model.register_forward_hook(say)
    try:
        answers = model.answers(ids, each, count + 1)
    finally:
        hook.remove()
    assert answers == [said[: count + 1]] * len(each)
    return [
        {layer: reads[..., : len(ids) + step + 1] for layer, reads in of_step.items()}
        for step, of_step in enumerate(found)
    ]


def test_everything_is_read_within_the_budget(model: ReuseModel) -> None:
    ids, answer = question(model)
    expected = model.answer(ids, 8)
    assert model.tokenizer.decode(expected) == answer
    assert model.answers(ids, ways("full", *EVERY, budget=len(ids) + 8), 8) == [expected] * 7


def test_answers_alone_are_those_of_a_batch(
    model: ReuseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of them end earlier."""
    ids, answer = question(model)
    each = ways("full", "layers:6", *EVERY, budget=48)
    right, *others = model.answers(ids, each, 12)
    assert model.tokenizer.decode(right) == answer
    wrong = next(token for tokens in others for token in tokens[1:-1] if token not in right)
    monkeypatch.setattr(model, "ends", {*model.ends, wrong})
    found = model.answers(ids, each, 12)
    assert found[0] == right and min(map(len, found)) < len(right)
    assert found == [model.answers(ids, [way], 12)[0] for way in each]


@pytest.mark.parametrize("span", [1, 2, 40])
def test_steps_read_by_the_first_of_their_span(model: ReuseModel, span: int) -> None:
    """And all since, which are more than the newest that are always read if the span is long."""
    found = steps(model, ways("own", f"steps:{span}"), 45)
    first = len(question(model)[0])
    total = first + len(found)
    own, later = (
        torch.stack(
            [
                torch.nn.functional.pad(each[OF_PAPERS.dense][way], (0, total - first - 1 - step))
                for step, each in enumerate(found)
            ],
            dim=1,
        )
        for way in range(2)
    )  # (G, steps, N)
    assert later.equal(reuse.since(own, first, span))
    apart = [step for step in range(len(found)) if not own[:, step].equal(later[:, step])]
    if span == 1:
        assert not apart
    else:
        assert apart and not [step for step in apart if step % span == 0]
    for step, each in enumerate(found):
        assert each[OF_PAPERS.dense][1, :, first + 1 + step // span * span :].all()
        assert all(each[layer].all() for layer in range(OF_PAPERS.dense))
        assert each[OF_PAPERS.dense][0].sum(dim=-1).tolist() == [BUDGET] * len(own)


@pytest.mark.parametrize("span", [2, 4])
def test_layers_read_by_the_first_of_their_span(model: ReuseModel, span: int) -> None:
    count = len(model.model.model.layers)
    for each in steps(model, ways(f"layers:{span}", "own"), 5):
        shared, own = ([each[layer][way] for layer in range(count)] for way in range(2))
        for layer in range(OF_PAPERS.dense, count):
            is_leader = (layer - OF_PAPERS.dense) % span == 0
            assert shared[layer].equal(shared[layer - 1]) != is_leader
        assert shared[OF_PAPERS.dense].equal(own[OF_PAPERS.dense])


def test_scores_by_1_bit_keys_are_those_of_fier(
    model: ReuseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the newest group is full, it is the newest entries; answers fill groups, too."""
    queries: list[Tensor] = []
    by_entry = reuse_model.by_entry

    def noted(query: Tensor, *keys: Tensor) -> Tensor:
        queries.append(query)
        return by_entry(query, *keys)

    monkeypatch.setattr(reuse_model, "by_entry", noted)
    found = steps(model, ways("own/1-bit"), 45)
    layers = len(model.model.model.layers)
    first, calls = len(question(model)[0]), 2 * layers - OF_PAPERS.dense
    compared = 0
    for step, each in enumerate(found):
        seen = first + step + 1
        if seen % reuse_model.GROUP:
            continue
        query = queries[step * calls + OF_PAPERS.dense][0].flatten(0, 1)
        own = model.own_keys[OF_PAPERS.dense][0, :, : step + 1]
        keys = torch.cat([model.keys[OF_PAPERS.dense], own], dim=1)
        whole = seen - reuse_model.GROUP
        coded = retrieval.quantize_keys(keys[:, :whole], reuse_model.GROUP)
        products = retrieval.token_scores(query, *coded)
        scores = retrieval.reduce_heads(products, len(keys), "max", 1.0)
        for head, of_head in enumerate(scores):
            expected = retrieval.select_units(of_head, seen, reuse_model.GROUP, 1, BUDGET)
            assert each[OF_PAPERS.dense][0, head].nonzero()[:, 0].equal(expected)
            compared += 1
    assert compared == 2 * len(model.keys[0])


def test_names_of_ways() -> None:
    for name in ("full", *EVERY):
        assert str(Way.parse(name, 64)) == name
    for name in ("full/1-bit", "own:2", "steps", "steps:0", "layers:x", "pooled", "1-bit"):
        with pytest.raises(ValueError, match="none of full, own, steps:N and layers:N"):
            Way.parse(name, 64)


def test_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a generated task and a file, in two runs."""
    line = {"input": "The special magic number is 7. Which is it?", "outputs": ["7"]}
    (tmp_path / "niah_x.jsonl").write_text(f"{json.dumps(line)}\n")
    out = tmp_path / "out.json"
    options = [
        *("--model", str(LOOKUP), "--out", str(out), "--ruler", str(tmp_path), "--length", "400"),
        *("--tasks", "notes_3", "ruler_niah_x", "--budgets", "64", "1024"),
    ]
    some = ["--ways", "own", "steps:2", "layers:4/1-bit"]
    assert reuse_answers.main([*options, *some, "--prompts", "2", "--time-limit", "0"]) == 1
    assert not out.exists()
    assert reuse_answers.main([*options, *some, "--prompts", "1"]) == 0
    asked = json.loads(out.read_text())["prompts"]
    assert reuse_answers.main([*options, *some, "--prompts", "2"]) == 0
    results = json.loads(out.read_text())
    assert results["prompts"][:2] == asked
    assert [(p["task"], p["number"]) for p in results["prompts"]] == [
        *(("notes_3", 0), ("ruler_niah_x", 0), ("notes_3", 1))
    ]
    assert "| notes_3, n = 2 | 64 | steps:2 |" in capsys.readouterr().out
    rows = {(r["task"], r["way"], r["budget"]): r for r in results["rows"]}
    assert len(rows) == 3 * 7
    full = rows["notes_3", "full", None]
    assert full["right"] == 100 and full["kept"][0] == 100 and "to_own" not in full
    for way in some[1:]:
        kept = rows["notes_3", way, 1024]
        assert kept["right"] == 100 and kept["same_answers"] == kept["n"] == 2
    assert rows["notes_3", "steps:2", 1024]["to_own"][0] == 0
    assert "to_own" not in rows["notes_3", "layers:4/1-bit", 64]
    more = ["--ways", "own", "layers:2", "--prompts", "1", "--budgets", "64"]
    assert reuse_answers.main([*options, *more]) == 0
    added = json.loads(out.read_text())
    for before, after in zip(results["prompts"], added["prompts"], strict=True):
        assert after["scores"].items() >= before["scores"].items()
    counts = {(r["way"], r["budget"]): r["n"] for r in added["rows"] if r["task"] == "all"}
    assert counts["layers:2", 64] == 2 and counts["steps:2", 1024] == counts["full", None] == 3
    with pytest.raises(SystemExit, match="was made with another seed: name another --out"):
        reuse_answers.main([*options, "--seed", "1"])
    with pytest.raises(SystemExit, match="unknown task 'notes_9'"):
        reuse_answers.main([*options, "--tasks", "notes_9"])
    for wrong in (["--ways", "pooled"], ["--budgets", "16"]):
        with pytest.raises(SystemExit):
            reuse_answers.parse_args([*options, *wrong])
