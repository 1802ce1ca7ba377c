"""Short questions: their accepted answers are right, and right answers alone score."""

import contextlib
import io
from functools import partial
from typing import Any

import pytest
from support.models import LOOKUP

from vllm_kvx.tools.evaluate.questions import Suite, load_tokenizer
from vllm_kvx.tools.evaluate.store import QuestionId
from vllm_kvx.tools.tasks.base import FixedTask, Sample
from vllm_kvx.tools.tasks.instructions import RULES, holds
from vllm_kvx.tools.tasks.prompts import encode
from vllm_kvx.tools.tasks.short_answers import rows_of
from vllm_kvx.tools.tasks.table import FIXED, GROUPS, TASKS, group_of, tasks_named

LOAD = partial(load_tokenizer, str(LOOKUP), None)
FACTS, CODE, RULED = (FIXED[name] for name in ("short_facts", "short_code", "instructions"))


def asked(task: FixedTask, about: str) -> Sample:
    (sample,) = (sample for sample in task.samples() if about in sample.text)
    return sample


@pytest.mark.parametrize(("task", "least"), [(FACTS, 100), (CODE, 40), (RULED, 40)])
def test_questions_are_many_short_and_different(task: FixedTask, least: int) -> None:
    samples = task.samples()
    assert len({sample.text for sample in samples}) == len(samples) >= least
    assert all(len(sample.text) < 300 and sample.references for sample in samples)


def test_no_question_gives_its_answer_away() -> None:
    for task in (FACTS, CODE):
        for sample in task.samples():
            assert task.score(sample.text, sample) == 0, sample.text
            assert task.score("", sample) == task.score("I do not know.", sample) == 0


def test_accepted_facts_score() -> None:
    for sample in FACTS.samples():
        for reference in sample.references:
            for said in (reference, f"The answer is {reference.lower()}.", f"**{reference}**\n"):
                assert FACTS.score(said, sample) == 1, (sample.text, said)


def test_facts_are_whole_words() -> None:
    leap = asked(FACTS, "leap year")
    assert FACTS.score("There are 366 days", leap) == 1
    for wrong in ("365", "3660", "366.5", "1366", "-366"):
        assert FACTS.score(wrong, leap) == 0
    assert FACTS.score("1,024", asked(FACTS, "power of 10")) == 1
    assert FACTS.score("aurum", asked(FACTS, "symbol of gold")) == 0


def test_accepted_code_is_right() -> None:
    """The data's own expressions are run here; what a model says never is."""
    for row in rows_of("short_code.jsonl"):
        if "expression" in row:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(f"print({row['expression']})")
            assert row["answers"] == [printed.getvalue().strip()]
            continue
        for answer in row["answers"]:
            names: dict[str, Any] = {}
            exec(f"{row['function']} {answer}", names)
            assert eval(row["holds"], names), answer


def test_accepted_code_scores() -> None:
    for sample in CODE.samples():
        for reference in sample.references:
            for said in (
                reference,
                f"`{reference}`",
                f"```python\n{reference}\n```",
                f"def f(x):\n    return {reference}\n",
                f"It is `{reference}`, as far as I see.",
                reference.replace(" ", "  ").replace('"', "'"),
            ):
                assert CODE.score(said, sample) == 1, (sample.text, said)


