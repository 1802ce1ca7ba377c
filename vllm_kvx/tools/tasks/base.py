"""What a task is: generated or read questions over long texts, with the spans that answer them."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# (answer, references) -> share of the question that is right, 0 to 1.
Scorer = Callable[[str, Sequence[str]], float]


# What a task's second questions are called by, after its name.
SECOND_TURN = "/turn2"


@dataclass(frozen=True)
class Span:
    """Characters [begin, end) of a sample's text."""

    begin: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One question over one text.

    text: what the user says, the question included; the chat template is not part of it.
    references: what a right answer contains, or the texts that it is compared with.
    evidence: where in `text` the asked values stand; a policy that drops them cannot answer.
    begins: how the model's answer is made to begin, as RULER does; empty to leave it free.
    then: a second question over the same text, which the user asks in the next turn: its own text
        is what is said then. None where the text has one answer alone.
    """

    text: str
    references: tuple[str, ...]
    evidence: tuple[Span, ...] = ()
    begins: str = ""
    then: "Sample | None" = None


class Task(ABC):
    """A family of samples.

    name: what `--tasks` calls it. about: one line for the list of tasks.
    max_tokens: the longest answer.
    """

    name: str
    about: str
    max_tokens: int

    @abstractmethod
    def make(self, rng: random.Random, size: int) -> Sample:
        """A sample with `size` units of filler: 0 is the shortest that makes sense.

        More filler makes a longer text, about evenly. The same state of `rng` gives the same sample
        but for the filler: keys, values and their relative places stay.
        """

    @abstractmethod
    def score(self, answer: str, sample: Sample) -> float:
        """The share of the question that `answer` has right, 0 to 1."""


class FixedTask(ABC):
    """A data set: samples that are read, each as long as it is, and not made to a length.

    name, about, max_tokens: as a `Task` has them.
    chat: whether its prompts go through the model's chat template.
    is_short: whether a run's lengths do not concern it.
    may_be_cut: whether a text that is longer than the longest of these loses its middle; one that
        may not is refused.
    """

    name: str
    about: str
    max_tokens: int
    chat: bool = True
    is_short: bool = False
    may_be_cut: bool = True

    @abstractmethod
    def samples(self) -> Sequence[Sample]:
        """All samples, in the data set's order.

        Raises:
            ToolError: the data cannot be read.
        """

    @abstractmethod
    def score(self, answer: str, sample: Sample) -> float:
        """The data set's own score of `answer`, 0 to 1."""


@dataclass
class TextBuilder:
    """Puts a sample's text together and notes where evidence stands."""

    parts: list[str] = field(default_factory=list)
    evidence: list[Span] = field(default_factory=list)
    length: int = 0

    def add(self, text: str, is_evidence: bool = False) -> "TextBuilder":
        """Appends `text`, as evidence or not."""
        if is_evidence:
            self.evidence.append(Span(self.length, self.length + len(text)))
        self.parts.append(text)
        self.length += len(text)
        return self

    @property
    def text(self) -> str:
        return "".join(self.parts)
