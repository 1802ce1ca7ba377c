"""Lookups whose answers are several words: addresses, mottos and pass phrases."""

import random
from collections.abc import Callable, Mapping
from typing import ClassVar

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task, TextBuilder
from vllm_kvx.tools.tasks.filler import Needle
from vllm_kvx.tools.tasks.scoring import share_of_words

NOTES = 4
# Words of a long pass phrase: each is a token at least.
LONG = 32
STREETS = ("Road", "Street", "Lane", "Avenue", "Square")


def address(rng: random.Random) -> str:
    """Five or six words: `418 Brisk Canyon Road, Copper`."""
    street = f"{rng.choice(filler.adjectives())} {rng.choice(filler.nouns())}".title()
    town = " ".join(rng.sample(filler.nouns(), rng.randint(1, 2))).title()
    return f"{rng.randint(100, 999)} {street} {rng.choice(STREETS)}, {town}"


def motto(rng: random.Random) -> str:
    """Four or six words: `Gentle canyon, brisk kettle`."""
    pairs = [
        f"{rng.choice(filler.adjectives())} {rng.choice(filler.nouns())}"
        for _ in range(rng.randint(2, 3))
    ]
    return ", ".join(pairs).capitalize()


def pass_phrase(rng: random.Random) -> str:
    """A pass phrase of three to eight different nouns, with blanks between them."""
    return " ".join(rng.sample(filler.nouns(), rng.randint(3, 8)))


def long_phrase(rng: random.Random) -> str:
    """A pass phrase of LONG different nouns."""
    return " ".join(rng.sample(filler.nouns(), LONG))


KINDS: dict[str, Callable[[random.Random], str]] = {
    "address": address,
    "motto": motto,
    "pass phrase": pass_phrase,
}


class SeveralWords(Task):
    """Four notes of one kind in prose, with answers of three to eight words; one is asked for.

    The score is the share of the answer's words that are right, in their order: a policy that keeps
    half of a value's tokens is told from one that keeps none and from one that keeps all. Nearly
    every word is drawn, so that another note's answer scores about 0.

    kinds: what is noted, and what makes it.
    """

    kinds: ClassVar[Mapping[str, Callable[[random.Random], str]]] = KINDS

    name = "several_words"
    about = "an address, a motto or a pass phrase in prose, one of four: three to eight words"
    max_tokens = 48

    def make(self, rng: random.Random, size: int) -> Sample:
        kind = rng.choice(sorted(self.kinds))
        owners = filler.distinct(lambda: filler.word_key(rng))
        values = filler.distinct(lambda: self.kinds[kind](rng))
        entries = [(next(owners), next(values)) for _ in range(NOTES)]
        asked, answer = rng.choice(entries)
        needles = [
            Needle(
                f"The {kind} of the {owner} club is: {value}.",
                rng.random(),
                asked=value if owner == asked else "",
            )
            for owner, value in entries
        ]
        builder = TextBuilder().add(
            "Some notes about clubs are hidden within the following text. Make sure to memorize "
            "them. I will quiz you about them afterwards.\n"
        )
        filler.scatter(builder, needles, filler.sentences(rng.random(), size), " ")
        builder.add(f"\n{_question(kind, asked)}")
        other, value = next(entry for entry in entries if entry[0] != asked)
        return Sample(
            text=builder.text,
            references=(answer,),
            evidence=tuple(builder.evidence),
            begins=_beginning(kind, asked),
            then=Sample(_question(kind, other), (value,), begins=_beginning(kind, other)),
        )

    def score(self, answer: str, sample: Sample) -> float:
        return share_of_words(answer, sample.references[0])


class LongPhrase(SeveralWords):
    """The same with a pass phrase of 32 words: nearly all of the answer is found by decode steps.

    A policy that loses the text to generated tokens alone answers the first word and not the last.
    """

    name = "long_phrase"
    about = "a pass phrase of 32 words in prose, one of four"
    max_tokens = 128
    kinds: ClassVar[Mapping[str, Callable[[random.Random], str]]] = {"pass phrase": long_phrase}


def _question(kind: str, owner: str) -> str:
    return f"What is the {kind} of the {owner} club mentioned in the provided text?"


def _beginning(kind: str, owner: str) -> str:
    return f"The {kind} of the {owner} club mentioned in the provided text is"
