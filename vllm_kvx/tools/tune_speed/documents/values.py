"""What a document speaks of: people, places, things, codes, dates and amounts, drawn or made up.

None of the words is one that the evaluation's tasks draw their keys and values from.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"

# Parts of made-up names.
_FIRST = (
    *("Tor", "Mel", "Kas", "Bri", "Odr", "Yse", "Hal", "Vin", "Qua", "Ner", "Ruf", "Sol", "Zan"),
    *("Ivo", "Len", "Dag", "Ela", "Fen", "Gor", "Jas"),
)
_FIRST_END = ("vane", "isk", "imir", "etta", "olin", "uva", "adra", "wyn", "orio", "elle", "ika")
_LAST = (
    *("Bram", "Cald", "Drex", "Fjor", "Grun", "Holt", "Jarv", "Kest", "Lund", "Mord", "Nyl", "Ost"),
    *("Prusk", "Rav", "Skel", "Thorn", "Ulv", "Vesp", "Wend", "Zell"),
)
_LAST_END = ("well", "ström", "ovic", "aker", "inski", "mere", "egard", "bury", "onti", "ashvili")
_PLACE = ("Ald", "Brack", "Cor", "Dun", "Eller", "Fos", "Gris", "Hax", "Ing", "Kirk", "Lang", "Mar")
_PLACE_END = ("ebury", "stad", "fell", "haven", "mouth", "by", "thorpe", "minster", "ovo", "wick")
_FIRM_END = (
    *("Holdings", "Logistics", "Brothers", "Cooperative", "Foundry", "Laboratories", "Textiles"),
    *("Shipyard", "Nurseries", "Instruments"),
)
_COINED = (
    "bla",
    "cre",
    "dro",
    "fli",
    "gno",
    "hux",
    "jor",
    "kva",
    "lom",
    "mib",
    "nuv",
    "ple",
    "quo",
)
_COINED_MIDDLE = (
    "ba",
    "de",
    "fi",
    "go",
    "ku",
    "la",
    "mo",
    "ne",
    "ri",
    "so",
    "tu",
    "va",
    "xi",
    "zo",
)
_COINED_END = ("b", "dle", "fric", "gle", "lin", "mp", "nk", "que", "rix", "sk", "th", "vern", "zz")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_LEVELS = ("INFO", "DEBUG", "WARN", "SEVERE", "CRIT")


@lru_cache(maxsize=4)
def sections(name: str) -> Mapping[str, tuple[str, ...]]:
    """The lines of a data file by section; a line `[name]` begins one, empty lines mean nothing."""
    found: dict[str, tuple[str, ...]] = {}
    for part in re.split(r"^\[", (DATA / f"{name}.txt").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        section, _, lines = part.partition("]\n")
        found[section] = tuple(line for line in lines.splitlines() if line)
    return found


def plural(noun: str) -> str:
    """The noun's plural, for nouns of `data/words.txt`."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun if noun.endswith(("ers", "ars", "ngs", "ipes")) else f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith(("ry", "py", "ny")) else f"{noun}s"


