"""Times what attention takes of a decode step: several layers in one CUDA graph.

`python -m benchmarks.ops.retrieval_step --output NAME.json` on a GPU. `benchmarks.ops.retrieval`
replays a graph of one operator, which adds what it takes to start a graph, some 5 us, to each time.
Here the layers of a step follow one another as they do in a server's graph, over caches of their
own, so that L2 holds nothing of the next one's. `us` is the graph's time by its layers, the lower
of two medians; `stock` is FlashAttention as vLLM calls it. `as served` does a layer in as many
launches as `launches` says, one or three; `one launch` and `three launches` are the other way,
where it can be. 6of8x130000 is six requests in a graph for eight, as vLLM has no graph for six.
Llama-3.1-8B's shape or others in bf16, blocks anywhere. Of several shapes a case begins with its
name, and of several budgets a way ends with one.

`--with-rest` puts the rest of a layer between, as a step has it: matrices of its weights, norms,
and the cache's new entry (`benchmarks.ops.rest_of_layer`). What a graph of these alone takes is
taken off, and stands as `rest_us`: the mean of before and after all ways of a case, once a GPU that
has just begun to work, and takes 5% less for it, has taken as long twice.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops.layer_shapes import SHAPES, LayerShape
from benchmarks.ops.rest_of_layer import RestOfLayer
from benchmarks.ops.retrieval_layer import (
    ON_GPU,
    Call,
    Decode,
    Heads,
    Layer,
    block_bytes,
    head_of,
    measure,
    nothing,
    run_all,
    stock_attention,
    with_attend_ctas,
)
from benchmarks.ops.saliency import bytes_per_us
from vllm_kvx.ops.retrieval import one_launch, retrieve
from vllm_kvx.ops.retrieval.one_launch import MAX_PAIRS, was_faster

CASES = ("1x32768", "16x32768", "1x130000", "6x130000", "6of8x130000")
# The graph goes over its layers several times. What retrieval and the rest read of them all is
# several times what L2 holds.
CACHE_BYTES, OTHERS_BYTES = 48 << 30, 200 << 20
TIMES, CALLS = 4, 64
# The rest of a layer is timed until it takes as long twice, give or take this share, or so often.
ALIKE, AT_MOST = 0.005, 12
# Rows that a server's layers have in one launch at most, whatever `--most-rows` says.
SERVED_ROWS = one_launch.MAX_ROWS


@dataclass(frozen=True)
class Case:
    """`batch` requests of `length` entries in a graph of `rows`."""

    name: str
    batch: int
    rows: int
    length: int

    @classmethod
    def of(cls, name: str) -> "Case":
        found = re.fullmatch(r"([1-9]\d*)(?:of([1-9]\d*))?x([1-9]\d*)", name)
        if found is None:
            problem = "is not REQUESTSxENTRIES, such as 6x130000, or REQUESTSofROWSxENTRIES"
            raise argparse.ArgumentTypeError(f"{name!r} {problem}")
        batch, rows, length = (int(x) if x else 0 for x in found.groups())
        if rows and rows < batch:
            raise argparse.ArgumentTypeError(f"{name!r} has more requests than rows")
        return cls(name, batch, max(rows, batch), length)


def variants_of(
    scratch: retrieve.Scratch, rows: int, heads: Heads, takes: bool
) -> dict[str, retrieve.Scratch]:
    """What could run in place of what does, by name; but for one launch, variants of the three.

    takes: whether one launch can do the step.
    """
    three, served = scratch.that_chooses, served_by(scratch, heads, rows)
    found = {"as served": served}
    if takes and served is scratch:
        found["three launches"] = three
    elif takes:
        found["one launch"] = scratch
    for on in (0, 1 << 30):
        if (rows <= on) != (rows <= three.overlap_rows):
            found["overlapped" if on else "apart"] = replace(three, overlap_rows=on)
    for ctas in (1, 2, 4, 8):
        found[f"select by {ctas}"] = replace(three, select_ctas=ctas)
    for ctas in (132, 528):
        found[f"score by {ctas}"] = replace(three, score_programs=ctas)
    for ctas in (132, 264, 528, 792):
        found[f"attend by {ctas}"] = with_attend_ctas(three, ctas)
    return found


def served_by(scratch: retrieve.Scratch, heads: Heads, rows: int) -> retrieve.Scratch:
    """What a server has: one launch where it was measured to be faster, see ``one_launch``."""
    faster = was_faster(heads.heads, heads.kv_heads, heads.head_dim)
    return scratch if faster and rows <= SERVED_ROWS else scratch.that_chooses


def launches_of(scratch: retrieve.Scratch, step: Decode) -> int:
    """In how many launches it does a layer of the step."""
    one, layer = scratch.one_launch, step.layer
    if one is None:
        return 3
    return 1 if one.takes(step.query, layer.paged, step.table, len(step.rows.lens), None) else 3


def _retrieve(scratch: retrieve.Scratch, step: Decode, chosen: bool = False) -> Call:
    return partial(step.made_with, partial(retrieve.retrieve, chosen=chosen), scratch)


def _reuse(scratch: retrieve.Scratch, layers: int, index: int, step: Decode) -> Call:
    """Of `layers` the first chooses."""
    return _retrieve(scratch, step, index % layers != 0)


def case(
    shape: LayerShape,
    size: Case,
    budgets: Sequence[int],
    repeats: int,
    bandwidth: float,
    only: Sequence[str] = (),
    with_rest: bool = False,
) -> dict[str, Any]:
    """Microseconds of a layer, of stock and of each variant, or of those that `only` names."""
    heads, length, batch = shape.heads, size.length, size.batch
    of_layer = -(-length // heads.block_size) * batch * block_bytes(heads)
    # What is read of each layer's cache is least where fewest tokens are chosen.
    first = Layer(heads, length, batch)
    least = first.decode(length, batch, min(budgets), size.rows).bytes_of("all")
    rests = [RestOfLayer.of(shape, batch)] if with_rest else []
    least += sum(rest.weight_bytes for rest in rests)
    count = max(2, min(max(4, int(OTHERS_BYTES // least)), int(CACHE_BYTES // of_layer)))
    times = max(TIMES, CALLS // count)
    layers = [first, *(Layer(heads, length, batch) for _ in range(count - 1))]
    rests += [RestOfLayer.of(shape, batch) for _ in layers[1:]] if with_rest else []
    report: dict[str, Any] = {"layers": count, "times": times}

    def us_of(steps: Sequence[Decode], make: Callable[[int, Decode], Call]) -> float:
        calls = [make(i, step) for i, step in enumerate(steps)]
        if rests:
            both = zip(rests * times, steps, calls, strict=True)
            calls = [rest.around(step, call) for rest, step, call in both]
        return min(measure(partial(run_all, calls), repeats) for _ in range(2)) / len(calls)

    found: list[tuple[str, float, float]] = []
    rest = _Rest(lambda: us_of(steps, lambda _, step: nothing) if rests else 0.0)
    for budget in budgets:
        steps = [layer.decode(length, batch, budget, size.rows) for layer in layers] * times
        rest.begin()
        if not found:
            us = us_of(steps, lambda _, step: stock_attention(step))
            found.append(("stock", us, steps[0].bytes_of("stock") / bandwidth))
        scratch = steps[0].scratch("cuda")
        takes = launches_of(scratch, steps[0]) == 1
        report["launches"] = launches_of(served_by(scratch, heads, size.rows), steps[0])
        variants = variants_of(scratch, size.rows, heads, takes)
        ways = {name: partial(_reuse, each, 1) for name, each in variants.items()}
        chooses = scratch.that_chooses
        ways |= {f"reuse_layers={n}": partial(_reuse, chooses, n) for n in (2, 3, 4, 8)}
        for name, way in ways.items():
            if only and name not in only:
                continue
            label = name if len(budgets) == 1 else f"{name} at {budget}"
            # Bytes are those of a layer that chooses.
            found.append((label, us_of(steps, way), steps[0].bytes_of("all") / bandwidth))
    return report | _figures(found, rest.end() if rests else None)


class _Rest:
    """What the rest of a layer takes, by `measured`, before and after what is timed."""

    def __init__(self, measured: Callable[[], float]) -> None:
        self._measured, self._before = measured, -1.0

    def begin(self) -> None:
        """Measures once, until two times are alike: a GPU that was idle is warm then."""
        for _ in range(AT_MOST if self._before < 0 else 0):
            before, self._before = self._before, self._measured()
            if abs(self._before - before) <= ALIKE * before:
                return

    def end(self) -> float:
        """The mean of before and now."""
        return (self._before + self._measured()) / 2


def _figures(found: Sequence[tuple[str, float, float]], rest: float | None) -> dict[str, Any]:
    """By way: what is reported of (way, microseconds, those of its bytes), `stock` first."""
    report: dict[str, Any] = {} if rest is None else {"rest_us": round(rest, 2)}
    stock = found[0][1] - (rest or 0)
    for name, taken, ideal in found:
        us = taken - (rest or 0)
        figures = {"us": us, "ideal_us": ideal}
        report[name] = {key: round(value, 2) for key, value in figures.items()}
        report[name]["of_bandwidth"] = round(ideal / us, 3)
        if name != "stock":
            report[name]["stock_by_this"] = round(stock / us, 2)
    return report


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    cases = [Case.of(name) for name in CASES]
    parser.add_argument("--cases", nargs="+", type=Case.of, default=cases, help="such as 6x130000")
    shapes, first = list(SHAPES), next(iter(SHAPES))
    parser.add_argument("--shape", nargs="+", choices=shapes, default=[first], help="of the layers")
    parser.add_argument("--budget", type=int, nargs="+", default=[2048])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[], help="names of variants")
    rest = "with the rest of a layer between"
    parser.add_argument("--with-rest", action="store_true", help=rest)
    most = f"of `one launch`, of {MAX_PAIRS} pairs of a row and a KV head at most; as served:"
    most = f"{most} {SERVED_ROWS}"
    parser.add_argument("--most-rows", type=int, default=SERVED_ROWS, help=most)
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args(argv)
    if not SERVED_ROWS <= args.most_rows <= MAX_PAIRS:
        parser.error(f"--most-rows {args.most_rows}: give {SERVED_ROWS} to {MAX_PAIRS}")
    others = [name for name in args.shape if not SHAPES[name].intermediate]
    if args.with_rest and others:
        parser.error(f"--with-rest: what the rest of a layer is of {others[0]} is not known here")
    return args


def main() -> None:
    args = parse_args()
    if not ON_GPU:
        raise SystemExit("error: times are those of a GPU, and there is none")
    one_launch.MAX_ROWS = args.most_rows
    what = "A layer as a step has it, several in one CUDA graph: retrieval beside stock attention."
    report = head_of(what, "benchmarks.ops.retrieval_step", args.commit)
    bandwidth = bytes_per_us(torch.cuda.get_device_name())
    one = len(args.shape) == 1 and len(args.budget) == 1
    report |= {
        "shape": args.shape[0] if one else args.shape,
        "budget": args.budget[0] if one else args.budget,
        "bytes_per_us": bandwidth,
        "cases": {},
        "with_rest": args.with_rest,
    }
    for name, each in product(args.shape, args.cases):
        label = each.name if len(args.shape) == 1 else f"{name} {each.name}"
        sizes = each, args.budget, args.repeats, bandwidth
        found = case(SHAPES[name], *sizes, args.only, args.with_rest)
        report["cases"][label] = found
        print(label, json.dumps({k: v["us"] for k, v in found.items() if isinstance(v, dict)}))
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
