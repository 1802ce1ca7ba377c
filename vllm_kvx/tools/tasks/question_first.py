"""A lookup whose question stands before the text, and is not repeated after it."""

import random

from vllm_kvx.tools.tasks import filler, niah
from vllm_kvx.tools.tasks.base import Sample, Task, TextBuilder
from vllm_kvx.tools.tasks.filler import Needle
from vllm_kvx.tools.tasks.scoring import share_found

KEYS = 4


class QuestionFirst(Task):
    """One of four numbers in prose is asked for, before the text.

    A policy that scores tokens by the attention of a prompt's last ones meets no question there,
    neither in the text's end nor in the beginning of the answer.
    """

    name = "question_first"
    about = "a number in prose, one of four, whose question stands before the text alone"
    max_tokens = 32

    def make(self, rng: random.Random, size: int) -> Sample:
        keys = filler.distinct(lambda: filler.word_key(rng))
        values = filler.distinct(lambda: niah.number(rng))
        entries = [(next(keys), next(values)) for _ in range(KEYS)]
        asked, answer = rng.choice(entries)
        needles = [
            Needle(
                niah.NEEDLE.format(kind="number", key=key, value=value),
                rng.random(),
                asked=value if key == asked else "",
            )
            for key, value in entries
        ]
        builder = TextBuilder().add(
            f"What is the special magic number for {asked}? It is hidden within the following "
            "text. Read the text to its end, then answer.\n\n"
        )
        filler.scatter(builder, needles, filler.sentences(rng.random(), size), " ")
        builder.add("\n\nAnswer now.")
        return Sample(
            text=builder.text,
            references=(answer,),
            evidence=tuple(builder.evidence),
            begins="The special magic number is",
            then=self._then(*next(entry for entry in entries if entry[0] != asked)),
        )

    def _then(self, key: str, value: str) -> Sample:
        text = f"And what is the special magic number for {key}?"
        return Sample(text, (value,), begins="The special magic number is")

    def score(self, answer: str, sample: Sample) -> float:
        return share_found(answer, sample.references)
