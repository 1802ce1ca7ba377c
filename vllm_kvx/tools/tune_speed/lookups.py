"""Long prompts made for training: a generated document and a question that it answers.

They share no wording, no words to look up and no kind of value with the tasks of
`vllm_kvx.tools.evaluate`, so that what a tuned model gains there was not learned by heart.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.dialogues import (
    Dialogue,
    Further,
    Message,
    assistant,
    encoded,
    rendered,
    user,
    without_answer,
)
from vllm_kvx.tools.tune_speed.documents import passages, records, source
from vllm_kvx.tools.tune_speed.documents.base import Ask, Asks, Document, Maker, phrased
from vllm_kvx.tools.tune_speed.documents.values import sections

# Shares of dialogues whose question stands before the document, on both of its sides, or in the
# second turn.
_AHEAD, _BOTH, _LATER = 0.25, 0.07, 0.12
# The share of lookups that ask for several things at once, how many at most, and how each begins:
# every answer found is a lesson, and a long document costs as much to read for one as for six.
_SEVERAL, _MOST_ASKED = 0.35, 6
_BULLETS = ("{}. ", "{}) ", "- ", "* ", "({}) ")
# Questions drawn for each further one that is wanted: some are drawn twice.
_DRAWN = 3
# Words of a recital's cue, which is of one line, its least characters, and how many are tried.
_CUE, _LEAST_CUE, _CUES = (4, 8), 12, 20
# Words of what follows it, and characters, for texts with few spaces.
_RECITED, _MOST_RECITED = (20, 100), 800
# Shares of questions that say how to answer, and of second turns that follow a real first one.
_STYLED, _ASKED_BEFORE = 0.2, 0.6
# Shares of documents of several parts, among those of `lookup`.
_PARTS = (2, 3, 4)
# What is put around a document.
_MARKS = (
    *(("", ""), ("---\n", "\n---"), ("```\n", "\n```"), ("<document>\n", "\n</document>")),
    *(('"""\n', '\n"""'), ("=== BEGIN ===\n", "\n=== END ==="), ("[[[\n", "\n]]]")),
)
# The search for a size aims at the second share of the length and ends at the first. Where a
# prompt fills less than the third, another document is tried.
_FILLED, _AIM, _ENOUGH = 0.92, 0.965, 0.9
# Tokens of a word, for the first of at most so many tries with each of so many documents.
_TOKENS_PER_WORD, _TRIES, _ATTEMPTS = 2.2, 8, 5


class _Dossier(Document):
    """Several documents under headings, one of which is asked about."""

    def __init__(self, rng: random.Random, size: int) -> None:
        count = rng.choice(_PARTS)
        kinds = rng.sample(sorted(_SINGLE), count)
        shares = [rng.uniform(0.5, 1.5) for _ in kinds]
        parts = [
            _SINGLE[kind](rng, int(size * share / sum(shares)))
            for kind, share in zip(kinds, shares, strict=True)
        ]
        self.name = "file"
        heading = rng.choice(("# {}", "PART {}", "*** {} ***", "{}\n======"))
        self.text = "\n\n".join(
            f"{heading.format(part.name.upper())}\n\n{part.text}" for part in parts
        )
        # Names of documents differ, so that a question says which one it is about.
        self._asked = rng.choice(parts)

    def asks(self) -> Asks:
        return self._asked.asks()


_SINGLE: dict[str, Maker] = {**records.KINDS, **passages.KINDS, **source.KINDS}
KINDS: dict[str, Maker] = {**_SINGLE, "dossier": _Dossier}


def lookup(rng: random.Random, size: int, turns: int = 1) -> Dialogue:
    """A document of about `size` words with a question, which the model is to answer.

    Its kind is one of KINDS. The same state of `rng` gives the same.

    turns: questions at most, each in a turn: a short document may have fewer.
    """
    return lookup_of(rng.choice(sorted(KINDS)), rng, size, turns)


def lookup_of(kind: str, rng: random.Random, size: int, turns: int = 1) -> Dialogue:
    """A document of the kind, one of KINDS, with a question; otherwise as `lookup`."""
    document = KINDS[kind](random.Random(rng.random()), size)
    posed = _posed(kind, document, random.Random(rng.random()))
    return replace(posed, further=_further(partial(document.ask, rng), turns - 1, posed, rng))


def recital(rng: random.Random, size: int, turns: int = 1) -> Dialogue:
    """A document, the question what follows some words of it, and the answer, word for word.

    The arguments are those of `lookup`.

    A question about a value has an answer of a few tokens; here each of a hundred has to be found.
    """
    document = KINDS[rng.choice(sorted(KINDS))](random.Random(rng.random()), size)
    ask = _recited(document, rng)
    posed = _posed("recital", document, random.Random(rng.random()), ask)
    further = _further(partial(_recited, document, rng), turns - 1, posed, rng)
    messages = (*posed.messages, assistant(ask.reference))
    return replace(posed, messages=messages, further=further)


def _further(ask: Callable[[], Ask], count: int, posed: Dialogue, rng: random.Random) -> Further:
    """At most `count` questions that differ from each other and from a dialogue's, by their answers
    too, where these are known: what an earlier turn says need not be looked up.

    With the right answers, then: a small model that found nothing once goes on repeating that.
    """
    found: dict[str, Ask] = {}
    said = {posed.reference}
    for _ in range(_DRAWN * count):
        if len(found) == count:
            break
        drawn = ask()
        new = not any(drawn.question in message["content"] for message in posed.messages)
        if new and not (drawn.reference and drawn.reference in said):
            found.setdefault(drawn.question, drawn)
            said.add(drawn.reference)
    frames = sections("frames")["again"]
    return tuple(
        (rng.choice(frames).format(question=question), each.answer)
        for question, each in found.items()
    )


def _recited(document: Document, rng: random.Random) -> Ask:
    text, found = document.text, list(re.finditer(r"\S+", document.text))

    def following(first: int) -> str:
        end = min(first + rng.randint(*_RECITED), len(found)) - 1
        while end > first and found[end].end() - found[first].start() > _MOST_RECITED:
            end -= 1
        return text[found[first].start() : found[end].end()]

    def same_line(word: int) -> bool:
        """Whether a word stands in the line of the one before it."""
        return "\n" not in text[found[word - 1].end() : found[word].start()]

    for _ in range(_CUES if len(found) > 1 else 0):
        count = rng.randint(*_CUE)
        begin = last = rng.randrange(len(found) - 1)
        while last - begin + 1 < count and last + 2 < len(found) and same_line(last + 1):
            last += 1
        while last - begin + 1 < count and begin and same_line(begin):
            begin -= 1
        cue = text[found[begin].start() : found[last].end()]
        if len(cue) >= _LEAST_CUE and text.count(cue) == 1:
            return phrased(rng, "recite", following(last + 1), cue=cue, document=document.name)
    # No cue was found that stands in it once.
    return phrased(rng, "recite_begin", following(0), document=document.name)


def _posed(kind: str, document: Document, rng: random.Random, given: Ask | None = None) -> Dialogue:
    """given: what is asked for; None has it drawn."""

    def framed(section: str, **slots: str) -> str:
        frame = rng.choice(sections("frames")[section])
        return frame.format(document=document.name, **slots)

    def question(ask: Ask) -> str:
        styled = given is None and rng.random() < _STYLED
        return f"{ask.question} {framed('style')}" if styled else ask.question

    ask = given or questions(document, rng)
    begin, end = rng.choice(_MARKS)
    marked = f"{begin}{document.text}{end}"
    place = rng.random()
    if place < _LATER:
        before = document.ask(rng) if rng.random() < _ASKED_BEFORE else None
        if before is not None and before.reference and before.question != ask.question:
            content = f"{framed('before')}\n\n{marked}\n\n{question(before)}"
            reply = before.reference
        else:
            content, reply = f"{framed('before')}\n\n{marked}", framed("ready")
        messages: tuple[Message, ...] = (
            *(user(content), assistant(reply)),
            user(framed("again", question=question(ask))),
        )
        return Dialogue(messages, kind, ask.reference)
    if place < _LATER + _AHEAD:
        parts = [framed("ahead", question=question(ask)), marked]
        if rng.random() < 0.5:
            parts.append(framed("closing"))
    elif place < _LATER + _AHEAD + _BOTH:
        parts = [framed("ahead", question=ask.question), marked]
        parts.append(framed("between", question=question(ask)))
    else:
        parts = [marked, framed("between", question=question(ask))]
        if rng.random() < 0.75:
            parts.insert(0, framed("before"))
    return Dialogue((user("\n\n".join(parts)),), kind, ask.reference)


def questions(document: Document, rng: random.Random) -> Ask:
    """What is asked for: one thing, or several that differ, as a list."""
    if rng.random() >= _SEVERAL:
        return document.ask(rng)
    drawn = (document.ask(rng) for _ in range(rng.randint(2, _MOST_ASKED)))
    asks = list({ask.question: ask for ask in drawn}.values())
    if len(asks) == 1:
        return asks[0]
    bullet = rng.choice(_BULLETS)
    begin = rng.choice(sections("frames")["several"]).format(count=len(asks))
    lines = [f"{bullet.format(number)}{ask.question}" for number, ask in enumerate(asks, start=1)]
    references = filter(None, (ask.reference for ask in asks))
    return Ask("several", "\n".join((begin, *lines)), "\n".join(references))


def fitted_lookup(
    seed: str, longest: int, tokenizer: Any, recite: bool = False, turns: int = 1
) -> Dialogue:
    """A lookup whose prompt has at most `longest` tokens, and about nine tenths of them at least.

    The prompt is what the chat template makes of the dialogue up to its first answer, generation
    prompt included.

    seed: decides the document and the question. recite: whether it is a `recital`. turns: questions
    to the document.

    Raises:
        ToolError: the tokenizer has no chat template, or no lookup is so short.
    """

    def make(attempt: int, size: int) -> Dialogue:
        return (recital if recite else lookup)(random.Random(f"{seed} {attempt}"), size, turns)

    return _fitted(make, longest, tokenizer)


def long_contexts(
    dialogues: Sequence[Dialogue], seed: str, longest: int, tokenizer: Any
) -> list[Dialogue]:
    """The dialogues with a long document in front that has nothing to do with them.

    So a model is tuned on ordinary questions after long prompts, too. The document stands in the
    first turn of the user; answers stay.

    seed: decides the documents. longest: as `fitted_lookup` has it.

    Raises:
        ToolError: a dialogue alone is longer or has no messages, or there is no chat template.
    """
    made = []
    for number, dialogue in enumerate(dialogues):
        if dialogue.raw is not None:
            raise ToolError("no document can be put before raw text or token ids: give messages")
        behind = _behind(dialogue, f"{seed} {number}")
        made.append(_fitted(behind, longest, tokenizer))
    return made


def _behind(dialogue: Dialogue, seed: str) -> Callable[[int, int], Dialogue]:
    def make(attempt: int, size: int) -> Dialogue:
        rng = random.Random(f"{seed} {attempt}")
        document = KINDS[rng.choice(sorted(KINDS))](random.Random(rng.random()), size)
        frames = sections("frames")
        begin, end = rng.choice(_MARKS)
        messages = list(dialogue.messages)
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        then = rng.choice(frames["then"]).format(question=messages[first]["content"])
        parts = (rng.choice(frames["unrelated"]), f"{begin}{document.text}{end}", then)
        messages[first] = user("\n\n".join(parts))
        return Dialogue(tuple(messages), dialogue.kind, dialogue.reference)

    return make


def _fitted(make: Callable[[int, int], Dialogue], longest: int, tokenizer: Any) -> Dialogue:
    """The dialogue whose prompt fills `longest` tokens, or the longest that was found.

    make: a dialogue by attempt, which are others of one seed, and by size in words.
    """
    best: tuple[int, Dialogue] | None = None
    for attempt in range(_ATTEMPTS):
        found = _filling(partial(make, attempt), longest, tokenizer)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
        if best is not None and best[0] >= _ENOUGH * longest:
            break
    if best is None:
        raise ToolError(f"no lookup fits into {longest} tokens: use longer prompts")
    return best[1]


def _filling(
    make: Callable[[int], Dialogue], longest: int, tokenizer: Any
) -> tuple[int, Dialogue] | None:
    """The longest prompt of at most `longest` tokens that a search finds, with its tokens."""
    best: tuple[int, Dialogue] | None = None
    # The greatest size known to fit and the smallest known not to.
    low, high = 0, longest + 1
    size = int(longest / _TOKENS_PER_WORD)
    for _ in range(_TRIES):
        dialogue = make(size)
        asked = without_answer(dialogue).messages
        used = len(encoded(rendered(asked, tokenizer, generate=True), tokenizer))
        if used <= longest:
            low = max(low, size)
            if best is None or used > best[0]:
                best = used, dialogue
            if used >= _FILLED * longest:
                break
        else:
            high = min(high, size)
        if high - low <= 1:
            break
        aimed = int(size * _AIM * longest / used)
        size = aimed if low < aimed < high else (low + high) // 2
    return best
