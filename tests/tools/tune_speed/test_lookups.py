"""Generated lookups: held out from the evaluation, answerable, of any length, fixed by a seed."""

import ast
import inspect
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, chat_tokenizer
from support.tokenizers import Counting

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks import filler, table
from vllm_kvx.tools.tune_speed.dialogues import Dialogue, assistant, templated, user
from vllm_kvx.tools.tune_speed.documents.base import Ask, Document
from vllm_kvx.tools.tune_speed.documents.records import Records
from vllm_kvx.tools.tune_speed.documents.values import Values, sections
from vllm_kvx.tools.tune_speed.lookups import (
    KINDS,
    fitted_lookup,
    long_contexts,
    lookup,
    lookup_of,
    questions,
    recital,
)

# What has no one right answer, and what the document does not say itself.
OPEN = {"summary", "whole", "explain", "absent", "no_passage"}
CHECKED = {"after", "last", "value", "hop", "compare", "reverse", "count", "filter"}
CHECKED |= {"chain", "frequent"}
SIZES = (0, 40, 400)


@pytest.fixture
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def documents(kind: str, sizes: tuple[int, ...] = SIZES) -> Iterator[Document]:
    for size in sizes:
        for seed in range(12):
            yield KINDS[kind](random.Random(f"{kind} {seed}"), size)


def every_ask(document: Document) -> Iterator[Ask]:
    """Each kind of question that the document allows, some times."""
    for _, make in document.asks().values():
        for seed in range(3):
            made = make(random.Random(seed))
            if made is not None:
                yield made


def said(dialogue: Dialogue) -> str:
    return "\n".join(message["content"] for message in dialogue.messages)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_answers_stand_in_the_document(kind: str) -> None:
    seen = set()
    for document in documents(kind):
        for ask in every_ask(document):
            seen.add(ask.kind)
            assert bool(ask.reference) == (ask.kind not in OPEN), ask
            if ask.kind != "count":
                assert all(line in document.text for line in ask.reference.splitlines()), ask
            # No slot is left open.
            assert not re.search(r"\{\w+\}", ask.question), ask
    rare = {"hop", "compare", "filter", "filtered_rows", "count", "attribute"}
    rare |= {"chain", "frequent"}
    assert set(document.asks()) - seen <= rare


def parsed(document: Document) -> list[dict[str, str]] | None:
    try:
        rows = [json.loads(line) for line in document.text.splitlines()]
    except ValueError:
        return None
    return [{name.replace("_", " "): value for name, value in row.items()} for row in rows]


