"""A tuned model beside its original: rows, recovery, and that both are asked the same."""

import gc
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.engine import keep_in_process
from support.models import LOOKUP
from support.nightly import nightly
from transformers import AutoTokenizer

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import evaluation as records
from vllm_kvx.tools.evaluate import command, perplexity, report
from vllm_kvx.tools.evaluate.intervals import of_recovery
from vllm_kvx.tools.evaluate.original import check_tokenizers
from vllm_kvx.tools.evaluate.recovery import recoveries
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary
from vllm_kvx.tools.tasks.table import FIXED

NAMES = ("full (original)", "speed-5 (original)", "full", "speed-5")
ROWS = tuple(map(Row.parse, NAMES))


def answers(
    task: str, length: int, scores: Sequence[Sequence[float]], tokens: int = 0
) -> list[Answer]:
    """Answers of ROWS, whose scores stand one after the other for each question."""
    return [
        Answer(row, QuestionId(task, length, index), score, tokens or length, 1.0, 1.0, "x")
        for index, question in enumerate(scores)
        for row, score in zip(ROWS, question, strict=True)
    ]


def test_recovery_is_the_share_of_the_loss() -> None:
    # Of ten lost answers six come back, of twenty that were not lost one goes.
    triples = [(1.0, 0.0, 1.0)] * 6 + [(1.0, 0.0, 0.0)] * 4 + [(1.0, 1.0, 1.0)] * 19
    found = of_recovery([*triples, (1.0, 1.0, 0.0)])
    assert found is not None and found.value == pytest.approx(0.5)
    assert found.low < 0.25 and 0.7 < found.high <= 1.0


def test_the_interval_of_a_recovery_holds_the_truth() -> None:
    """Of 95% intervals about 95 in 100 do; here the true recovery is 0.6."""
    rng, held = random.Random(3), 0
    for _ in range(200):
        triples = []
        for _ in range(80):
            lost = rng.random() < 0.5
            tuned = float(not lost or rng.random() < 0.6)
            triples.append((1.0, float(not lost), tuned))
        found = of_recovery(triples)
        assert found is not None
        held += found.low <= 0.6 <= found.high
    assert 180 <= held <= 198


def test_what_is_not_lost_cannot_come_back() -> None:
    assert of_recovery([(1.0, 1.0, 1.0)] * 50) is None
    # Two that are lost and one that is won are no significant loss.
    mixed = [(1.0, 0.0, 1.0)] * 4 + [(0.0, 1.0, 1.0)] * 3 + [(1.0, 1.0, 1.0)] * 20
    assert of_recovery(mixed) is None
    # Five lost of five may be chance, and of six all is not.
    assert of_recovery([(1.0, 0.0, 1.0)] * 5) is None
    found = of_recovery([(1.0, 0.0, 1.0)] * 6)
    # Wilson's for 6 of 6.
    assert found == pytest.approx((1.0, 0.6097, 1.0), abs=1e-4)


def tuned_run() -> Summary:
    lost = [(1.0, 0.0, 1.0, 1.0)] * 8 + [(1.0, 0.0, 1.0, 0.0)] * 8
    kept = [(1.0, 1.0, 0.0, 1.0)] * 8
    found = answers("niah_single_1", 512, lost) + answers("niah_single_1", 1024, lost + kept)
    found += answers("short_facts", 0, kept, tokens=20)
    found += answers(PERPLEXITY, 512, [(2.0, 3.0 + index / 10, 2.0, 2.25) for index in range(8)])
    return Summary(found, ROWS)


def test_the_yardstick_is_the_original_in_full() -> None:
    summary = tuned_run()
    assert summary.rows == list(ROWS) and str(summary.yardstick) == "full (original)"
    cells = {row: summary.cell(row, "niah_single_1", 512) for row in ROWS}
    assert [c and c.of_full and c.of_full.value for c in cells.values()] == [1.0, 0.0, 1.0, 0.5]
    lost = summary.cell(Row.parse("full"), "short_facts")
    assert lost is not None and lost.of_full is not None and lost.of_full.value == 0.0
    nats = summary.cell(Row.parse("speed-5"), PERPLEXITY)
    assert nats is not None and nats.of_full is not None and nats.of_full.value == 0.25
    # Without the original's rows it is the model itself.
    assert Summary(a for a in tuned_run().answers(Row.parse("full")).values()).yardstick == Row(
        "full"
    )


