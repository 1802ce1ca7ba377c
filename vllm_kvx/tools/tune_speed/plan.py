"""Which prompts a model is tuned on: how many of which kind, and how long."""

import random
from dataclasses import dataclass

# Tokens of the shortest of the long prompts: lookups need a text to look something up in.
SHORTEST = 256
# Tokens of a further turn, roughly: a question, and an answer of a line or two.
TURN = 128
# The share of lookups that are recitals, and the questions to a text, where none are given.
RECITALS, TURNS = 0.35, 8


@dataclass(frozen=True)
class Plan:
    """What the examples of a job are made of.

    prompts: a user's .jsonl, or None. sft: whether its answers are what is learnt.
    count: prompts that are made beside the user's. lookups: the share of them that are generated
        lookups; the model writes the others itself. recitals: the share of those lookups that ask
        for a part of the text, word for word, whose answer is known.
    max_length: tokens of the longest prompt and its answer. answer_tokens: of the longest answer.
    held_out: examples that are not learnt from. turns: questions to a text, each in a turn.
    """

    prompts: str | None
    sft: bool
    count: int
    lookups: float
    max_length: int
    answer_tokens: int
    held_out: int
    seed: int
    recitals: float = 0.0
    turns: int = 1

    @property
    def num_lookups(self) -> int:
        return round(self.count * self.lookups)

    @property
    def num_recitals(self) -> int:
        return round(self.num_lookups * self.recitals)

    @property
    def num_written(self) -> int:
        return self.count - self.num_lookups

    def lengths(self, count: int) -> list[int]:
        """Tokens of `count` long prompts, evenly spread between the shortest and the longest in
        their logarithm: short ones cost little, long ones are what is served. The longest leave no
        room for further turns, since a model that is to be served with them has to have seen them.
        """
        rng = random.Random(f"lengths {self.seed}")
        longest = self.max_length - self.answer_tokens
        return [length_between(rng, longest) for _ in range(count)]


def length_between(rng: random.Random, longest: int) -> int:
    """A length from SHORTEST to `longest`, evenly drawn in the logarithm."""
    return round(SHORTEST * (longest / SHORTEST) ** rng.random())
