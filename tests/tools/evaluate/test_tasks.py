"""Generated tasks: the evidence answers the question, seeds decide, right answers score 1."""

import random
import re
from itertools import pairwise

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks.base import Sample, Task
from vllm_kvx.tools.tasks.filler import adjectives, nouns, prose, words
from vllm_kvx.tools.tasks.scoring import share_found, share_of_words
from vllm_kvx.tools.tasks.table import GROUPS, TASKS, tasks_named

SPREAD = ("cwe", "fwe")
# It has no more than its 128 notes.
BOUNDED = {"notes_alone"}
LOOKUPS = sorted(set(TASKS) - {*SPREAD, "vt"})
SEEDS = ("a", "b", "c")


def made(name: str, seed: str, size: int) -> Sample:
    return TASKS[name].make(random.Random(seed), size)


def evidence_of(sample: Sample) -> list[str]:
    return [sample.text[span.begin : span.end] for span in sample.evidence]


def depths(sample: Sample) -> list[float]:
    return [span.begin / len(sample.text) for span in sample.evidence]


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("size", [0, 1, 37, 300])
def test_evidence_is_what_is_asked_for(name: str, size: int) -> None:
    for seed in SEEDS:
        sample = made(name, seed, size)
        assert sorted(evidence_of(sample)) == sorted(sample.references)
        for reference in sample.references:
            assert sample.text.count(reference) == 1 or name.startswith("notes")
            assert reference not in sample.begins


@pytest.mark.parametrize("size", [0, 50])
def test_evidence_of_variables_is_their_chain(size: int) -> None:
    for seed in SEEDS:
        sample = made("vt", seed, size)
        first, *links = evidence_of(sample)
        name, value = re.fullmatch(r"VAR ([A-Z]{5}) = (\d{5})", first).groups()  # type: ignore[union-attr]
        assert f"the value {value} in the text above" in sample.text
        assert f"5 variables are assigned the value {value}" in sample.begins
        names = [name]
        for link in links:
            after, before = re.fullmatch(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5})", link).groups()  # type: ignore[union-attr]
            assert before == names[-1]
            names.append(after)
        assert tuple(names) == sample.references and len(names) == 5


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_seed_decides_the_sample(name: str) -> None:
    assert made(name, "a", 40) == made(name, "a", 40)
    assert made(name, "a", 40).references != made(name, "b", 40).references
    assert made(name, "a", 40).text != made(name, "b", 40).text


@pytest.mark.parametrize("name", sorted(set(TASKS) - BOUNDED))
def test_longer_prompts_ask_the_same(name: str) -> None:
    for seed in SEEDS:
        sizes = [made(name, seed, size) for size in (0, 10, 200, 1000)]
        assert len({(sample.references, sample.begins) for sample in sizes}) == 1
        lengths = [len(sample.text) for sample in sizes]
        assert lengths == sorted(set(lengths))
        if name not in SPREAD:
            assert len({sample.text[-12:] for sample in sizes}) == 1
            order = [evidence_of(sample) for sample in sizes]
            assert order == order[:1] * len(order)


@pytest.mark.parametrize("name", sorted(set(TASKS) - set(SPREAD)))
def test_depths_do_not_depend_on_the_size(name: str) -> None:
    for seed in SEEDS:
        for short, long in zip(
            depths(made(name, seed, 600)), depths(made(name, seed, 2000)), strict=True
        ):
            # Sentences of prose differ in length: half of them are twice as long as the others.
            assert long == pytest.approx(short, abs=0.15)


def test_depths_are_spread_over_the_text() -> None:
    found = [depths(made("niah_single_1", str(seed), 200))[0] for seed in range(200)]
    for low in (0.0, 0.25, 0.5, 0.75):
        assert 30 <= sum(low <= depth < low + 0.25 for depth in found) <= 70


@pytest.mark.parametrize("name", sorted(set(TASKS) - BOUNDED))
def test_texts_grow_evenly(name: str) -> None:
    lengths = [len(made(name, "a", size).text) for size in range(0, 2001, 500)]
    grown = [after - before for before, after in pairwise(lengths)]
    assert max(grown) < 2.5 * min(grown)  # Prose: some chapters' sentences are twice as long.


