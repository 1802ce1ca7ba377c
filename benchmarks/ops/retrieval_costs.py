"""What a decode step's layer takes whole and with retrieval, fitted to what was measured.

`python -m benchmarks.ops.retrieval_costs` prints the rows of ``vllm_kvx/ops/retrieval/costs.py``
from result files, without a GPU. Time is taken for linear: stock attention by the entries of all
requests, retrieval by those and by all budgets. The fit minimises relative squares over the cases
of ``retrieval_crossover`` in which neither takes more than NEAR times as long as the other: where
one is far ahead, an error decides nothing.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.files import RESULTS
from benchmarks.ops.layer_shapes import SHAPES
from vllm_kvx.ops.retrieval.costs import KI, ONE_LAUNCH_LEAST, Costs
from vllm_kvx.ops.retrieval.one_launch import MAX_ROWS, was_faster

# The Triton ops were written anew since the first of these.
LAYERS = {
    "cuda": RESULTS / "ops" / "h200-retrieval-crossover.json",
    "triton": RESULTS / "ops" / "h200-retrieval-crossover-triton.json",
}
# The ops one by one.
OPS = {
    "cuda": RESULTS / "ops" / "h200-retrieval-ops.json",
    "triton": RESULTS / "ops" / "h200-retrieval-variants.json",
}
OPS_SHAPE = (8, 512)
# Layers in a step, with the rest between, by the shape of a report that names none.
STEPS = {
    "h200-retrieval-wide-places": "llama-3.1-8b",
    "h200-retrieval-wide-places-of-2": "llama-3.1-8b-of-2",
    "h200-retrieval-step-warm": "llama-3.1-8b",
    "h200-one-launch-shapes": "",
    "h200-costs-in-a-step": "",
}
# All but this one had their first case timed on a GPU that had just begun to work.
WARM = "h200-retrieval-step-warm"
# Entries of all requests, of which stock attention takes as long whatever they are if fewer.
STEPS_LEAST = 8_192
ENGINE = RESULTS / "engine" / "h200-fier.json"
NEAR = 2
# What h200-fier.json measured both ways: Llama-3.1-8B with CUDA ops, 30 of its layers retrieve.
ENGINE_SHAPE, ENGINE_LENGTH, ENGINE_BUDGET, ENGINE_LAYERS = (8, 512), 12_288, 2_048, 30
# The same where one launch does each layer: layers that retrieve, by policy.
FEW_ENGINE = RESULTS / "engine" / "h200-few-rows.json"
FEW_LAYERS = {"fier-2048": 30, "fier-2048:dense_layers=0": 32}
FEW_LENGTHS = (12_288, 16_384, 24_576, 32_768)
Case = dict[str, Any]
Table = dict[str, dict[tuple[int, int], Costs]]


def _fit(columns: Sequence[np.ndarray], times: np.ndarray) -> list[float]:
    """Coefficients of a constant and of the columns."""
    terms = np.stack([np.ones_like(times), *columns], axis=1) / times[:, None]
    found = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)[0]
    return [round(float(x), 3) for x in found]


def fitted(cases: Sequence[Case], backend: str) -> Costs:
    """The costs that fit one shape's cases."""
    near = [
        (case["batch"] * case["length"], case["batch"] * int(budget), us, case["stock"])
        for case in cases
        for budget, us in case.get(backend, {}).items()
        if case["stock"] / NEAR <= us <= case["stock"] * NEAR
    ]
    return _costs(near)


def _costs(cases: Sequence[tuple[float, ...]], least: int = 0) -> Costs:
    """Fitted to (entries, budgets, microseconds, those of stock attention), of all requests."""
    entries, budgets, ours, stock = np.array(cases, dtype=float).T
    whole, whole_entry = _fit([entries / KI], stock)
    fixed, scored, read = _fit([entries / KI, budgets / KI], ours)
    if read <= 0:  # Nothing that can be told from what differs between two runs.
        (fixed, scored), read = _fit([entries / KI], ours), 0.0
    return Costs(whole, whole_entry, fixed, scored, read, least)


@dataclass(frozen=True)
class Timed:
    """A way of a case of ``retrieval_step``: microseconds of it and of stock attention there.

    shape: empty where the report is of one. launches: in how many a server does the layer.
    """

    shape: str
    batch: int
    length: int
    budget: int
    way: str
    us: float
    stock: float
    launches: int


def timed(report: dict[str, Any]) -> Iterator[Timed]:
    """All of a report, of one shape or several, of one budget or several."""
    budgets = report["budget"]
    # Ways name their budget where there are several.
    alone = budgets[0] if isinstance(budgets, list) else budgets
    for label, case in report["cases"].items():
        shape, _, name = label.rpartition(" ")
        batch, length = map(int, name.split("x"))
        for words, found in case.items():
            if words == "stock" or not isinstance(found, dict):
                continue
            way, _, budget = words.partition(" at ")
            asked = int(budget or alone)
            us = found["us"], case["stock"]["us"]
            yield Timed(shape, batch, length, asked, way, *us, case["launches"])


