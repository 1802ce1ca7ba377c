"""RULER's common words (arXiv 2404.06654): the ten most frequent of a long list."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task
from vllm_kvx.tools.tasks.scoring import share_found

COMMON = 10
QUESTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
BEGINNING = "Answer: The top 10 words that appear most often in the list are:"


class Repeats(NamedTuple):
    """How often a common and another word stand in the list."""

    common: int
    other: int


class Form(NamedTuple):
    """The list that is asked about and the solved example's, with the example's other words."""

    asked: Repeats
    example: Repeats
    example_others: int


# RULER's for prompts below 4,096 tokens, and its own from there on.
SHORT = Form(Repeats(6, 1), Repeats(3, 1), 10)
LONG = Form(Repeats(30, 3), Repeats(10, 3), 30)


def least(form: Form) -> int:
    """Entries of both lists where the one that is asked about has common words alone."""
    example = COMMON * form.example.common + form.example_others * form.example.other
    return COMMON * form.asked.common + example


# From this size on a list is long: a bit below 4,096 tokens.
SWITCH = 480


def vocabulary(rng: random.Random) -> Iterator[str]:
    """All words in random order, then pairs of words."""
    yield from rng.sample(filler.words(), len(filler.words()))
    yield from filler.distinct(lambda: filler.word_key(rng))


def listed(rng: random.Random, common: list[str], others: list[str], repeats: Repeats) -> str:
    """The words in random order, numbered."""
    entries = common * repeats.common + others * repeats.other
    rng.shuffle(entries)
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))


class CommonWords(Task):
    """Ten words stand in a numbered list ten times as often as the others (short lists: six).

    Wording and score are RULER's; as there, a solved example stands in front. One unit of size is
    one entry. There is no evidence: the answer is spread over the whole list.
    """

    name = "cwe"
    about = "RULER: the ten most frequent words of a numbered list"
    max_tokens = 120

    def make(self, rng: random.Random, size: int) -> Sample:
        unused = vocabulary(rng)
        asked = list(islice(unused, COMMON))
        example = list(islice(unused, COMMON))
        form = LONG if size >= SWITCH else SHORT
        # Both forms have as many entries for a size, so that texts grow evenly.
        entries = least(SHORT) + size - least(form)
        example_list = listed(rng, example, list(islice(unused, form.example_others)), form.example)
        others = list(islice(unused, entries // form.asked.other))
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(example, start=1))
        return Sample(
            text=f"{QUESTION.format(context=example_list)} {BEGINNING} {numbered}\n"
            + QUESTION.format(context=listed(rng, asked, others, form.asked)),
            references=tuple(asked),
            begins=BEGINNING,
        )

    def score(self, answer: str, sample: Sample) -> float:
        return share_found(answer, sample.references)
