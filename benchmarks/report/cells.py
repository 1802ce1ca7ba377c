"""What the tables of `benchmarks.report` are made of: cells, rows and their order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.names import split_name
from benchmarks.engine.ideal import Case
from benchmarks.report.files import File

RESULTS = "../../benchmarks/results"
MISSING = "not measured"
# Of a pool: what is left is less than a request takes.
FULL = 0.8


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of Markdown; a line that says so where it has no rows."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return lines if len(lines) > 2 else [f"{MISSING.capitalize()}."]


def reference(file: File) -> str:
    """A link to a file, by its number in the page's list."""
    return f"[{file.number}]({RESULTS}/{file.name})"


def notes(files: Sequence[File], rows: Sequence[Sequence[str]]) -> list[str]:
    """What files say of themselves, of those that a table's rows refer to."""
    return [
        line
        for file in files
        if file.content.get("note") and any(reference(file) in row for row in rows)
        for line in ("", f"{reference(file)}: {file.content['note']}")
    ]


def gain(ratio: float, ideal: float | None) -> str:
    """1.13x (1.15x, 98%): the gain, its ideal, and how much of that is reached."""
    if ideal is None:
        return f"{ratio:.2f}x (no ideal)"
    return f"{ratio:.2f}x ({ideal:.2f}x, {100 * ratio / ideal:.0f}%)"


def order(names: Iterable[str]) -> list[str]:
    """Stock first, then single methods, then compositions; each in alphabetical order."""

    def key(name: str) -> tuple[bool, int, str]:
        policy, dtype = split_name(name)
        return (policy is not None, (policy or "").count("+") + bool(dtype), name)

    return sorted(set(names), key=key)


def words(case: str, result: Mapping[str, Any] | None = None) -> str:
    """A case as a reader names it; a pool that the server's limit kept from filling says so."""
    if case == "pool":
        return "KV pool, prompt tokens"
    parsed = Case.parse(case)
    length = f"{parsed.length:,}"
    filled = (result or {}).get("pool_filled", 1)
    if parsed.kind == "pool_decode" and filled < FULL:
        return f"decode, {length} each, pool {100 * filled:.0f}% full"
    text = {
        "ttft": f"TTFT, {length}",
        "tpot": f"TPOT, {length}",
        "itl": f"longest wait, {length} come in",
        "pool_decode": f"decode, pool full of {length}",
        "decode": f"decode, {parsed.batch} x {length}",
    }[parsed.kind]
    return text + (f", requests ask for `{parsed.policy}`" if parsed.policy else "")


def value(result: Mapping[str, Any]) -> str:
    """What was measured, with its unit."""
    if "tokens_per_s" in result:
        return f"{result['tokens_per_s']:,.0f} tok/s ({result['batch']})"
    if "tokens" in result:
        return f"{result['tokens']:,}"
    median = result["median"]
    return f"{median:,.0f} ms" if median >= 100 else f"{median:.2f} ms"