def in_steps(launches: int) -> Iterator[Timed]:
    """Layers in a step that so many launches did, where a server may take one for few rows."""
    name_of = {1: "one launch", 3: "three launches"}[launches]
    for name, shape in STEPS.items():
        report = json.loads((RESULTS / "ops" / f"{name}.json").read_text())
        cold = () if name == WARM else list(report["cases"])[:1]
        warm = report | {"cases": {k: v for k, v in report["cases"].items() if k not in cold}}
        for case in timed(warm):
            found = case if case.shape else replace(case, shape=shape)
            heads = SHAPES[found.shape].heads
            so = case.way == name_of or (case.way == "as served" and case.launches == launches)
            taken = was_faster(heads.heads, heads.kv_heads, heads.head_dim)
            within = launches > 1 or case.batch <= MAX_ROWS
            if so and taken and within and case.batch * case.length >= STEPS_LEAST:
                yield found


def of_steps(cases: Iterable[Timed]) -> dict[tuple[int, int], Costs]:
    """By (KV heads, bytes of a key and a value of one head), whatever heads share a KV head."""
    by_shape: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for case in cases:
        sizes = case.batch * case.length, case.batch * case.budget
        by_shape.setdefault(shape_of(case), []).append((*sizes, case.us, case.stock))
    return {shape: _costs(each, ONE_LAUNCH_LEAST) for shape, each in sorted(by_shape.items())}


def shape_of(case: Timed) -> tuple[int, int]:
    """(KV heads, bytes of a key and a value of one head), with 16 bits."""
    heads = SHAPES[case.shape].heads
    return heads.kv_heads, 4 * heads.head_dim


def few_in_engine(engines: dict[str, Any], costs: Costs) -> float:
    """`in_engine` where one launch does each layer, the median over lengths and policies.

    engines: those of h200-few-rows.json. costs: of ENGINE_SHAPE, without this.
    """
    found, stock = list[float](), engines["stock"]["cases"]
    for name, layers in FEW_LAYERS.items():
        for length in FEW_LENGTHS:
            ours = engines[name]["cases"][f"tpot:{length}"]["median"]
            saved = (stock[f"tpot:{length}"]["median"] - ours) * 1e3 / layers
            found.append(_saves(costs, length) - saved)
    return round(median(found), 2)


def table(reports: Mapping[str, dict[str, Any]]) -> Table:
    """By backend and shape, from the report of ``retrieval_crossover`` on each backend."""
    found: Table = {}
    for backend, report in reports.items():
        by_shape: dict[tuple[int, int], list[Case]] = {}
        for case in report["cases"]:
            by_shape.setdefault((case["kv_heads"], case["head_bytes"]), []).append(case)
        found[backend] = {shape: fitted(cases, backend) for shape, cases in by_shape.items()}
    return found


def attends(report: dict[str, Any], backend: str, costs: Costs) -> float:
    """Attention's share of what a layer that retrieves takes, whatever its entries and budget.

    report: of ``retrieval``. costs: of OPS_SHAPE, as fitted.
    """
    budget = costs.read * report["budget"] / KI
    cases = (case for name, case in report["cases"].items() if name.startswith("1x"))
    alone = [case[f"attend/{backend}"]["us"] - budget for case in cases]
    return round(median(alone) / costs.fixed, 2)


def in_engine(engines: dict[str, Any], costs: Costs) -> float:
    """Microseconds that a layer that retrieves takes longer in an engine than by itself.

    engines: those of h200-fier.json. costs: of ENGINE_SHAPE, without this.
    """
    cases, length = engines[f"fier-{ENGINE_BUDGET}"]["cases"], ENGINE_LENGTH
    asked = cases[f"tpot:{length}@fier-{ENGINE_BUDGET}:dense_below=0"]["median"]
    lost = (asked - cases[f"tpot:{length}"]["median"]) * 1e3 / ENGINE_LAYERS
    return round(lost + _saves(costs, length), 2)


def _saves(costs: Costs, length: int) -> float:
    """Microseconds of a layer that one request of so many entries saves by these costs."""
    gain = costs.gain(np.array([length]), np.array([ENGINE_BUDGET]))[0]
    return float(gain) + costs.whole - costs.fixed


def main() -> None:
    found = table({backend: json.loads(file.read_text()) for backend, file in LAYERS.items()})
    engines = json.loads(ENGINE.read_text())["engines"]
    for backend, shapes in found.items():
        for shape, costs in shapes.items():
            print(f"{backend}: {shape}: Costs{astuple(costs)},")
    of_ops = {
        backend: attends(json.loads(file.read_text()), backend, found[backend][OPS_SHAPE])
        for backend, file in OPS.items()
    }
    print(f"ATTENDS = {of_ops}")
    few = of_steps(in_steps(1))
    for shape, costs in few.items():
        print(f"one launch: {shape}: Costs{astuple(costs)},")
    in_three = of_steps(in_steps(3))
    engines_of_few = json.loads(FEW_ENGINE.read_text())["engines"]
    besides = few_in_engine(engines_of_few, few[ENGINE_SHAPE])
    print(f"ONE_LAUNCH_IN_ENGINE_US = {besides}")
    for shape, costs in in_three.items():
        least = replace(costs, fixed=costs.fixed + besides, least=0).pays_from(ENGINE_BUDGET, 8)
        print(f"three launches in a step: {shape}: eight requests would begin at {least}")
    print(f"IN_ENGINE_US = {in_engine(engines, found['cuda'][ENGINE_SHAPE])}")


if __name__ == "__main__":
    main()
