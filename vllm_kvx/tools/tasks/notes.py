"""Lookups in the one format that the demo checkpoint answers (tests/checkpoints/lookup-8l)."""

import random
from dataclasses import dataclass

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task, TextBuilder
from vllm_kvx.tools.tasks.filler import Needle
from vllm_kvx.tools.tasks.scoring import share_of_words

MOST_NOTES = 128


@dataclass(frozen=True)
class Notes(Task):
    """A line `- zebra coffee.` between lines of prose, asked for by `Question: zebra`.

    A note stands for every line of prose, up to 128. The score is the share of the value's words
    that are right, in their order.

    words: the words of a value, one to three.
    prose: whether lines of prose stand between the notes; else the text is notes alone, and no
        longer than the 128 of them.
    """

    name: str
    about: str
    words: int
    max_tokens: int = 8
    prose: bool = True

    def make(self, rng: random.Random, size: int) -> Sample:
        unused = iter(rng.sample(filler.nouns(), MOST_NOTES * (1 + self.words)))
        notes = [
            (next(unused), " ".join(next(unused) for _ in range(self.words)))
            for _ in range(MOST_NOTES)
        ]
        depths = [rng.random() for _ in notes]
        start = rng.random()
        asked, answer = notes[0]
        needles = [
            Needle(f"- {key} {value}.", depth, asked=value if key == asked else "")
            for (key, value), depth in zip(notes, depths, strict=True)
        ]
        builder = TextBuilder()
        prose = filler.sentences(start, size) if self.prose else []
        filler.scatter(builder, needles[: size + 2], prose, "\n")
        builder.add(f"\nQuestion: {asked}")
        # The first that is asked for and this one are in every text.
        other, value = notes[1]
        then = Sample(f"Question: {other}", (value,))
        return Sample(builder.text, (answer,), tuple(builder.evidence), then=then)

    def score(self, answer: str, sample: Sample) -> float:
        return share_of_words(answer, sample.references[0])
