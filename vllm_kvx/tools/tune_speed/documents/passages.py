"""Documents of headed passages: reports, minutes, mail, FAQs, contracts, chats and others."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_kvx.tools.tune_speed.documents.base import (
    Ask,
    Asks,
    Document,
    Maker,
    alone,
    distinct,
    ordinal,
    phrased,
    words,
)
from vllm_kvx.tools.tune_speed.documents.values import Values

# What a question can look for: words with digits, and names of two words.
_TO_FIND = re.compile(r"[#€£$+]?\w*\d[\w.,:/-]*\w|[A-Z][a-zö]+ [A-Z][a-zö]{3,}")
# Words of the longest passage that a question asks to repeat.
_LONGEST = 130
# Words of a sentence's beginning that tell it from others.
_BEGINNING = 5


class Passage(NamedTuple):
    """title: as the document gives it. attributes: what stands beside it. body: sentences."""

    title: str
    attributes: Mapping[str, str]
    body: tuple[str, ...]


@dataclass(frozen=True)
class Genre:
    """A kind of document made of passages.

    names: what the document may be called. noun, nouns: what a passage is.
    title: a template of values; `{number}` counts the passages.
    attributes: templates of what stands beside a title, by name.
    sections: where the sentences come from, one after another, and how many of each, at least and
        at most; the first section's are never left out.
    layouts: how a passage is written, with places for title, attributes and body.
    between: what separates two sentences.
    """

    names: tuple[str, ...]
    noun: str
    nouns: str
    title: str
    sections: tuple[tuple[str, int, int], ...]
    layouts: tuple[str, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    between: tuple[str, ...] = (" ",)

    def __call__(self, rng: random.Random, size: int) -> "Passages":
        """A document of about `size` words."""
        values = Values(random.Random(rng.random()))
        layout, between = rng.choice(self.layouts), rng.choice(self.between)
        titles = distinct(lambda: values.heading(self.title.replace("{number}", str(number))))
        passages: list[Passage] = []
        written: list[str] = []
        left, number = size, 0
        while left > 0 or not passages:
            number += 1
            attributes = {name: values.fill(slot) for name, slot in self.attributes.items()}
            title = next(titles)
            body: list[str] = []
            for section, least, most in self.sections:
                for _ in range(values.rng.randint(least, most)):
                    body.append(values.sentence(section))
            # The last passage ends where the document is long enough.
            while len(body) > 1 and words(" ".join(body[:-1])) > left:
                body.pop()
            passages.append(Passage(title, attributes, tuple(body)))
            named = {name.replace(" ", "_"): value for name, value in attributes.items()}
            text = layout.format(title=title, body=between.join(body), number=number, **named)
            written.append(text)
            left -= words(text)
        return Passages(self, rng.choice(self.names), "\n\n".join(written), passages, between)


class Passages(Document):
    """A document of titled passages of one genre.

    between: what stands between the passages' sentences.
    """

    def __init__(
        self, genre: Genre, name: str, text: str, passages: Sequence[Passage], between: str
    ) -> None:
        self.genre, self.name, self.text = genre, name, text
        self.passages, self._between = passages, between
        self._titles = [passage.title for passage in passages]

    def asks(self) -> Asks:
        return {
            "passage": (3, self._passage),
            "sentence_of": (1.5, self._sentence_of),
            "last_of": (1, self._last_of),
            "mention": (2, self._mention),
            "quote": (3, self._quote),
            "complete": (2, self._complete),
            "summary": (3, self._summary),
            "whole": (2, self._whole),
            "attribute": (2, self._attribute),
            "listing": (1, self._listing),
            "nth": (1, self._nth),
            "last": (0.5, self._last),
            "after": (1, self._after),
            "no_passage": (1, self._no_passage),
        }

    def _phrased(self, rng: random.Random, kind: str, reference: str, **slots: object) -> Ask:
        common = {"document": self.name, "noun": self.genre.noun, "nouns": self.genre.nouns}
        return phrased(rng, kind, reference, **common, **slots)

    def _passage(self, rng: random.Random) -> Ask | None:
        passage = rng.choice(self.passages)
        body = self._between.join(passage.body)
        if words(body) > _LONGEST:
            return None
        return self._phrased(rng, "passage", body, title=passage.title)

    def _sentence_of(self, rng: random.Random) -> Ask:
        passage = rng.choice(self.passages)
        index = rng.randrange(len(passage.body))
        slots = {"title": passage.title, "ordinal": ordinal(index)}
        return self._phrased(rng, "sentence_of", passage.body[index], **slots)

    def _last_of(self, rng: random.Random) -> Ask:
        passage = rng.choice(self.passages)
        return self._phrased(rng, "last_of", passage.body[-1], title=passage.title)

    def _found(self, rng: random.Random) -> tuple[Passage, str, str] | None:
        """A passage, a sentence of it, and what stands in this sentence alone."""
        for _ in range(20):
            passage = rng.choice(self.passages)
            sentence = rng.choice(passage.body)
            # A sentence's first word has its capital from its place.
            found = [
                value
                for value in _TO_FIND.findall(sentence)
                if alone(self.text, value) and len(value) > 2
            ]
            if found:
                return passage, sentence, rng.choice(found)
        return None

    def _mention(self, rng: random.Random) -> Ask | None:
        found = self._found(rng)
        return found and self._phrased(rng, "mention", found[0].title, value=found[2])

    def _quote(self, rng: random.Random) -> Ask | None:
        found = self._found(rng)
        return found and self._phrased(rng, "quote", found[1], value=found[2])

    def _complete(self, rng: random.Random) -> Ask | None:
        for _ in range(20):
            sentence = rng.choice(rng.choice(self.passages).body)
            parts = sentence.split(" ")
            beginning = " ".join(parts[:_BEGINNING])
            if len(parts) > _BEGINNING + 3 and alone(self.text, beginning):
                rest = " ".join(parts[_BEGINNING:])
                return self._phrased(rng, "complete", rest, beginning=beginning)
        return None

    def _summary(self, rng: random.Random) -> Ask:
        return self._phrased(rng, "summary", "", title=rng.choice(self._titles))

    def _whole(self, rng: random.Random) -> Ask:
        return self._phrased(rng, "whole", "")

    def _attribute(self, rng: random.Random) -> Ask | None:
        if not self.genre.attributes:
            return None
        passage = rng.choice(self.passages)
        name = rng.choice(sorted(passage.attributes))
        slots = {"title": passage.title, "field": name}
        return self._phrased(rng, "attribute", passage.attributes[name], **slots)

    def _listing(self, rng: random.Random) -> Ask | None:
        count = min(rng.randint(3, 10), len(self._titles))
        if count < 3:
            return None
        return self._phrased(rng, "listing", "\n".join(self._titles[:count]), count=count)

    def _nth(self, rng: random.Random) -> Ask:
        index = rng.randrange(min(12, len(self._titles)))
        return self._phrased(rng, "nth", self._titles[index], ordinal=ordinal(index))

    def _last(self, rng: random.Random) -> Ask:
        return self._phrased(rng, "last", self._titles[-1])

    def _after(self, rng: random.Random) -> Ask | None:
        if len(self._titles) < 2:
            return None
        index = rng.randrange(len(self._titles) - 1)
        key = f'"{self._titles[index]}"'
        return self._phrased(rng, "after", self._titles[index + 1], key=key)

    def _no_passage(self, rng: random.Random) -> Ask:
        values = Values(random.Random(rng.random()))
        number = len(self._titles) + rng.randint(3, 40)
        titles = distinct(lambda: values.heading(self.genre.title.replace("{number}", str(number))))
        title = next(title for title in titles if title not in self.text)
        return self._phrased(rng, "no_passage", "", title=title)


REPORT = Genre(
    ("report", "field report", "chronicle"),
    *("section", "sections"),
    "{topic}, {place}",
    (("report", 3, 8),),
    ("## {title}\n\n{body}", "{number}. {title}\n{body}", "**{title}** {body}"),
)
MINUTES = Genre(
    ("minutes", "minutes of the assembly", "protocol"),
    *("agenda item", "agenda items"),
    "{topic} ({code})",
    (("meeting", 2, 6),),
    (
        "Item {number}: {title}\nSpeaker: {speaker}. Due: {due}.\n{body}",
        "### {number} {title}\n_{speaker}, by {due}_\n\n{body}",
    ),
    {"speaker": "{person}", "due": "{date}"},
    (" ", "\n"),
)
MAIL = Genre(
    ("correspondence", "mailbox", "thread of e-mails"),
    *("e-mail", "e-mails"),
    "{topic} / {person}",
    (("mail", 2, 6),),
    (
        "From: {sender}\nSent: {sent}\nSubject: {title}\n\n{body}\n",
        "--- {sent} --- {sender} wrote on {title}:\n> {body}",
    ),
    {"sender": "{email}", "sent": "{date} {time}"},
)
FAQ = Genre(
    ("FAQ", "help centre", "list of frequent enquiries"),
    *("enquiry", "enquiries"),
    "{question}",
    (("faq", 1, 4),),
    ("Q: {title}\nA: {body}", "{number}) {title}\n   {body}", "### {title}\n{body}"),
)
CONTRACT = Genre(
    ("agreement", "supply contract", "terms"),
    *("clause", "clauses"),
    "{heading} (§ {number}.{small})",
    (("contract", 1, 5),),
    ("{title}\n{body}", "{title}: {body}"),
    between=(" ", "\n"),
)
DICTIONARY = Genre(
    ("dictionary", "glossary", "word book"),
    *("word", "words"),
    "{coined}",
    (("definition", 1, 1), ("usage", 1, 3)),
    (
        "{title} ({origin}): {body}",
        "**{title}**, {origin}. {body}",
        "{title}\n    from: {origin}\n    {body}",
    ),
    {"origin": "{place} dialect"},
    ("; ", " | "),
)
RECIPES = Genre(
    ("recipe book", "cookery notes", "collection of recipes"),
    *("recipe", "recipes"),
    "{dish} from {place}",
    (("step", 3, 7),),
    (
        "{title}\nServes {portions}. Needs: {shopping_list}.\n{body}",
        "# {title}\n* for {portions} guests\n* buy {shopping_list}\n\n{body}",
    ),
    {
        "portions": "{small}",
        "shopping list": "{count} g {ingredient}, {small} cups of {ingredient}, {ingredient}",
    },
    (" ", "\n"),
)
CHAT = Genre(
    ("chat", "group chat", "channel history"),
    *("posting", "postings"),
    "{date} {time}",
    (("chat", 1, 3),),
    ("[{title}] {author}: {body}", "{title} <{author}> {body}"),
    {"author": "{first}"},
    (" / ", "\n    "),
)
DIARY = Genre(
    ("diary", "logbook", "journal of the voyage"),
    *("day", "days"),
    "{date}, {place}",
    (("report", 1, 3), ("mail", 0, 1), ("report", 0, 2)),
    ("{title} (mood: {mood}). {body}", "{title}, mood {mood}\n{body}"),
    {"mood": "{trait}"},
)
KINDS: dict[str, Maker] = {
    **{"report": REPORT, "minutes": MINUTES, "mail": MAIL, "faq": FAQ, "contract": CONTRACT},
    **{"dictionary": DICTIONARY, "recipes": RECIPES, "chat": CHAT, "diary": DIARY},
}
