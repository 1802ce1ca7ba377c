"""How records are written: tables, CSV, JSON, YAML, INI, XML, cards and sentences."""

import csv
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Record = Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """A way to write records.

    row: one record. head: what stands before the rows, of the fields' names. foot: what stands
    after them. between: what separates two rows.
    """

    row: Callable[[Record], str]
    head: Callable[[Sequence[str]], str] = lambda names: ""
    foot: str = ""
    between: str = "\n"

    def text(self, names: Sequence[str], rows: Sequence[str]) -> str:
        return self.head(names) + self.between.join(rows) + self.foot


def _separated(cells: Sequence[str], separator: str) -> str:
    line = io.StringIO()
    csv.writer(line, delimiter=separator, lineterminator="").writerow(cells)
    return line.getvalue()


def _csv(separator: str) -> Format:
    return Format(
        row=lambda record: _separated(list(record.values()), separator),
        head=lambda names: _separated(names, separator) + "\n",
    )


def _markdown_head(names: Sequence[str]) -> str:
    return f"| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"


def _html_row(record: Record) -> str:
    return "<tr>" + "".join(f"<td>{value}</td>" for value in record.values()) + "</tr>"


def _html_head(names: Sequence[str]) -> str:
    return "<table>\n<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>\n"


def _identifiers(record: Record) -> dict[str, str]:
    return {name.replace(" ", "_"): value for name, value in record.items()}


def _json(record: Record) -> str:
    return json.dumps(_identifiers(record), ensure_ascii=False)


def _yaml(record: Record) -> str:
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items()]
    return "- " + "\n  ".join(lines)


def _ini(record: Record) -> str:
    (_, key), *others = _identifiers(record).items()
    return "\n".join((f"[{key}]", *(f"{name} = {value}" for name, value in others)))


def _xml(record: Record) -> str:
    fields = _identifiers(record).items()
    return "<entry>" + "".join(f"<{name}>{value}</{name}>" for name, value in fields) + "</entry>"


def _card(record: Record) -> str:
    return "\n".join(f"{name.capitalize()}: {value}" for name, value in record.items())


def _bullets(record: Record) -> str:
    (_, key), *others = record.items()
    return f"* {key}" + "".join(f"\n  - {name}: {value}" for name, value in others)


def _one_line(record: Record) -> str:
    (_, key), *others = record.items()
    return f"{key} -- " + "; ".join(f"{name} {value}" for name, value in others)


def _sentences(openings: str) -> Callable[[Record], str]:
    def row(record: Record) -> str:
        (_, key), *others = record.items()
        said = [f"the {name} is {value}" for name, value in others]
        return f"{openings.format(key=key)} {', '.join(said[:-1])}{' and ' * (len(said) > 1)}" + (
            f"{said[-1]}."
        )

    return row


FORMATS: dict[str, Format] = {
    "markdown": Format(lambda r: f"| {' | '.join(r.values())} |", _markdown_head),
    "commas": _csv(","),
    "semicolons": _csv(";"),
    "tabs": _csv("\t"),
    "json_lines": Format(_json),
    "json": Format(_json, lambda names: "[\n", "\n]", ",\n"),
    "yaml": Format(_yaml),
    "ini": Format(_ini, between="\n\n"),
    "xml": Format(_xml, lambda names: "<entries>\n", "\n</entries>"),
    "html": Format(_html_row, _html_head, "\n</table>"),
    "cards": Format(_card, between="\n\n"),
    "rules": Format(_card, between="\n----\n"),
    "bullets": Format(_bullets),
    "lines": Format(_one_line),
    "for": Format(_sentences("For {key},")),
    "with": Format(_sentences("As regards {key},"), between=" "),
}


def log_format(rng: random.Random) -> Format:
    """A way to write a log, one line an event; it takes the fields of a log's records, in order."""
    forms: tuple[Callable[[list[str]], str], ...] = (
        lambda v: f"{v[1]} {v[2]} [{v[3]}] {v[4]} (request {v[0]}, {v[5]} ms)",
        lambda v: f"[{v[1]}] {v[3]}/{v[2]}: {v[4]} request={v[0]} elapsed={v[5]}ms",
        lambda v: f'time="{v[1]}" lvl={v[2]} svc={v[3]} req={v[0]} took={v[5]} msg="{v[4]}"',
        lambda v: f"{v[2]:<7}| {v[1]} | {v[0]} | {v[3]} | {v[5]} | {v[4]}",
    )
    form = rng.choice(forms)
    return Format(lambda record: form(list(record.values())))


def citation_format(rng: random.Random) -> Format:
    """Bibliographies: label, author, title, journal, year, pages."""
    forms: tuple[Callable[[list[str]], str], ...] = (
        lambda v: f"[{v[0]}] {v[1]}: {v[2]}. {v[3]} ({v[4]}), pp. {v[5]}.",
        lambda v: f'{v[0]}  {v[1]} ({v[4]}). "{v[2]}". In: {v[3]}, {v[5]}.',
        lambda v: (
            f"@article{{{v[0]},\n  author = {{{v[1]}}},\n  title = {{{v[2]}}},\n"
            f"  journal = {{{v[3]}}},\n  year = {{{v[4]}}},\n  pages = {{{v[5]}}}\n}}"
        ),
    )
    form = rng.choice(forms)
    return Format(lambda record: form(list(record.values())))