def test_code_is_compared_as_text() -> None:
    doubled = asked(CODE, "def double")
    assert CODE.score("return x*2", doubled) == CODE.score("x + x", doubled) == 1
    for wrong in ("x * 20", "x * 2 + 1", "x ** 2", "double(x)"):
        assert CODE.score(wrong, doubled) == 0
    floored = asked(CODE, "print(7 // 2)")
    assert CODE.score("The output is 3.", floored) == CODE.score("7 // 2 = 3", floored) == 1
    for wrong in ("3.5", "13", "-3", "3 or 4", "{3}", "print(3)"):
        assert CODE.score(wrong, floored) == 0
    sorted_ = asked(CODE, "sorted([3, 1, 2])")
    assert CODE.score("[1,2,3]", sorted_) == 1 and CODE.score("[3, 1, 2]", sorted_) == 0


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ("words 3", "Well, that's it.", "Well, that is it."),
        ("least_words 3", "one two three", "one two"),
        ("most_words 2", "well-known things", "one two three"),
        ("only echo", "Echo echo\necho", "echo echo!echo o"),
        ("upper", "A CAT, 2 DOGS!", "A CAt"),
        ("lower", "a cat, 2 dogs", "A cat"),
        ("includes copper", "A Copper sky.", "coppery"),
        ("excludes hot", "Hotter than a shot", "It is hot."),
        ("lacks ,", "No commas; none.", "One, two"),
        ("begins Yesterday", "yesterday I sang.", "I sang yesterday"),
        ("ends See you soon", 'Hi! "See you soon!"\n', "See you soon, friend"),
        ("sentences 2", "It has 3.5 legs. Does it?", "One. Two. Three."),
        ("sentences 1", "A dog (the old one) sleeps!", "No end"),
        ("paragraphs 2", "One\nstill one\n\n  \nTwo", "One\nTwo"),
        ("lines 2", "a\n\nb", "a"),
        ("bullets 2", "- a\n- b", "- a\n* b"),
        ("numbered 2", "1. a\n2. b", "1. a\n3. b"),
        ("items 3", "a, b, c.", "a, b,"),
        ("json a,b", '{"b": 1, "a": 2}', '{"a": 1}'),
        ("json a", '```json\n{"a": 1}\n```', 'Here: {"a": 1}'),
        ("json_items 2", "[1, 2]", '{"a": 1, "b": 2}'),
        ("quoted", '"A meal."', 'He said "a meal".'),
    ],
)
def test_rules(rule: str, kept: str, broken: str) -> None:
    assert holds(rule, kept) and not holds(rule, broken)


def test_every_rule_is_used_and_known() -> None:
    used = {rule.partition(" ")[0] for sample in RULED.samples() for rule in sample.references}
    assert used == set(RULES)


def test_an_instruction_is_kept_in_full() -> None:
    sample = asked(RULED, "three animals")
    assert RULED.score("CAT, DOG AND COW", sample) == 1
    assert RULED.score("Cat, dog and cow", sample) == RULED.score("CAT", sample) == 0
    assert all(RULED.score("", each) == 0 for each in RULED.samples())


def test_the_group() -> None:
    assert [task.name for task in tasks_named(["short"])] == list(GROUPS["short"])
    assert not set(GROUPS["short"]) & {*GROUPS["generated"], *TASKS}
    assert group_of("short_code") == "short" and group_of("vt") == "ruler"
    alone = {"one_number", "many_values", "long_phrase", "notes_alone"}
    assert {group_of(name) for name in TASKS} == {"ruler", "lookups", "demo", *alone}
    assert group_of("longbench_trec") == "longbench" and group_of("perplexity") == "perplexity"


def test_lengths_do_not_concern_them() -> None:
    def prepared(*lengths: int) -> dict[Any, Any]:
        suite = Suite.of(["short"], None, lengths=lengths, samples=3)
        suite.check(100)
        return suite.prepare(LOAD, lambda *a: None)

    found = prepared(16)
    assert set(found) == {
        QuestionId(name, 0, index) for name in GROUPS["short"] for index in range(3)
    }
    assert found == prepared(4096, 16384)
    for question, each in found.items():
        sample = FIXED[question.task].samples()[question.index]
        assert each.prompt.token_ids == encode(sample, LOAD()).token_ids


def test_an_engine_has_room_for_what_is_asked() -> None:
    suite = Suite.of(["short"], None, lengths=(16384,), samples=None)
    prepared = suite.prepare(LOAD, lambda *a: None)
    longest = max(len(each.prompt.token_ids) + each.prompt.max_tokens for each in prepared.values())
    assert suite.context(prepared) == longest < 1000
    both = Suite.of(["notes", "short"], None, lengths=(16384,), samples=None)
    assert both.context(prepared) == 16384 + 256
    narrow = Suite.of(["notes", "short"], None, lengths=(16,), samples=None)
    assert narrow.context(prepared) == longest