def named(question: str, name: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", question))


def readings(ask: Ask, rows: list[dict[str, str]]) -> Iterator[list[str]]:
    """Every answer that the question may mean, each as lines, worked out from the rows alone."""
    wanted = ask.reference.splitlines()
    keys = [next(iter(row.values())) for row in rows]
    by_key = dict(zip(keys, rows, strict=True))
    fields = [field for field in list(rows[0])[1:] if named(ask.question, field)]
    asked = [key for key in keys if named(ask.question, key)]
    if ask.kind == "after":
        yield from ([keys[keys.index(key) + 1]] for key in asked)
    elif ask.kind == "last":
        yield [keys[-1]]
    elif ask.kind in ("value", "hop"):
        for key in asked:
            for field in fields:
                links = [by_key.get(by_key[key][name]) for name in fields]
                of = [by_key[key]] if ask.kind == "value" else links
                yield from ([row[field]] for row in of if row)
    elif ask.kind == "chain":
        for key in asked:
            for field in fields:
                way = [by_key[key][field]]
                while way[-1] in by_key:
                    way.append(by_key[way[-1]][field])
                yield way[:-1]
    elif ask.kind == "frequent":
        for field in fields:
            times = Counter(row[field] for row in rows)
            yield sorted(times, key=lambda value, times=times: -times[value])[: len(wanted)]
    elif ask.kind == "compare":
        for field in fields:
            first, second = sorted(asked, key=ask.question.rindex)
            figures = [by_key[key][field] for key in (first, second)]
            if all(figure.isdigit() for figure in figures):
                yield [max(asked, key=lambda key: int(by_key[key][field])), *figures]
    else:
        for field in fields:
            for value in {row[field] for row in rows if named(ask.question, row[field])}:
                found = [key for key in keys if by_key[key][field] == value]
                yield [str(len(found))] if ask.kind == "count" else found


def test_answers_are_right() -> None:
    checked: Counter[str] = Counter()
    for kind in ("staff", "stock", "services", "stations", "bookings"):
        for seed in range(150):
            document = KINDS[kind](random.Random(seed), 300 if seed % 3 else 1500)
            rows = parsed(document)
            if rows is None:
                continue
            assert isinstance(document, Records)
            for ask in every_ask(document):
                if ask.kind in CHECKED:
                    assert ask.reference.splitlines() in readings(ask, rows), ask
                    checked[ask.kind] += 1
    assert set(checked) == CHECKED and min(checked.values()) >= 5, checked


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_absent_keys_are_absent(kind: str) -> None:
    for document in islice(documents(kind, (60,)), 5):
        for ask in every_ask(document):
            if ask.kind == "no_passage":
                (title,) = re.findall(r'"(.*)"', ask.question)
                assert title not in document.text
            if ask.kind == "absent" and isinstance(document, Records):
                keys = [record[document.schema.key[0]] for record in document.records]
                assert not any(named(ask.question, key) for key in keys)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_seed_decides_the_dialogue(kind: str) -> None:
    made = [lookup_of(kind, random.Random(seed), 100) for seed in ("a", "a", "b")]
    assert made[0] == made[1] != made[2]
    assert all(dialogue.kind == kind for dialogue in made)


def test_lookups_vary() -> None:
    made = [lookup(random.Random(seed), 200) for seed in range(400)]
    assert {dialogue.kind for dialogue in made} == set(KINDS) and len(KINDS) >= 16
    assert len({said(dialogue) for dialogue in made}) == len(made)
    assert all(dialogue.messages[-1]["role"] == "user" for dialogue in made)
    # Some ask in a second turn, and a good part wants more than a few words.
    turns = Counter(len(dialogue.messages) for dialogue in made)
    assert set(turns) == {1, 3} and 0.05 < turns[3] / len(made) < 0.2
    long = sum(len(dialogue.reference.split()) >= 10 for dialogue in made)
    assert 0.2 < long / len(made) < 0.6
    # Some ask for several things, and then each is on a line of its own.
    lists = [d for d in made if re.search(r"\n(1\. |1\) |- |\* |\(1\) ).*\n.+", question_of(d))]
    assert 0.2 < len(lists) / len(made) < 0.45
    # Questions before the document: what is asked stands in the first line, but for lists.
    first = sum(
        "?" in dialogue.messages[0]["content"].partition("\n")[0]
        for dialogue in made
        if len(dialogue.messages) == 1
    )
    assert 0.06 < first / len(made) < 0.5


def question_of(dialogue: Dialogue) -> str:
    """What stands behind the document, or before it, or in the second turn."""
    parts = dialogue.messages[-1]["content"].split("\n\n")
    if len(dialogue.messages) > 1:
        return "\n\n".join(parts)
    # The longest paragraphs are the document's.
    return "\n\n".join((parts[0], parts[-1]))


def test_a_list_of_questions_has_all_their_references() -> None:
    found = 0
    for seed in range(200):
        document = KINDS["staff"](random.Random(seed), 200)
        ask = questions(document, random.Random(seed))
        if ask.kind != "several":
            continue
        found += 1
        begin, *lines = ask.question.split("\n")
        assert 2 <= len(lines) <= 6 and len(set(lines)) == len(lines)
        assert str(len(lines)) in begin or not re.search(r"\d", begin)
        assert ask.reference
    assert 40 < found < 90


def test_recitals_follow_their_cue() -> None:
    wordings = [
        re.escape(line).replace(r"\{cue\}", "(?P<cue>.*)").replace(r"\{document\}", ".*")
        for line in sections("questions")["recite"]
    ]
    words, cued = [], 0
    for seed in range(300):
        size = (5, 60, 400)[seed % 3]
        made = recital(random.Random(seed), size)
        assert made == recital(random.Random(seed), size)
        *asked, answer = made.messages
        assert made.kind == "recital" and answer == assistant(made.reference)
        text = "\n".join(message["content"] for message in asked)
        assert asked[-1]["role"] == "user" and made.reference in text
        found = next(filter(None, (re.search(wording, text) for wording in wordings)), None)
        if found is not None:
            follows = re.escape(found["cue"]) + r"\s+" + re.escape(made.reference)
            assert re.search(follows, text), made
            cued += 1
        words.append(len(made.reference.split()))
    assert cued > 200 and min(words) >= 1 and max(words) <= 100 and sum(words) / len(words) > 25


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_documents_grow_with_their_size(kind: str) -> None:
    for size in (100, 1000):
        text = KINDS[kind](random.Random("a"), size).text
        assert 0.9 * size <= len(re.findall(r"\w+", text)) <= 1.1 * size + 60


# Held out.


def sequences(text: str, count: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[i : i + count]) for i in range(len(words) - count + 1)}