def test_recovery_by_group_and_length() -> None:
    found = {each.over: each for each in recoveries(tuned_run())}
    assert list(found) == ["all", "ruler", "short", "1-512 tokens", "513-1,024 tokens", PERPLEXITY]
    assert all(str(each.row) == "speed-5" for each in found.values())
    assert found["all"].count == 48
    whole = found["ruler"]
    assert (whole.count, whole.full, whole.cut, whole.tuned) == (40, 1.0, 0.2, 0.6)
    assert whole.share is not None and whole.share.value == pytest.approx(0.5)
    assert (whole.lost, whole.back, whole.newly_lost) == (0.8, 0.4, 0.0)
    assert found[PERPLEXITY].back is None
    assert found["1-512 tokens"].count == 24
    assert found["short"].share is None and found["short"].tuned == 1.0
    # A loss of 1.35 nats on average, of which a quarter is left.
    nats = found[PERPLEXITY].share
    assert nats is not None and nats.value == pytest.approx((1.35 - 0.25) / 1.35)
    assert nats.low < nats.value < nats.high < 1


def test_what_tuning_loses_stands_beside_what_it_brings_back() -> None:
    """Of each prompt what came back of its loss, and what the cut had kept and is gone."""
    scores = [
        # The original in full and cut, the tuned model in full, which does not count, and cut.
        (1.0, 0.0, 1.0, 1.0),
        (1.0, 0.25, 1.0, 0.5),
        (0.5, 0.0, 0.0, 1.0),
        (1.0, 1.0, 1.0, 0.0),
        (1.0, 0.5, 1.0, 0.25),
        (0.0, 0.0, 0.0, 1.0),
        (0.0, 1.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0),
    ]
    found = {each.over: each for each in recoveries(Summary(answers("vt", 512, scores), ROWS))}
    assert found["all"].lost == pytest.approx((1.0 + 0.75 + 0.5 + 0.5) / 8)
    assert found["all"].back == pytest.approx((1.0 + 0.25 + 0.5) / 8)
    assert found["all"].newly_lost == pytest.approx((1.0 + 0.25) / 8)


def test_the_report_names_the_rows() -> None:
    summary = tuned_run()
    shown = report.text(summary)
    for row in NAMES:
        assert any(line.startswith(f"{row}  ") for line in shown.splitlines())
    assert "ratio to full (original) on the same prompts" in shown
    assert "above full (original)" in shown and "+0.2500" in shown
    ruler = next(line for line in shown.splitlines() if line.startswith("speed-5  ruler"))
    assert ruler.split()[2:6] == ["40", "100.0", "20.0", "60.0"] and "50.0% [" in ruler
    assert ruler.split()[-3:] == ["80.0", "40.0", "0.0"]
    assert "undefined: the cut alone loses nothing significant" in shown
    written = report.as_json(summary, {})
    assert written["yardstick"] == "full (original)"
    short = next(each for each in written["recovery"] if each["over"] == "short")
    assert short["recovery"] is None and short["n"] == 8
    assert short["lost"] == short["back"] == short["newly_lost"] == 0.0
    by_task = {each["over"]: each for each in written["recovery"]}
    assert by_task["niah_single_1"]["n"] == 40 and by_task["niah_single_1"]["back"] == 0.4
    assert "recovery" not in report.as_json(
        Summary(summary.answers(Row.parse("full")).values()), {}
    )


def tokenizer(template: str | None = None) -> Any:
    found = AutoTokenizer.from_pretrained(LOOKUP)
    found.chat_template = template or found.chat_template
    return found


