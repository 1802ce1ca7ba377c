"""What an evaluation saves is what a server says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import evaluation as records
from vllm_kvx.records.model_key import ModelIdentity, model_key
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.save import save
from vllm_kvx.tools.evaluate.store import RESOLVED, Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path))
    return tmp_path


def summary_of(policy: str, right: float) -> Summary:
    return Summary(
        Answer(Row.parse(name), QuestionId("notes", 512, index), score, 500, 0.1, 0.1, "")
        for name, score in (("full", 1.0), (policy, right))
        for index in range(10)
    )


def saving(policy: str, resolved: str, right: float, full: str = "full") -> Mapping[str, str]:
    """What could not be saved, and why."""
    facts: dict[str, Any] = {"date": "2026-01-02T03:04:05", "dtype": "auto"}
    facts[RESOLVED] = {"full": full, policy: resolved}
    return by_name(save(model_key(CONFIG, None), summary_of(policy, right), facts).refused)


def by_name(rows: Mapping[Row, str]) -> dict[str, str]:
    return {str(row): text for row, text in rows.items()}


def notice(kv_cache_dtype: str = "auto") -> EvaluationNotice:
    return EvaluationNotice(ModelIdentity("org/m", CONFIG, kv_cache_dtype=kv_cache_dtype))


def test_what_nobody_measured_is_said() -> None:
    ((line, is_measured),) = notice().lines([parse_policy("snapkv"), parse_policy("full")])
    assert not is_measured
    assert line.endswith("`vllm-kvx evaluate org/m --policies snapkv --save`")
    assert notice().as_json(parse_policy("snapkv"))["measured"] is False


def test_what_was_measured_is_said() -> None:
    saving("fastkv", "fastkv:tsp_layer=4", 0.5)
    saving("fier-64", "fier-64:dense_below=0", 0.75)
    found = notice().as_json(parse_policy("fastkv:tsp_layer=4"))
    assert found["measured"] and found["of_full"][0] == 0.5 and found["n"] == 10
    assert found["says"].startswith("fastkv:tsp_layer=4: kept 50.0% [")
    assert "10 prompts of 512 tokens, full 100.0% right, 2026-01-02" in found["says"]
    # Another layer is another policy; retrieval is evaluated at every length.
    assert not notice().as_json(parse_policy("fastkv:tsp_layer=5"))["measured"]
    assert notice().as_json(parse_policy("fier-64"))["of_full"][0] == 0.75


def test_each_kv_cache_has_its_own_record() -> None:
    fier, full = parse_policy("fier-64"), parse_policy("full")
    saving("fier-64", "fier-64:dense_below=0", 0.75)
    # A narrow cache loses answers without any policy, so all of its policies may.
    lines = notice("fp8").lines([fier, full])
    assert [is_measured for _, is_measured in lines] == [False, False]
    assert lines[0][0].endswith("`vllm-kvx evaluate org/m --policies fier-64@fp8 --save`")
    assert lines[1][0].endswith("`vllm-kvx evaluate org/m --policies full@fp8 --save`")
    saving("fier-64@fp8", "fier-64:dense_below=0@fp8", 0.25)
    saving("full@fp8", "full@fp8", 0.5)
    for dtype, kept in (("auto", 0.75), ("bfloat16", 0.75), ("fp8", 0.25), ("fp8_e4m3", 0.25)):
        assert notice(dtype).as_json(fier)["of_full"][0] == kept
    assert notice("fp8").as_json(full)["says"].startswith("full@fp8: kept 50.0% [")
    assert notice().as_json(full)["says"] == "full: every entry is kept and read."
    assert not notice("fp8_e5m2").as_json(fier)["measured"]


def test_a_yardstick_over_a_narrow_cache_is_told() -> None:
    # Of an engine whose options, and not the names, say so.
    saving("fier-64", "fier-64:dense_below=0@fp8", 0.75, full="full@fp8")
    assert not notice().as_json(parse_policy("fier-64"))["measured"]
    says = notice("fp8").as_json(parse_policy("fier-64"))["says"]
    assert "of this model's right answers over fp8 entries (10 prompts" in says
    # What fp8 loses, too, is more: it stays.
    assert not saving("fier-64@fp8", "fier-64:dense_below=0@fp8", 0.25)
    left_out = saving("fier-64", "fier-64:dense_below=0@fp8", 0.75, full="full@fp8")
    assert left_out == {"fier-64": "which was compared with full that is not over fp8"}
    assert notice("fp8").as_json(parse_policy("fier-64"))["of_full"][0] == 0.25


def test_a_policy_is_measured_anew(cache: Path) -> None:
    saving("snapkv", "snapkv", 0.5)
    saving("quest-64", "quest-64:dense_below=0", 0.5)
    saving("snapkv", "snapkv", 0.25)
    assert notice().as_json(parse_policy("snapkv"))["of_full"][0] == 0.25
    assert notice().as_json(parse_policy("quest-64"))["measured"]
    (path,) = (cache / "evaluation").iterdir()
    record = json.loads(path.read_text())
    del record["policies"]["snapkv"]["of_full"]
    path.write_text(json.dumps(record))
    assert not notice().as_json(parse_policy("snapkv"))["measured"]
    assert notice().as_json(parse_policy("quest-64"))["measured"]
    path.write_text("{")
    assert not notice().as_json(parse_policy("snapkv"))["measured"]


def test_a_tuned_model_keeps_answers_of_its_original() -> None:
    rights = {"full (original)": 1.0, "speed-4 (original)": 0.25, "full": 0.9, "speed-4": 0.75}
    summary = Summary(
        Answer(Row.parse(name), QuestionId("notes", 512, index), right, 500, 0.5, 0.5, "")
        for name, right in rights.items()
        for index in range(10)
    )
    facts: dict[str, Any] = {"date": "2026-01-02", "original": "org/base"}
    facts[RESOLVED] = {name: name.partition(" ")[0] for name in rights}
    found = save(model_key(CONFIG, None), summary, facts)
    assert found.path is not None and by_name(found.names) == {"speed-4": "speed-4"}
    assert not found.refused and not found.needless
    saved = json.loads(found.path.read_text())["policies"]
    assert list(saved) == ["speed-4"] and saved["speed-4"]["original"] == "org/base"
    assert saved["speed-4"]["of_full"][0] == 0.75 and saved["speed-4"]["full"] == 1.0
    says = notice().as_json(parse_policy("speed-4"))["says"]
    assert says.startswith("speed-4: kept 75.0% [")
    assert "] of the right answers of org/base (10 prompts of 512 tokens" in says


def test_short_questions_have_no_length() -> None:
    summary = Summary(
        Answer(Row.parse(name), QuestionId("short_facts", 0, 0), 1.0, 20, 0.9, 0.9, "")
        for name in ("full", "snapkv")
    )
    facts: dict[str, Any] = {"date": "2026-01-02", RESOLVED: {"full": "full", "snapkv": "snapkv"}}
    save(model_key(CONFIG, None), summary, facts)
    says = notice().as_json(parse_policy("snapkv"))["says"]
    assert "right answers (1 prompts, full 100.0% right" in says


def of_scores(scores: Mapping[str, Mapping[str, float]]) -> Summary:
    """Answers of rows by task: one of each that is so right."""
    return Summary(
        Answer(Row.parse(row), QuestionId(task, 512, 0), score, 500, 0.1, 0.1, "")
        for row, tasks in scores.items()
        for task, score in tasks.items()
    )


FACTS: dict[str, Any] = {RESOLVED: {name: name for name in ("full", "snapkv", "fier-64@fp8")}}


def test_nothing_is_saved_where_full_is_right_nowhere(cache: Path) -> None:
    summary = of_scores({"full": {"notes": 0.0}, "snapkv": {"notes": 0.5}})
    found = save(model_key(CONFIG, None), summary, FACTS)
    assert found.path is None and not found.names and not (cache / "evaluation").exists()
    assert by_name(found.refused) == {
        "snapkv": "because full has none of 1 answers right: there is none to keep"
    }
    # What was there stays as it was.
    saving("snapkv", "snapkv", 0.5)
    (path,) = (cache / "evaluation").iterdir()
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert save(model_key(CONFIG, None), summary, FACTS).path is None
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_rows_that_are_not_saved_are_named_beside_those_that_are() -> None:
    scores = {"full": {"notes": 1.0}, "snapkv": {"notes": 0.5}, "snapkv:window=8": {"notes": 0.5}}
    scores |= {"fier-64": {"vt": 1.0}, "full@bfloat16": {"notes": 1.0}}
    resolved = {name: name for name in scores}
    resolved |= {"snapkv:window=8": "snapkv", "full@bfloat16": "full"}
    rows = list(map(Row.parse, [*scores, "quest-64"]))
    found = save(model_key(CONFIG, None), of_scores(scores), {RESOLVED: resolved}, rows)
    assert found.path is not None and by_name(found.names) == {"snapkv": "snapkv"}
    assert list(json.loads(found.path.read_text())["policies"]) == ["snapkv"]
    assert by_name(found.needless) == {
        "snapkv:window=8": "which another row is, too",
        "full@bfloat16": "which is full itself",
    }
    assert by_name(found.refused) == {
        "fier-64": "because full has none of the same prompts right",
        "quest-64": "which answered nothing",
    }


def test_a_row_that_was_cut_off_takes_no_place(cache: Path) -> None:
    """Its engine failed, or refused its long prompts, once it had answered short ones."""
    saving("snapkv", "snapkv", 0.5)
    (path,) = (cache / "evaluation").iterdir()
    before = path.read_bytes()
    scores = {"full": {"notes": 1.0, "vt": 1.0}, "snapkv": {"notes": 1.0}}
    found = save(model_key(CONFIG, None), of_scores(scores), FACTS)
    assert by_name(found.refused) == {"snapkv": "which did not answer all prompts"}
    assert path.read_bytes() == before


def test_perplexity_alone_is_no_share_of_answers() -> None:
    summary = of_scores({"full": {PERPLEXITY: 2.0}, "snapkv": {PERPLEXITY: 2.5}})
    found = save(model_key(CONFIG, None), summary, FACTS)
    assert found.path is None
    assert by_name(found.refused) == {
        "snapkv": "of which no answer is right or wrong: perplexity alone was asked"
    }


def test_a_record_without_policies_is_begun_anew(cache: Path) -> None:
    saving("snapkv", "snapkv", 0.5)
    (path,) = (cache / "evaluation").iterdir()
    path.write_text('{"key": "k"}')
    assert not saving("snapkv", "snapkv", 0.25)
    assert notice().as_json(parse_policy("snapkv"))["of_full"][0] == 0.25


def test_what_dropped_nothing_is_not_saved(cache: Path) -> None:
    # Rates keep at least kv_floor entries: under them a shorter prompt is as in full.
    summary = Summary(
        Answer(Row.parse(name), QuestionId("notes", 512, index), 1.0, 500, 1.0, 1.0, "")
        for name in ("full", "snapkv", "full@fp8")
        for index in range(6)
    )
    names = ("full", "snapkv", "full@fp8")
    facts: dict[str, Any] = {"date": "2026-01-02", RESOLVED: {name: name for name in names}}
    saved = save(model_key(CONFIG, None), summary, facts)
    refused = by_name(saved.refused)
    assert list(refused) == ["snapkv"] and "every entry" in refused["snapkv"]
    # Over another KV cache full keeps every entry, and may lose answers.
    assert list(by_name(saved.names)) == ["full@fp8"]


def test_quick_prompts_are_longer_than_what_is_always_kept() -> None:
    from vllm_kvx.tools.evaluate.defaults import quick_defaults
    from vllm_kvx.tools.evaluate.shares import shares_of

    (length,) = quick_defaults("any chat model")["lengths"]
    # A prompt is fitted to its length from below.
    assert shares_of(parse_policy("snapkv:kv_rate=0.2"), length - 24, 32, 30).kept < 1


def test_an_entry_of_another_default_floor_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a bare rate kept a tenth of the shortest chat, and its name is the same today."""
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path))
    path = records.record_path("key", tmp_path)
    path.parent.mkdir(parents=True)
    entry = {"of_full": [0.7, 0.6, 0.8], "full": 0.9, "n": 8, "lengths": {}}
    names = ("snapkv", "snapkv:kv_floor=0", "fier-64", "fastkv:tsp_layer=3,kv_budget=64")

    def found(**more: int) -> list[bool]:
        policies = {records.canonical(parse_policy(n)): {**entry, **more} for n in names}
        path.write_text(json.dumps({"key": "key", "policies": policies}))
        return [records.load("key", parse_policy(name)) is not None for name in names]

    assert found() == [False, True, True, False]
    assert found(kv_floor=records.DEFAULT_KV_FLOOR) == [True] * 4


def test_answers_that_ended_before_retention_are_told_or_not_saved() -> None:
    name = "fastkv:tsp_layer=3,kv_rate=0.2,after=8"
    facts: dict[str, Any] = {"date": "2026-01-02", RESOLVED: {"full": "full", name: name}}

    def saved(*generated: int) -> Mapping[str, str]:
        summary = Summary(
            Answer(Row(row), QuestionId("notes", 512, index), 1.0, 500, 0.6, 0.6, "", count)
            for row in ("full", name)
            for index, count in enumerate(generated)
        )
        return by_name(save(model_key(CONFIG, None), summary, facts).refused)

    assert "retained nothing, since no answer has more than 9 tokens" in saved(9, 1)[name]
    assert not saved(9, 10, 11)
    says = notice().as_json(parse_policy(name))["says"]
    assert "(3 prompts of 512 tokens, 1 of whose answers ended before retention, full" in says
