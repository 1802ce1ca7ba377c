"""Short questions of facts and of code, whose answers are words that are known beforehand.

A policy for long prompts hardly touches them: they tell whether tuned weights are still the model.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from typing import Any, ClassVar

from vllm_kvx.tools.tasks.base import FixedTask, Sample

_OUTPUT = "What does this line of Python print?"
# Before what stands as words of its own: no letter, and nothing that makes another number of it.
_APART = r"(?<![\w-])(?<!\d\.)"


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of one of the package's data files."""
    text = (files(__package__) / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


class ShortAnswers(FixedTask):
    """Questions with a few accepted answers, one of which has to stand in the model's."""

    is_short = True
    max_tokens = 48
    file: ClassVar[str]

    def samples(self) -> Sequence[Sample]:
        return self._samples

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(self.prompt(row), tuple(map(str, row["answers"]))) for row in rows_of(self.file)
        )

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> str:
        """The question of a row of the data, and how to answer."""


class ShortFacts(ShortAnswers):
    """Common knowledge: capitals, sums, symbols of elements, years, opposites, single words."""

    name = "short_facts"
    about = "short questions of common knowledge, without a long text"
    file = "short_facts.jsonl"

    def prompt(self, row: Mapping[str, Any]) -> str:
        return f"{row['question']} Answer in a few words."

    def score(self, answer: str, sample: Sample) -> float:
        return float(any(stands_in(plain(each), plain(answer)) for each in sample.references))


class ShortCode(ShortAnswers):
    """Python: what an expression gives, and the expression that a function lacks.

    Answers are compared as text; nothing that a model says is run.
    """

    name = "short_code"
    about = "short questions of Python, without a long text"
    file = "short_code.jsonl"

    def prompt(self, row: Mapping[str, Any]) -> str:
        if "expression" in row:
            return f"{_OUTPUT}\n\nprint({row['expression']})\n\nAnswer with the output alone."
        return (
            "Complete this Python function, which must be right for all arguments. For example, "
            f"{row['holds']}.\n\n{row['function']}\n\nAnswer with its last line alone."
        )

    def score(self, answer: str, sample: Sample) -> float:
        gives_output = sample.text.startswith(_OUTPUT)
        return float(any(is_given(each, answer, gives_output) for each in sample.references))


def stands_in(accepted: str, answer: str) -> bool:
    """Whether `accepted` is in an answer as words of its own: 4 is neither in 14 nor in 4.5."""
    pattern = rf"{_APART}{re.escape(accepted)}(?!\w)(?!\.\d)"
    return re.search(pattern, answer) is not None


def is_given(accepted: str, answer: str, may_end: bool) -> bool:
    """Whether an answer is this piece of code: alone on a line, after `return` or in backticks.

    may_end: whether it may also be what the answer ends with, as in "The output is 4."
    """
    wanted = tight(accepted)
    lines = [tight(line.strip(" \t`.").removeprefix("return ")) for line in answer.splitlines()]
    if wanted in (*lines, *map(tight, re.findall(r"`([^`\n]+)`", answer))):
        return True
    begin = _APART if re.match(r"\w", wanted) else ""
    ends = rf"{begin}{re.escape(wanted)}[.!`\"*\s]*$"
    return may_end and re.search(ends, tight(answer)) is not None


def plain(text: str) -> str:
    """A text in which case, white space and the commas of great numbers make no difference."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return " ".join(text.casefold().split())


def tight(code: str) -> str:
    """Code without the spaces around its signs, and with one kind of quotes."""
    code = " ".join(code.replace("'", '"').split())
    return re.sub(r" ?([^\w ]) ?", r"\1", code)
