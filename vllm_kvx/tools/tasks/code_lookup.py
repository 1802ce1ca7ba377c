"""A long Python module, and what one of its functions or constants is."""

import random
from collections.abc import Iterator

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task, TextBuilder
from vllm_kvx.tools.tasks.filler import Needle
from vllm_kvx.tools.tasks.scoring import share_found

VERBS = ("count", "default", "find", "get", "initial", "load", "make", "read")
# Definitions whose names begin as the one that is asked for.
SIMILAR = 3


def name(rng: random.Random) -> str:
    parts = rng.choice(VERBS), rng.choice(filler.adjectives()), rng.choice(filler.nouns())
    return "_".join(parts)


def literals(rng: random.Random) -> Iterator[str]:
    """Numbers and words in quotes, each once."""

    def literal() -> str:
        if rng.random() < 0.5:
            return str(rng.randint(10**4, 10**5 - 1))
        return f'"{filler.word_key(rng)}"'

    return filler.distinct(literal)


def function(name: str, literal: str) -> str:
    about = " ".join(name.split("_")[1:])
    return f'def {name}():\n    """The {about}."""\n    return {literal}\n'


def constant(name: str, literal: str) -> str:
    return f"{name.upper()} = {literal}\n"


def computed(rng: random.Random, name: str) -> str:
    """A function that returns no literal."""
    of = rng.choice(filler.nouns())
    step = rng.choice(("+", "-", "*", "//"))
    return f"def {name}({of}):\n    return {of} {step} {rng.randint(2, 99)}\n"


class CodeLookup(Task):
    """What a function of the module returns, or a constant of it is.

    Literals stand once in the module. Three more definitions of the same kind have names that
    differ in the last word alone.
    """

    name = "code_lookup"
    about = "what a function returns, or a constant is, in a long Python module"
    max_tokens = 32

    def make(self, rng: random.Random, size: int) -> Sample:
        values = literals(rng)
        is_function = rng.random() < 0.5
        define = function if is_function else constant
        asked = name(rng)
        stem, _, own = asked.rpartition("_")
        others = rng.sample([noun for noun in filler.nouns() if noun != own], SIMILAR)
        defined = [asked, *(f"{stem}_{other}" for other in others)]
        answer = next(values)
        needles = [Needle(define(asked, answer), rng.random(), asked=answer.strip('"'))]
        further = {other: next(values) for other in defined[1:]}
        needles += [Needle(define(other, value), rng.random()) for other, value in further.items()]

        names = (new for new in filler.distinct(lambda: name(rng)) if new not in defined)
        items: list[str] = []
        for _ in range(size):
            draw, new = rng.random(), next(names)
            if draw < 0.2:
                items.append(computed(rng, new))
            else:
                items.append((function if draw < 0.6 else constant)(new, next(values)))

        builder = TextBuilder().add(
            "Below is a Python module. Read it carefully. I will quiz you about it afterwards.\n\n"
            "```python\n"
        )
        filler.scatter(builder, needles, items, "\n")
        builder.add("```\n\n")
        question, begins = _question(asked, is_function)
        builder.add(question)
        other = defined[1]
        text, beginning = _question(other, is_function)
        then = Sample(text, (further[other].strip('"'),), begins=beginning)
        return Sample(builder.text, (answer.strip('"'),), tuple(builder.evidence), begins, then)

    def score(self, answer: str, sample: Sample) -> float:
        return share_found(answer, sample.references)


def _question(name: str, is_function: bool) -> tuple[str, str]:
    """What is asked of a definition, and how the answer begins."""
    if is_function:
        return (
            f"What does the function `{name}()` of this module return?",
            f"The function `{name}()` returns",
        )
    return (
        f"What is the value of the constant `{name.upper()}` of this module?",
        f"The value of the constant `{name.upper()}` is",
    )
