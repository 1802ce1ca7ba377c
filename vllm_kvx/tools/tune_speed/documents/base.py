"""What a generated document is: a text, and questions about it whose answers are known."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from vllm_kvx.tools.tune_speed.documents.values import sections

_ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"),
    *("tenth", "eleventh", "twelfth"),
)
# Kinds of questions that are answered by the reference, however they are worded. Others may want a
# list, an object or a sentence.
LITERAL = frozenset(
    (
        *("value", "row", "rows", "range", "nth", "last", "after", "reverse", "hop", "passage"),
        *("sentence_of", "last_of", "mention", "recite", "recite_begin", "attribute", "function"),
        *("functions", "comment", "signature", "literal", "callers", "body_line"),
    )
)


@dataclass(frozen=True)
class Ask:
    """A question about a document.

    kind: what is asked for, a section of `data/questions.txt`.
    reference: lines that a right answer contains, empty where no answer is the only right one.
        They stand in the document so, but for a count.
    """

    kind: str
    question: str
    reference: str

    @property
    def answer(self) -> str:
        """The reference where it is an answer as it stands, else ""."""
        return self.reference if self.kind in LITERAL else ""


class Document(ABC):
    """A text with its questions.

    name: what questions call it: "price list".
    """

    name: str
    text: str

    @abstractmethod
    def asks(self) -> "Asks":
        """The questions that can be asked of it, by kind, each with its weight."""

    def ask(self, rng: random.Random) -> Ask:
        """Draws one of the questions; a kind that is possible is as likely as its weight says."""
        asks = self.asks()
        kinds = list(asks)
        weights = [weight for weight, _ in asks.values()]
        while kinds:
            (index,) = rng.choices(range(len(kinds)), weights)
            made = asks[kinds[index]][1](rng)
            if made is not None:
                return made
            # The document is too short for it.
            del kinds[index], weights[index]
        raise AssertionError(f"nothing can be asked about the {self.name}")


# Kind -> its weight, and what makes a question of it, or None if the document does not allow it.
Asks = dict[str, tuple[float, Callable[[random.Random], Ask | None]]]
# (random numbers, words) -> a document of about so many words, and never of none.
Maker = Callable[[random.Random, int], Document]


def phrased(rng: random.Random, kind: str, reference: str, **slots: object) -> Ask:
    """A question of this kind in one of its wordings, the slots filled."""
    wording = rng.choice(sections("questions")[kind])
    return Ask(kind, wording.format(**slots), reference)


def ordinal(index: int) -> str:
    """The word for a place that is counted from 0: "third"; "21st" where there is no short one."""
    if index < len(_ORDINALS):
        return _ORDINALS[index]
    number = index + 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"


def joined(names: Sequence[str]) -> str:
    """The names as a sentence lists them: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def words(text: str) -> int:
    """Words of a text; a number, or a part of a code, is one."""
    return len(re.findall(r"\w+", text))


def distinct(make: Callable[[], str]) -> Iterator[str]:
    """What `make` returns, each once; a number is put behind where it finds nothing new."""
    seen: set[str] = set()
    while True:
        tries = (make() for _ in range(20))
        numbered = (f"{make()} {number}" for number in range(2, 10**9))
        new = next(name for name in chain(tries, numbered) if name not in seen)
        seen.add(new)
        yield new


def alone(text: str, value: str) -> bool:
    """Whether the value stands in the text once, and not as a part of another word."""
    return text.count(value) == 1 and bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text))
