"""Documents of records: lists, tables, configurations, logs and bibliographies, and questions."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_kvx.tools.tune_speed.documents.base import (
    Ask,
    Asks,
    Document,
    Maker,
    distinct,
    joined,
    ordinal,
    phrased,
    words,
)
from vllm_kvx.tools.tune_speed.documents.formats import (
    FORMATS,
    Format,
    Record,
    citation_format,
    log_format,
)
from vllm_kvx.tools.tune_speed.documents.values import Values

# Slots whose values come back, so that records can be filtered and counted by them.
_CATEGORIES = ("role", "team", "status", "level", "service", "journal", "place", "firm")
_NUMBERS = ("count", "small")
# A field's values name other records of the document.
_LINK = "link"
# Fewest fields of a record beside its key, and most records that one answer repeats.
_FEWEST, _MOST = 2, 4
# Most links that a question follows, and the values that it ranks.
_LINKS, _RANKED = 6, 3


@dataclass(frozen=True)
class Schema:
    """What a kind of document has records of.

    names: what the document may be called. noun, nouns: what a record is.
    key: the name of the field that tells records apart, and how it is made: a template of values.
    fields: the others, by name, each with its template.
    fixed: how such documents are written; None for any of FORMATS, with fields left out and
        reordered.
    """

    names: tuple[str, ...]
    noun: str
    nouns: str
    key: tuple[str, str]
    fields: Mapping[str, str]
    fixed: Callable[[random.Random], Format] | None = None

    def __call__(self, rng: random.Random, size: int) -> "Records":
        """A document of about `size` words."""
        values = Values(random.Random(rng.random()))
        fields = dict(self.fields)
        if self.fixed is None:
            count = rng.randint(min(_FEWEST, len(fields)), len(fields))
            fields = dict(rng.sample(sorted(fields.items()), count))
            form = FORMATS[rng.choice(sorted(FORMATS))]
        else:
            form = self.fixed(rng)
        keys = distinct(lambda: values.fill(self.key[1]))
        names = [self.key[0], *fields]
        records: list[Record] = []
        rows: list[str] = []
        left = size - words(form.head(names))
        while left > 0 or not rows:
            record = {self.key[0]: next(keys)}
            for name, template in fields.items():
                # Links lead upwards; the first record has none.
                if template == _LINK and records:
                    record[name] = values.rng.choice(records)[self.key[0]]
                else:
                    record[name] = "none" if template == _LINK else values.fill(template)
            records.append(record)
            rows.append(form.row(record))
            left -= words(rows[-1])
        return Records(self, rng.choice(self.names), form.text(names, rows), records, rows)


class Records(Document):
    """Records of one schema, with the rows that write them."""

    def __init__(
        self, schema: Schema, name: str, text: str, records: list[Record], rows: list[str]
    ) -> None:
        self.schema, self.name, self.text = schema, name, text
        self.records, self.rows = records, rows
        self._key = schema.key[0]
        self._fields = [field for field in records[0] if field != self._key]
        self._keys = [record[self._key] for record in records]
        self._by_key = dict(zip(self._keys, records, strict=True))

    def asks(self) -> Asks:
        return {
            "value": (3, self._value),
            "fields": (2, self._several_fields),
            "keys": (2, self._several_keys),
            "row": (2, self._row),
            "rows": (2, self._several_rows),
            "range": (1, self._range),
            "nth": (1, self._nth),
            "last": (0.5, self._last),
            "listing": (1, self._listing),
            "after": (1, self._after),
            "reverse": (2, self._reverse),
            "filter": (1, self._filter),
            "filtered_rows": (1, self._filtered_rows),
            "count": (0.7, self._count),
            "compare": (1, self._compare),
            "hop": (3, self._hop),
            "chain": (2, self._chain),
            "frequent": (2, self._frequent),
            "reformat": (1.5, self._reformat),
            "absent": (1, self._absent),
            "whole": (1, self._whole),
        }

    def _phrased(self, rng: random.Random, kind: str, reference: str, **slots: object) -> Ask:
        common = {"document": self.name, "noun": self.schema.noun, "nouns": self.schema.nouns}
        return phrased(rng, kind, reference, **common, **slots)

    def _value(self, rng: random.Random) -> Ask:
        key, field = rng.choice(self._keys), rng.choice(self._fields)
        return self._phrased(rng, "value", self._by_key[key][field], key=key, field=field)

    def _several_fields(self, rng: random.Random) -> Ask | None:
        if len(self._fields) < 2:
            return None
        key = rng.choice(self._keys)
        fields = rng.sample(self._fields, rng.randint(2, len(self._fields)))
        reference = "\n".join(self._by_key[key][field] for field in fields)
        return self._phrased(rng, "fields", reference, key=key, fields=joined(fields))

    def _several_keys(self, rng: random.Random) -> Ask | None:
        if len(self._keys) < 3:
            return None
        keys = rng.sample(self._keys, min(rng.randint(2, 6), len(self._keys)))
        field = rng.choice(self._fields)
        reference = "\n".join(self._by_key[key][field] for key in keys)
        return self._phrased(rng, "keys", reference, keys=joined(keys), field=field)

    def _row(self, rng: random.Random) -> Ask:
        index = rng.randrange(len(self.rows))
        return self._phrased(rng, "row", self.rows[index], key=self._keys[index])

    def _several_rows(self, rng: random.Random) -> Ask | None:
        if len(self.rows) < 3:
            return None
        chosen = rng.sample(range(len(self.rows)), rng.randint(2, min(_MOST, len(self.rows))))
        keys = joined([self._keys[index] for index in chosen])
        reference = "\n".join(self.rows[index] for index in chosen)
        return self._phrased(rng, "rows", reference, keys=keys, count=len(chosen))

    def _range(self, rng: random.Random) -> Ask | None:
        count = rng.randint(2, _MOST)
        first = rng.randint(0, min(9, len(self.rows) - count - 1)) if len(self.rows) > count else -1
        if first < 0:
            return None
        slots = {"first": first + 1, "last": first + count, "count": count}
        reference = "\n".join(self.rows[first : first + count])
        return self._phrased(rng, "range", reference, ordinal=ordinal(first), **slots)

    def _nth(self, rng: random.Random) -> Ask:
        index = rng.randrange(min(12, len(self._keys)))
        return self._phrased(rng, "nth", self._keys[index], ordinal=ordinal(index))

    def _last(self, rng: random.Random) -> Ask:
        return self._phrased(rng, "last", self._keys[-1])

    def _listing(self, rng: random.Random) -> Ask | None:
        count = min(rng.randint(3, 12), len(self._keys))
        if count < 3:
            return None
        return self._phrased(rng, "listing", "\n".join(self._keys[:count]), count=count)

    def _after(self, rng: random.Random) -> Ask | None:
        if len(self._keys) < 2:
            return None
        index = rng.randrange(len(self._keys) - 1)
        return self._phrased(rng, "after", self._keys[index + 1], key=self._keys[index])

    def _reverse(self, rng: random.Random) -> Ask | None:
        field = rng.choice(self._fields)
        times = Counter(record[field] for record in self.records)
        single = [record for record in self.records if times[record[field]] == 1]
        if not single:
            return None
        record = rng.choice(single)
        return self._phrased(rng, "reverse", record[self._key], field=field, value=record[field])

    def _matching(self, rng: random.Random, most: int) -> tuple[str, str, list[int]] | None:
        """A field, a value of it, and the indices of the two to `most` records that have it."""
        fields = [name for name in self._fields if self._slot(name) in _CATEGORIES]
        rng.shuffle(fields)
        for field in fields:
            times = Counter(record[field] for record in self.records)
            values = sorted(value for value, count in times.items() if 2 <= count <= most)
            if values:
                value = rng.choice(values)
                found = [i for i, record in enumerate(self.records) if record[field] == value]
                return field, value, found
        return None

    def _filter(self, rng: random.Random) -> Ask | None:
        matching = self._matching(rng, 10)
        if matching is None:
            return None
        field, value, found = matching
        reference = "\n".join(self._keys[index] for index in found)
        return self._phrased(rng, "filter", reference, field=field, value=value)

    def _filtered_rows(self, rng: random.Random) -> Ask | None:
        matching = self._matching(rng, _MOST)
        if matching is None:
            return None
        field, value, found = matching
        reference = "\n".join(self.rows[index] for index in found)
        return self._phrased(rng, "filtered_rows", reference, field=field, value=value)

    def _count(self, rng: random.Random) -> Ask | None:
        matching = self._matching(rng, 6)
        if matching is None:
            return None
        field, value, found = matching
        return self._phrased(rng, "count", str(len(found)), field=field, value=value)

    def _compare(self, rng: random.Random) -> Ask | None:
        fields = [name for name in self._fields if self._slot(name) in _NUMBERS]
        if not fields or len(self._keys) < 2:
            return None
        field = rng.choice(fields)
        first, second = rng.sample(self._keys, 2)
        figures = [self._by_key[key][field] for key in (first, second)]
        if figures[0] == figures[1]:
            return None
        greater = first if int(figures[0]) > int(figures[1]) else second
        reference = "\n".join((greater, *figures))
        return self._phrased(rng, "compare", reference, field=field, first=first, second=second)

    def _hop(self, rng: random.Random) -> Ask | None:
        links = [name for name in self._fields if self.schema.fields[name] == _LINK]
        others = [name for name in self._fields if name not in links]
        if not links or not others or len(self._keys) < 2:
            return None
        link, field = rng.choice(links), rng.choice(others)
        key = rng.choice(self._keys[1:])
        reference = self._by_key[self._by_key[key][link]][field]
        return self._phrased(rng, "hop", reference, key=key, link=link, field=field)

    def _chain(self, rng: random.Random) -> Ask | None:
        """All records that links lead to, one after the other: several places of the document."""
        links = [name for name in self._fields if self.schema.fields[name] == _LINK]
        link, ways = rng.choice(links or [""]), []
        for key in self._keys if links else ():
            way = [key]
            while (following := self._by_key[way[-1]][link]) in self._by_key:
                way.append(following)
            if 3 <= len(way) <= _LINKS + 1:
                ways.append(way)
        if not ways:
            return None
        key, *found = rng.choice(ways)
        return self._phrased(rng, "chain", "\n".join(found), key=key, link=link)

    def _frequent(self, rng: random.Random) -> Ask | None:
        """The values that most records have, by how many: no single place of the document."""
        fields = [name for name in self._fields if self._slot(name) in _CATEGORIES]
        for field in rng.sample(fields, len(fields)):
            times = Counter(record[field] for record in self.records).most_common()
            for count in range(min(_RANKED, len(times)), 1, -1):
                # No two as frequent, or the order were not the only right one.
                ranks = [n for _, n in times[: count + 1]]
                if len(set(ranks)) == len(ranks) and ranks[count - 1] > 1:
                    reference = "\n".join(value for value, _ in times[:count])
                    return self._phrased(rng, "frequent", reference, field=field, count=count)
        return None

    def _whole(self, rng: random.Random) -> Ask:
        return self._phrased(rng, "whole", "")

    def _reformat(self, rng: random.Random) -> Ask:
        key = rng.choice(self._keys)
        return self._phrased(rng, "reformat", "\n".join(self._by_key[key].values()), key=key)

    def _absent(self, rng: random.Random) -> Ask:
        values = Values(random.Random(rng.random()))
        keys = distinct(lambda: values.fill(self.schema.key[1]))
        key = next(key for key in keys if key not in self.text)
        return self._phrased(rng, "absent", "", key=key, field=rng.choice(self._fields))

    def _slot(self, name: str) -> str:
        return self.schema.fields[name].strip("{}")


STAFF = Schema(
    ("staff list", "directory of employees", "register of colleagues"),
    *("employee", "employees"),
    ("name", "{person}"),
    {
        **{"job": "{role}", "department": "{team}", "desk": "{room}", "extension": "{phone}"},
        **{"e-mail": "{email}", "contract since": "{date}", "superior": _LINK, "branch": "{place}"},
    },
)
STOCK = Schema(
    ("inventory", "stock list", "warehouse ledger"),
    *("article", "articles"),
    ("article number", "{code}"),
    {
        **{
            "description": "{object}",
            "pieces": "{count}",
            "bay": "{room}",
            "supplied by": "{firm}",
        },
        **{"purchase price": "{amount}", "checked on": "{date}", "state": "{status}"},
    },
)
PRICES = Schema(
    ("price list", "tariff", "sales brochure"),
    *("product", "products"),
    ("product", "{object}"),
    {
        **{"list price": "{amount}", "fewest pieces": "{small}", "rebate": "{percent}"},
        **{"made in": "{place}", "weight": "{weight}", "catalogue no.": "{code}"},
        **{"offered until": "{date}"},
    },
)
TIMETABLE = Schema(
    ("timetable", "departure board", "ferry schedule"),
    *("connection", "connections"),
    ("connection", "{code}"),
    {
        **{"destination": "{place}", "departure": "{time}", "arrival": "{time}"},
        **{"pier": "{small}", "run by": "{firm}", "fare": "{amount}", "first mate": "{person}"},
    },
)
BOOKINGS = Schema(
    ("booking sheet", "guest ledger", "reservations"),
    *("booking", "bookings"),
    ("booking", "{code}"),
    {
        **{"guest": "{person}", "lodging": "{room}", "arriving": "{date}", "nights": "{small}"},
        **{"deposited": "{amount}", "progress": "{status}", "telephone": "{phone}"},
    },
)
STATIONS = Schema(
    ("table of readings", "field measurements", "observation sheet"),
    *("station", "stations"),
    ("station", "{place} {small}"),
    {
        **{"reading": "{measure}", "taken": "{date}", "apparatus": "{object}"},
        **{"observer": "{person}", "humidity": "{percent}", "readings so far": "{count}"},
        **{"reference station": _LINK},
    },
)
SERVICES = Schema(
    ("configuration", "deployment file", "settings of the services"),
    *("service", "services"),
    ("service", "{service}-{small}"),
    {
        **{"listens on": "{address}", "maintainer": "{team}", "release": "{version}"},
        **{"timeout ms": "{count}", "retries": "{small}", "upstream": _LINK, "digest": "{hex}"},
        **{"contact": "{email}"},
    },
)
LOG = Schema(
    ("log", "server log", "event log"),
    *("request", "requests"),
    ("request", "{hex}"),
    {
        **{"timestamp": "{date} {time}", "severity": "{level}", "component": "{service}"},
        **{"event": "{event}", "duration": "{count}"},
    },
    log_format,
)
BIBLIOGRAPHY = Schema(
    ("bibliography", "reading list", "list of references"),
    *("publication", "publications"),
    ("label", "{coined}{small}"),
    {
        **{"author": "{person}", "heading": "{study}", "periodical": "{journal}"},
        **{"year": "{year}", "pages": "{small}-{count}"},
    },
    citation_format,
)
KINDS: dict[str, Maker] = {
    **{"staff": STAFF, "stock": STOCK, "prices": PRICES, "timetable": TIMETABLE},
    **{"bookings": BOOKINGS, "stations": STATIONS, "services": SERVICES, "log": LOG},
    "bibliography": BIBLIOGRAPHY,
}