def evaluated() -> Iterator[str]:
    """The evaluation's prose, all strings of its tasks' modules, and samples."""
    yield " ".join(filler.prose())
    for path in Path(inspect.getfile(filler)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for task in table.TASKS.values():
        yield from (task.make(random.Random(seed), 20).text for seed in range(3))


def test_no_sentence_is_the_evaluations() -> None:
    theirs = set().union(*map(sequences, evaluated()))
    assert len(theirs) > 50_000
    files = ("sentences", "questions", "frames")
    ours = [said(lookup(random.Random(seed), 300)) for seed in range(300)]
    ours += [line for name in files for lines in sections(name).values() for line in lines]
    for text in ours:
        assert not sequences(text) & theirs


def test_no_key_or_value_is_a_word_of_the_evaluation() -> None:
    theirs = set(filler.words())
    for lines in sections("words").values():
        assert not set(re.findall(r"[a-z]+", " ".join(lines).lower())) & theirs
    values = Values(random.Random(0))
    for slot in ("person", "first", "place", "firm", "coined", "email", "object", "level", "code"):
        drawn = " ".join(values.value(slot) for _ in range(3000)).lower()
        assert not set(re.findall(r"[a-zö]+", drawn)) & theirs


def test_no_value_has_a_form_of_the_evaluations() -> None:
    """Its numbers have seven or five digits; its identifiers are UUIDs; VAR assigns."""
    for seed in range(300):
        text = said(lookup(random.Random(seed), 300))
        assert not re.search(r"(?<![\w.,-])(\d{7}|\d{5})(?![\w.,-])", text)
        assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-|\bVAR\b|magic", text)
        assert "python" not in text.lower()


# Lengths.


@pytest.mark.parametrize("longest", [700, 2000, 6000])
def test_lookups_fill_their_length(longest: int, tokenizer: Any) -> None:
    calls = 0
    for seed in range(12):
        counting = Counting(tokenizer)
        dialogue = fitted_lookup(f"{seed}", longest, counting)
        calls += counting.calls
        assert 0.88 * longest <= len(templated(dialogue, tokenizer).prompt) <= longest
        assert dialogue == fitted_lookup(f"{seed}", longest, tokenizer)
    assert calls <= 12 * 10


def test_too_short_a_length_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ToolError, match="no lookup fits into 20 tokens"):
        fitted_lookup("a", 20, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ToolError, match="has no chat template"):
        fitted_lookup("a", 2000, tokenizer)


def test_questions_stand_behind_long_documents(tokenizer: Any) -> None:
    short = [
        Dialogue((user("Why is rain wet?"),), "own"),
        Dialogue((user("Name a lake."), assistant("Lake Garda.")), "file"),
    ]
    made = long_contexts(short, "a", 1500, tokenizer)
    assert made == long_contexts(short, "a", 1500, tokenizer)
    for before, after in zip(short, made, strict=True):
        assert after.messages[1:] == before.messages[1:] and after.kind == before.kind
        assert after.messages[0]["content"].endswith(before.messages[0]["content"])
        assert 0.88 * 1500 <= len(templated(after, tokenizer).prompt) <= 1500
    assert made[0].messages[0]["content"][:400] != made[1].messages[0]["content"][:400]