@pytest.mark.parametrize("name", sorted(TASKS))
def test_scores(name: str) -> None:
    task = TASKS[name]
    for seed in SEEDS:
        sample = made(name, seed, 20)
        right = " and ".join(sample.references)
        assert task.score(f" {right.upper()}.", sample) == 1
        assert task.score("", sample) == task.score("I do not know.", sample) == 0
        if len(sample.references) > 1:
            kept = len(sample.references) // 2
            assert task.score(", ".join(sample.references[:kept]), sample) == pytest.approx(
                kept / len(sample.references)
            )
        other = made(name, seed + "x", 20)
        assert task.score(" and ".join(other.references), sample) <= 0.25


def test_share_found() -> None:
    assert share_found("The numbers are 12, 34", ["12", "34", "56", "78"]) == 0.5
    assert share_found("Zebra", ["ZEBRA"]) == 1


def test_share_of_words() -> None:
    reference = "418 Brisk Canyon Road, Copper"
    assert share_of_words("It is: 418 brisk canyon road copper.", reference) == 1
    assert share_of_words("418 brisk road", reference) == pytest.approx(3 / 5)
    assert share_of_words("copper road canyon brisk 418", reference) == pytest.approx(1 / 5)
    assert share_of_words("418 418 418", reference) == pytest.approx(1 / 5)
    assert share_of_words("", reference) == 0


def test_distractors_do_not_answer() -> None:
    sample = made("niah_multikey_1", "a", 5)
    assert len(set(re.findall(r"\d{7}", sample.text))) == 4 and len(sample.evidence) == 1
    sample = made("niah_multikey_2", "a", 99)
    assert len(set(re.findall(r"\d{7}", sample.text))) == 100
    sample = made("code_lookup", "a", 99)
    assert sample.text.count(sample.begins.split("`")[1].removesuffix("()")) == 2


def test_one_number_is_asked_for_in_the_singular() -> None:
    single, several = made("niah_single_2", "a", 0), made("niah_multiquery", "a", 0)
    assert single.text.startswith("A special magic number is hidden within the following text. ")
    assert "\nWhat is the special magic number for " in single.text
    assert single.begins.endswith(" mentioned in the provided text is")
    assert several.text.startswith("Some special magic numbers are hidden within the following ")
    assert "\nWhat are all the special magic numbers for " in several.text
    assert ", and " in several.begins and several.begins.endswith(" are")


def test_the_question_stands_first() -> None:
    sample = made("question_first", "a", 50)
    key = re.match(r"What is the special magic number for (\S+)\?", sample.text)
    assert key is not None
    # Once in the question and once in the needle.
    assert sample.text.count(key[1]) == 2 and key[1] not in sample.begins


@pytest.mark.parametrize("size", [0, 479, 480, 3000])
def test_common_words_are_the_most_common(size: int) -> None:
    sample = made("cwe", "a", size)
    asked = sample.text.rpartition("Memorize the ones")[2]
    entries = re.findall(r"\d+\. (\S+)", asked)
    counts = {word: entries.count(word) for word in set(entries)}
    common = {word for word, times in counts.items() if times == max(counts.values())}
    assert common == set(sample.references)
    others = {times for word, times in counts.items() if word not in common}
    assert (max(counts.values()), others) == (
        (6, {1} if size else set()) if size < 480 else (30, {3})
    )


@pytest.mark.parametrize("size", [0, 1000])
def test_frequent_words_are_the_most_frequent(size: int) -> None:
    sample = made("fwe", "a", size)
    counts = {word: sample.text.split().count(word) for word in set(sample.text.split())}
    ranked = sorted(counts, key=lambda word: -counts[word])
    coded = [word for word in ranked if re.fullmatch("[a-z]{6}", word)]
    assert ranked[0] == "..." and tuple(coded[:3]) == sample.references
    assert counts[coded[2]] > counts[coded[3]]


def test_words() -> None:
    assert len(words()) == len(set(words())) == 2048 and {*nouns(), *adjectives()} < set(words())
    text = set(re.findall("[a-z]+", " ".join(prose()).lower()))
    assert not text & set(nouns())


def test_tasks_by_name_and_group() -> None:
    assert [task.name for task in tasks_named(["vt", "demo", "vt", "notes"])] == [
        *("vt", "notes", "notes_3")
    ]
    others = {"notes", "notes_3", "one_number", "many_values", "long_phrase", "notes_alone"}
    assert set(GROUPS["ruler"]) < set(GROUPS["generated"]) == set(TASKS) - others
    for task in TASKS.values():
        assert isinstance(task, Task) and task.about and task.max_tokens > 0
    with pytest.raises(
        ToolError, match=r"unknown task 'niah_singel_1' \(meant 'niah_single_1'\?\)"
    ):
        tasks_named(["niah_singel_1"])
