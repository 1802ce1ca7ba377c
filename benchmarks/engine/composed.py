"""What is measured together beside the product of what each part gains alone.

    python -m benchmarks.engine.composed results.json

Gains are over stock in the same file. A product of decode gains overstates: what one part no
longer reads another cannot save. The ideal of the composition knows that.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.common.files import read_json
from benchmarks.common.names import STOCK, baseline_of, parts_of, split_name
from benchmarks.engine.ideal import Case

# Engines and cases of `benchmarks.engine.compare --preset`, each with a stock of its own.
_CASES = ["ttft:32768", "tpot:32768", "ttft:130000", "tpot:130000", "pool_decode:32768"]
# Without it a full pool of a policy that drops entries is cut off at 64 requests.
_OPTIONS = {"max_num_seqs": 256}


# Of one server that has room for all, whose requests name them.
_PARTS = ("speed-24", "fastkv:tsp_layer=15", "snapkv", "fier-512")
_BOTH = ("speed-24+fier-2048", "fastkv:tsp_layer=15+fier-512", "snapkv+fier-512")


def _preset(*parts: str) -> dict[str, Any]:
    both = "+".join(parts)
    engines = ["stock", *parts, both, "stock@fp8", f"{both}@fp8"]
    return {"engines": engines, "cases": _CASES, "engine_args": _OPTIONS}


def _mixed() -> dict[str, Any]:
    """All compositions and parts, and what the server's own policy gains in batches."""
    names = [*_BOTH, *_PARTS, "full"]
    alone = [f"{kind}:{n}" for n in (32768, 130000) for kind in ("ttft", "tpot")]
    cases = [*alone, *(f"{case}@{name}" for name in names for case in alone)]
    cases += ["decode:16x32768", "decode:6x128000"]
    pools = [f"pool_decode:32768@{name}" for name in (*_BOTH, *_PARTS)]
    return {
        "engines": ["stock", "fier-2048", "stock@fp8", "fier-2048@fp8"],
        "cases": [*cases, *pools[:3], "pool_decode:32768", *pools[3:]],
        "engine_args": {},
        "layout": list(_PARTS),
    }


PRESETS: dict[str, dict[str, Any]] = {
    "composed": _mixed(),
    "composed-speed": _preset("speed-24", "fier-2048"),
    "composed-fastkv": _preset("fastkv:tsp_layer=15", "fier-512"),
    "composed-snapkv": _preset("snapkv", "fier-512"),
}


@dataclass(frozen=True)
class Composed:
    """One case of a composition. Gains over stock; None where a part was not measured.

    parts: each part's gain, in the order of the name. filled: the share of the pool in use, 1 where
        the case does not fill it.
    """

    engine: str
    case: str
    measured: float
    ideal: float | None
    parts: dict[str, float | None]
    filled: float = 1.0

    @property
    def product(self) -> float | None:
        """The product of the parts' gains; None unless all were measured."""
        gains = [gain for gain in self.parts.values() if gain is not None]
        return prod(gains) if len(gains) == len(self.parts) else None


def composed(results: Mapping[str, Any]) -> list[Composed]:
    """Every case of every composition in a file of `benchmarks.engine.compare`."""
    found = []
    gains = gains_of(results)
    for name, cases in gains.items():
        parts = parts_of(name)
        for case, result in cases.items() if parts else ():
            if case.startswith("itl:") or "@" in case:
                continue  # A worst case is no product, and requests for `full` are none.
            alone = {part: gains.get(part, {}).get(case, {}) for part in parts}
            by_part = {part: each.get("ratio_to_stock") for part, each in alone.items()}
            measured, ideal = result["ratio_to_stock"], result["ideal"]
            filled = float(result.get("pool_filled", 1))
            found.append(Composed(name, case, measured, ideal, by_part, filled))
    return found


def gains_of(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Pools and cases that were measured beside stock, by name and case."""
    gains: dict[str, dict[str, dict[str, Any]]] = {}
    if baseline_of(results["engines"]) != STOCK:
        return gains  # What a part alone gains is not known where stock has its cache.
    for engine, entry in results["engines"].items():
        for name, case, result in lines_of(engine, entry):
            if "ratio_to_stock" in result:
                gains.setdefault(name, {}).setdefault(case, result)
    return gains


def lines_of(engine: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, case and result of all that an engine measured, `pool` first.

    Where a server has room for further policies, requests that name one are that policy's.
    """
    yield engine, "pool", entry.get("pool") or {}
    dtype = split_name(engine)[1]
    for text, result in entry.get("cases", {}).items():
        case = Case.parse(text)
        if entry.get("room_for") and case.policy not in (None, "full"):
            yield f"{case.policy}@{dtype}" if dtype else str(case.policy), str(case.stock), result
        else:
            yield engine, text, result


def table(results: Mapping[str, Any]) -> str:
    """A line for each composition and case; empty if the file has none."""
    rows = [("composition", "case", "measured", "product", "of product", "ideal", "parts")]
    for each in composed(results):
        product, ideal = each.product, each.ideal
        rows.append(
            (
                each.engine,
                each.case,
                f"{each.measured:.3f}",
                "-" if product is None else f"{product:.3f}",
                "-" if product is None else f"{100 * each.measured / product:.1f}%",
                "-" if ideal is None else f"{ideal:.3f}",
                " * ".join("-" if g is None else f"{g:.3f}" for g in each.parts.values()),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:6], widths, strict=True)), row[6]])
        for row in rows
    ]
    return "\n".join(lines) if len(rows) > 1 else ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(
        table(read_json(Path(sys.argv[1]), "benchmarks.engine.compare", "engines"))
        or "nothing in it is composed"
    )
