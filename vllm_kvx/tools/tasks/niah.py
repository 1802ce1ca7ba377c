"""RULER's needles in a haystack (arXiv 2404.06654): values to look up by their keys."""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task, TextBuilder
from vllm_kvx.tools.tasks.filler import Needle
from vllm_kvx.tools.tasks.scoring import share_found

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."


def number(rng: random.Random) -> str:
    """A random number of seven digits."""
    return str(rng.randint(10**6, 10**7 - 1))


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "word": filler.word_key,
    "number": number,
    "uuid": random_uuid,
}


@dataclass(frozen=True)
class Needles(Task):
    """Some of several keys are asked for, each with all of its values.

    Prompt, question, answer's beginning and score are RULER's. Unlike there, depths are drawn from
    all places, not from 40, and keys and values differ from each other.

    haystack: `noise` is one line again and again, `prose` runs on, and `needles` are needles of
        other keys.
    key, value: what keys and values are.
    keys, values, queries: how many keys, values for each key, and keys that are asked for.
    """

    name: str
    about: str
    haystack: Literal["noise", "prose", "needles"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    max_tokens: int = 128

    def make(self, rng: random.Random, size: int) -> Sample:
        keys = filler.distinct(lambda: MAKERS[self.key](rng))
        values = filler.distinct(lambda: MAKERS[self.value](rng))
        entries = [
            (next(keys), [next(values) for _ in range(self.values)]) for _ in range(self.keys)
        ]
        asked = rng.sample(entries, self.queries)
        needles = [
            Needle(
                NEEDLE.format(kind=self.value, key=key, value=value),
                rng.random(),
                asked=value if (key, group) in asked else "",
            )
            for key, group in entries
            for value in group
        ]
        start = rng.random()
        # Nothing above depends on the size.
        if self.haystack == "prose":
            hay, separator = filler.sentences(start, size), " "
        elif self.haystack == "noise":
            hay, separator = [filler.NOISE] * size, "\n"
        else:
            hay, separator = [], "\n"
            for _ in range(size):
                key, value = next(keys), next(values)
                hay.append(NEEDLE.format(kind=self.value, key=key, value=value))
                entries.append((key, [value]))

        names = [key for key, _ in asked]
        query = names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
        one = self.values * self.queries == 1
        kind = self.value if one else f"{self.value}s"
        others = [entry for entry in entries if entry not in asked]
        # By a state of its own, so that what is drawn above is what it was without it.
        then = self._then(*random.Random(query).choice(others)) if others and one else None
        builder = TextBuilder()
        builder.add(
            f"A special magic {kind} is hidden within the following text. "
            if one
            else f"Some special magic {kind} are hidden within the following text. "
        )
        builder.add(f"Make sure to memorize it. I will quiz you about the {kind} afterwards.\n")
        filler.scatter(builder, needles, hay, separator)
        builder.add(f"\n{_question(kind, query, one)}")
        return Sample(
            text=builder.text,
            references=tuple(value for _, group in asked for value in group),
            evidence=tuple(builder.evidence),
            begins=_beginning(kind, query, one),
            then=then,
        )

    def _then(self, key: str, values: list[str]) -> Sample:
        """A second question: for another key that has one value."""
        begins = _beginning(self.value, key, True)
        return Sample(_question(self.value, key, True), tuple(values), begins=begins)

    def score(self, answer: str, sample: Sample) -> float:
        return share_found(answer, sample.references)


def _question(kind: str, query: str, one: bool) -> str:
    what = f"is the special magic {kind}" if one else f"are all the special magic {kind}"
    return f"What {what} for {query} mentioned in the provided text?"


def _beginning(kind: str, query: str, one: bool) -> str:
    return f"The special magic {kind} for {query} mentioned in the provided text " + (
        "is" if one else "are"
    )