def test_other_tokenizers_are_refused() -> None:
    check_tokenizers(tokenizer(), tokenizer())
    more = tokenizer()
    more.add_tokens(["<|extra|>"])
    with pytest.raises(ToolError, match="their vocabularies differ in 1 token"):
        check_tokenizers(more, tokenizer())
    other = "{{ bos_token }}coffee {% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ToolError, match="their chat templates, special tokens or rules"):
        check_tokenizers(tokenizer(other), tokenizer())


SMALL = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}


def evaluate(output: Path, original: Path, *more: str) -> int:
    fixed = ["evaluate", str(LOOKUP), "--original", str(original), "--policies", "speed-5"]
    fixed += ["--lengths", "320", "--samples", "1", "--output", str(output), "--no-plot"]
    fixed += ["--tasks", "notes_3,perplexity,short", "--engine-args", json.dumps(SMALL)]
    return main([*fixed, *more])


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep_in_process(monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))


@nightly
@pytest.mark.usefixtures("in_process")
def test_a_model_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo checkpoint is tuned for speed-5: as its own original it loses nothing by the cut."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # An interpreted token takes a tenth of a second.
    monkeypatch.setattr(perplexity, "CONTINUATION_TOKENS", 4)
    for task in FIXED.values():
        monkeypatch.setattr(task, "max_tokens", 4)
    output = tmp_path / "out"
    assert evaluate(output, LOOKUP, "--save") == 0
    cleanup_dist_env_and_memory()
    gc.collect()
    shown = capsys.readouterr().out
    written = json.loads((output / "report.json").read_text())
    cells = {(c["policy"], c["task"]): c for c in written["cells"] if c["length"] == "all"}
    assert {policy for policy, _ in cells} == set(NAMES)
    assert written["original"] == "lookup-8l" and written["original_key"] == written["model_key"]
    for row, twin in (("full", "full (original)"), ("speed-5", "speed-5 (original)")):
        assert cells[row, "notes_3"]["score"][0] == 1.0 == cells[row, "notes_3"]["same"][0]
        for task in ("notes_3", PERPLEXITY, *FIXED):
            assert cells[row, task]["score"] == cells[twin, task]["score"]
    assert cells["speed-5", PERPLEXITY]["of_full"][0] != 0 and cells["speed-5", "all"]["n"] == 4
    assert cells["speed-5", "notes_3"]["kept"] < 0.7
    by = {each["over"]: each for each in written["recovery"]}
    assert {"all", "demo", "short", PERPLEXITY} <= set(by)
    assert all(each["recovery"] is None and each["n"] <= 4 for each in by.values())
    assert by["demo"]["full"] == by["demo"]["cut"] == by["demo"]["tuned"] == 1.0
    assert "undefined" in shown and "speed-5 (original)" in shown
    found = records.load(written["model_key"], parse_policy("speed-5"))
    assert found is not None and found["original"] == "lookup-8l"

    # What is answered is not asked again.
    monkeypatch.setattr(command, "own_engine", None)
    assert evaluate(output, LOOKUP) == 0
    again = capsys.readouterr().out
    assert again[: again.index("Results:")] in shown


@pytest.mark.usefixtures("in_process")
def test_bad_pairs_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(original: Path, *more: str) -> str:
        assert evaluate(tmp_path / "out", original, *more) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LOOKUP / name, other)
    config = json.loads((LOOKUP / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    assert "has 6 layers and" in error_of(other)
    (other / "config.json").write_text(json.dumps(config))
    settings = json.loads((LOOKUP / "tokenizer_config.json").read_text())
    changed = {**settings, "chat_template": "coffee " + settings["chat_template"]}
    (other / "tokenizer_config.json").write_text(json.dumps(changed))
    assert "tokenize differently (their chat templates" in error_of(other)
    assert "no model at" in error_of(tmp_path / "none")
    error = error_of(LOOKUP, "--base-url", "http://localhost:1")
    assert error.startswith("vllm-kvx evaluate: error: --original asks two models")
