"""RULER's variable tracking (arXiv 2404.06654): names that come to one value by assignments."""

import random
import string
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task, TextBuilder
from vllm_kvx.tools.tasks.filler import Needle
from vllm_kvx.tools.tasks.scoring import share_found

HOPS = 4
# The solved example in front has names of three letters, so that they are no answer.
LETTERS, EXAMPLE_LETTERS = 5, 3
EXAMPLE_LINES = 5


def question(value: str) -> str:
    return f"Question: Find all variables that are assigned the value {value} in the text above."


def beginning(value: str) -> str:
    return (
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{HOPS + 1} variables are assigned the value {value}, they are:"
    )


def chain(names: Sequence[str], value: str) -> list[str]:
    """The assignments, first to last."""
    return [f"VAR {names[0]} = {value}"] + [
        f"VAR {name} = VAR {before}" for before, name in pairwise(names)
    ]


def names(rng: random.Random, letters: int) -> Iterator[str]:
    return filler.distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))


class VariableTracking(Task):
    """One chain of five variables in noise: which ones have the value?

    Wording and score are RULER's; as there, a solved example with little noise stands in front.
    The evidence is the chain's assignments.
    """

    name = "vt"
    about = "RULER: five variables that are assigned one value by a chain, in noise"
    max_tokens = 30

    def make(self, rng: random.Random, size: int) -> Sample:
        builder = TextBuilder()
        example, value = self._passage(rng, EXAMPLE_LINES, EXAMPLE_LETTERS, builder)
        builder.add(f" {beginning(value)} {' '.join(example)}\n\n\n\n")
        builder.evidence.clear()
        asked, value = self._passage(rng, size, LETTERS, builder)
        return Sample(builder.text, tuple(asked), tuple(builder.evidence), beginning(value))

    def _passage(
        self, rng: random.Random, lines: int, letters: int, builder: TextBuilder
    ) -> tuple[list[str], str]:
        """Appends a text with a chain and its question; returns the names and the value."""
        asked, value = list(islice(names(rng, letters), HOPS + 1)), str(rng.randint(10000, 99999))
        depths = sorted(rng.random() for _ in asked)
        links = [
            Needle(text, depth, asked=text)
            for text, depth in zip(chain(asked, value), depths, strict=True)
        ]
        builder.add(
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            "\n\n"
        )
        filler.scatter(builder, links, [filler.NOISE] * lines, "\n")
        builder.add(f"\n{question(value)}")
        return asked, value

    def score(self, answer: str, sample: Sample) -> float:
        return share_found(answer, sample.references)
