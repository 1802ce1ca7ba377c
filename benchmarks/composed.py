"""What is measured together beside the product of what each part gains alone.

    python -m benchmarks.composed results.json

Gains are over stock in the same file. A product of decode gains overstates: what one part no
longer reads another cannot save. The ideal of the composition knows that.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.names import parts_of

# Engines and cases of `benchmarks.compare --preset`. Each has its own stock, so that it is one run.
_CASES = ["ttft:32768", "tpot:32768", "ttft:130000", "tpot:130000", "pool_decode:32768"]
# Without it a full pool of a policy that drops entries is cut off at 64 requests.
_OPTIONS = {"max_num_seqs": 256}


def _preset(*parts: str) -> dict[str, Any]:
    both = "+".join(parts)
    engines = ["stock", *parts, both, "stock@fp8", f"{both}@fp8"]
    return {"engines": engines, "cases": _CASES, "engine_args": _OPTIONS}


PRESETS: dict[str, dict[str, Any]] = {
    "composed-speed": _preset("speed-24", "fier-2048"),
    "composed-fastkv": _preset("fastkv:tsp_layer=15", "fier-512"),
    "composed-snapkv": _preset("snapkv", "fier-512"),
}


@dataclass(frozen=True)
class Composed:
    """One case of a composition. Gains over stock; None where a part was not measured.

    parts: each part's gain, in the order of the name.
    """

    engine: str
    case: str
    measured: float
    ideal: float | None
    parts: dict[str, float | None]

    @property
    def product(self) -> float | None:
        """The product of the parts' gains; None unless all were measured."""
        gains = [gain for gain in self.parts.values() if gain is not None]
        return prod(gains) if len(gains) == len(self.parts) else None


def composed(results: Mapping[str, Any]) -> list[Composed]:
    """Every case of every composition in a file of `benchmarks.compare`."""
    found = []
    for engine in results["engines"]:
        parts = parts_of(engine)
        if not parts:
            continue
        for case, result in gains_of(results, engine).items():
            if case.startswith("itl:"):
                continue  # A worst case is no product.
            alone = {part: gains_of(results, part).get(case, {}) for part in parts}
            gains = {part: each.get("ratio_to_stock") for part, each in alone.items()}
            measured, ideal = result["ratio_to_stock"], result["ideal"]
            found.append(Composed(engine, case, measured, ideal, gains))
    return found


def gains_of(results: Mapping[str, Any], engine: str) -> dict[str, dict[str, Any]]:
    """The engine's pool and cases that were measured beside stock."""
    entry = results["engines"].get(engine, {})
    lines = {"pool": entry.get("pool") or {}, **entry.get("cases", {})}
    return {case: result for case, result in lines.items() if "ratio_to_stock" in result}


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
    print(table(json.loads(Path(sys.argv[1]).read_text())) or "nothing in it is composed")
