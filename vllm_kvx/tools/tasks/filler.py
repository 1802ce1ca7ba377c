"""What tasks hide their needles in: noise, prose and words, and the places of the needles."""

import lzma
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vllm_kvx.tools.tasks.base import TextBuilder

DATA = Path(__file__).with_name("data")
# RULER's noise.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@lru_cache(maxsize=1)
def prose() -> tuple[str, ...]:
    """The sentences of the prose, in reading order."""
    return tuple(lzma.decompress((DATA / "prose.txt.xz").read_bytes()).decode().splitlines())


@lru_cache(maxsize=1)
def nouns() -> tuple[str, ...]:
    """Nouns that do not occur in the prose."""
    return tuple((DATA / "nouns.txt").read_text().split())


@lru_cache(maxsize=1)
def adjectives() -> tuple[str, ...]:
    return tuple((DATA / "adjectives.txt").read_text().split())


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """All words, sorted: nouns, adjectives and others."""
    others = (DATA / "words.txt").read_text().split()
    return tuple(sorted((*nouns(), *adjectives(), *others)))


def sentences(start: float, count: int) -> list[str]:
    """`count` sentences of the prose in reading order; it begins anew after its end.

    start: the first one's place in the prose, in [0, 1).
    """
    text = prose()
    first = int(start * len(text))
    return [text[(first + i) % len(text)] for i in range(count)]


def distinct(make: Callable[[], str]) -> Iterator[str]:
    """What `make` returns, call after call, without what it returned before."""
    seen: set[str] = set()
    while True:
        new = make()
        if new not in seen:
            seen.add(new)
            yield new


def word_key(rng: random.Random) -> str:
    """An adjective and a noun, as RULER's keys are: `brisk-canyon`."""
    return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"


@dataclass(frozen=True)
class Needle:
    """A sentence that is put between the filler's.

    depth: its place, from 0 (before all filler) to below 1 (after all of it).
    asked: the part of `text` that the question asks for; empty in a distractor.
    """

    text: str
    depth: float
    asked: str = ""


def scatter(
    builder: TextBuilder, needles: Sequence[Needle], filler: Sequence[str], separator: str
) -> None:
    """Appends the filler with the needles at their depths, `separator` between any two."""
    items: list[str | Needle] = []
    waiting = sorted(needles, key=lambda needle: needle.depth)
    for place in range(len(filler) + 1):
        while waiting and int(waiting[0].depth * (len(filler) + 1)) <= place:
            items.append(waiting.pop(0))
        items.extend(filler[place : place + 1])
    for number, item in enumerate(items):
        if number:
            builder.add(separator)
        if isinstance(item, str):
            builder.add(item)
        elif item.asked:
            before, _, after = item.text.rpartition(item.asked)
            builder.add(before).add(item.asked, is_evidence=True).add(after)
        else:
            builder.add(item.text)