class Values:
    """Draws the values of one document, which has one way to write dates and amounts.

    rng: decides everything; the same state gives the same values.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._date = rng.choice(("iso", "short", "dots", "american"))
        self._currency = rng.choice(("€{}", "£{}", "${}", "{} CHF", "{} SEK"))
        self._code = rng.randrange(6)
        self._year = rng.randint(1968, 2071)
        # Few enough people that they come back.
        self._cast = [self._person() for _ in range(40)]
        self.slots: dict[str, Callable[[], str]] = {
            "person": self.person,
            "first": lambda: self.person().split()[0],
            "place": self.place,
            "firm": self.firm,
            "date": self.date,
            "time": self.time,
            "amount": self.amount,
            "count": lambda: str(rng.randint(2, 980)),
            "small": lambda: str(rng.randint(2, 24)),
            "percent": lambda: f"{rng.randint(1, 98)}.{rng.randint(1, 9)} %",
            "measure": lambda: self.measure(("kg", "mm", "km", "kWh", "litres", "bar", "dB")),
            "warmth": lambda: self.measure(("°C",)),
            "weight": lambda: self.measure(("kg", "g", "lb")),
            "length": lambda: self.measure(("mm", "cm", "m", "ft")),
            "code": self.code,
            "room": lambda: f"{rng.choice('ABCDEFGH')}{rng.randint(0, 6)}.{rng.randint(10, 79)}",
            "hex": lambda: f"{rng.getrandbits(4 * 10):010x}",
            "email": self.email,
            "phone": lambda: (
                f"+{rng.randint(30, 98)} {rng.randint(100, 999)} 555 0{self.digits(3)}"
            ),
            "address": lambda: ".".join(str(rng.randint(1, 254)) for _ in range(4)),
            "version": lambda: f"{rng.randint(0, 9)}.{rng.randint(0, 30)}.{rng.randint(0, 9)}",
            "object": self.object,
            "objects": lambda: plural(self.object()),
            "coined": self.coined,
            "year": lambda: str(rng.randint(1890, 2038)),
            # Rare where severe.
            "level": lambda: _LEVELS[min(int(rng.expovariate(0.8)), len(_LEVELS) - 1)],
            **{name: partial(self.sentence, name) for name in ("event", "study", "question")},
            "heading": lambda: self.sentence("heading"),
        }

    def word(self, section: str) -> str:
        """A line of the section in `data/words.txt`."""
        return self.rng.choice(sections("words")[section])

    def value(self, slot: str) -> str:
        """A value of the slot, which may also be a section of the words."""
        return self.slots[slot]() if slot in self.slots else self.word(slot)

    def fill(self, template: str) -> str:
        """The template with a value in each `{slot}`."""
        return re.sub(r"\{(\w+)\}", lambda slot: self.value(slot[1]), template)

    def heading(self, template: str) -> str:
        """The template with a value in each `{slot}` and a capital at its beginning."""
        text = self.fill(template)
        return text[:1].upper() + text[1:]

    def sentence(self, section: str) -> str:
        """A sentence of the section in `data/sentences.txt`, filled."""
        template = self.rng.choice(sections("sentences")[section])
        return self.heading(template) if template.startswith("{") else self.fill(template)

    def digits(self, count: int) -> str:
        return "".join(self.rng.choices("0123456789", k=count))

    def _person(self) -> str:
        parts = (_FIRST, _FIRST_END, _LAST, _LAST_END)
        first, first_end, last, last_end = map(self.rng.choice, parts)
        return f"{first}{first_end} {last}{last_end}"

    def person(self) -> str:
        return self.rng.choice(self._cast) if self.rng.random() < 0.8 else self._person()

    def place(self) -> str:
        return self.rng.choice(_PLACE) + self.rng.choice(_PLACE_END)

    def firm(self) -> str:
        return f"{self.rng.choice(_LAST)}{self.rng.choice(_LAST_END)} {self.rng.choice(_FIRM_END)}"

    def object(self) -> str:
        return f"{self.word('trait')} {self.word('thing')}"

    def coined(self) -> str:
        """A word that no language has."""
        middle = "".join(self.rng.choices(_COINED_MIDDLE, k=self.rng.randint(1, 2)))
        return self.rng.choice(_COINED) + middle + self.rng.choice(_COINED_END)

    def email(self) -> str:
        first, last = self._person().lower().replace("ö", "oe").split()
        return f"{first}.{last}@{self.place().lower()}.invalid"

    def date(self) -> str:
        year, month = self._year + self.rng.randint(0, 3), self.rng.randint(1, 12)
        day = self.rng.randint(1, 28)
        if self._date == "iso":
            return f"{year}-{month:02}-{day:02}"
        if self._date == "short":
            return f"{day} {_MONTHS[month - 1]} {year}"
        if self._date == "dots":
            return f"{day:02}.{month:02}.{year}"
        return f"{_MONTHS[month - 1]} {day}, {year}"

    def time(self) -> str:
        return f"{self.rng.randint(0, 23):02}:{self.rng.randint(0, 59):02}"

    def amount(self) -> str:
        whole = self.rng.choice((self.rng.randint(1, 99), self.rng.randint(100, 98_000)))
        return self._currency.format(f"{whole:,}.{self.digits(2)}")

    def measure(self, units: Sequence[str]) -> str:
        number = f"{self.rng.randint(1, 400)}.{self.rng.randint(0, 9)}"
        return f"{number} {self.rng.choice(units)}"

    def code(self) -> str:
        """An identifier, in the document's way to write them."""
        rng = self.rng
        letters = "".join(rng.choices("BCDFGHKLMPRSTWXZ", k=3))
        forms = (
            f"{letters[0]}-{self.digits(3)}{rng.choice('abcdefgh')}",
            f"{letters[:2]}{self.digits(2)}/{self.digits(2)}",
            f"{letters}.{self.digits(4)}",
            f"{rng.getrandbits(32):08x}",
            f"{letters}-{rng.getrandbits(48):012x}",
            f"#{self.digits(3)}-{self.digits(3)}-{letters[0]}",
        )
        return forms[self._code]
