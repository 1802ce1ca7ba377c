"""Times what attention takes of a decode step: several layers in one CUDA graph.

`python -m benchmarks.ops.retrieval_step --output NAME.json` on a GPU. `benchmarks.ops.retrieval`
replays a graph of one operator, which adds what it takes to start a graph, some 5 us, to each time.
Here the layers of a step follow one another as they do in a server's graph, over caches of their
own, so that L2 holds nothing of the next one's. `us` is the graph's time by its layers, the lower
of two medians; `stock` is FlashAttention as vLLM calls it. `as served` does a layer in as many
launches as `launches` says, one or three, and `three launches` in three. 6of8x130000 is six
requests in a graph for eight, as vLLM has no graph for six. Llama-3.1-8B's shape or another in
bf16, blocks anywhere.

`--with-rest` puts the rest of a layer between, as a step has it: matrices of its weights, norms,
and the cache's new entry (`benchmarks.ops.rest_of_layer`). What a graph of these alone takes is
taken off, and stands as `rest_us`. It is measured before and after each way, and the mean counts: a
GPU that has just begun to work takes 5% less for it.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops.rest_of_layer import SIZES, RestOfLayer
from benchmarks.ops.retrieval_layer import (
    LLAMA_8B,
    LLAMA_8B_OF_2,
    ON_GPU,
    QWEN3_NEXT,
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
from vllm_kvx.ops.retrieval import retrieve

SHAPES = {
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.1-8b-of-2": LLAMA_8B_OF_2,
    "qwen3-next": QWEN3_NEXT,
}
CASES = ("1x32768", "16x32768", "1x130000", "6x130000", "6of8x130000")
# The graph goes over its layers several times. What retrieval reads of them all is several times
# what L2 holds.
CACHE_BYTES, OTHERS_BYTES, TIMES = 48 << 30, 200 << 20, 4


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


def variants_of(scratch: retrieve.Scratch, rows: int) -> dict[str, retrieve.Scratch]:
    """What could run in place of what does, by name; but for one launch, variants of the three."""
    found, three = {"as served": scratch}, scratch.that_chooses
    if scratch.one_launch is not None:
        # The served one is the same where one launch does not take the step.
        found["three launches"] = three
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


def launches_of(scratch: retrieve.Scratch, step: Decode) -> int:
    """In how many launches a layer of the step is served."""
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
    shape: Heads,
    size: Case,
    budget: int,
    repeats: int,
    bandwidth: float,
    only: Sequence[str] = (),
    sizes: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Microseconds of a layer, of stock and of each variant, or of those that `only` names.

    sizes: hidden and intermediate, where the rest of a layer is between.
    """
    length, batch = size.length, size.batch
    of_layer = -(-length // shape.block_size) * batch * block_bytes(shape)

    def layer() -> Decode:
        return Layer(shape, length, batch).decode(length, batch, budget, size.rows)

    steps = [layer()]
    count = max(4, int(OTHERS_BYTES // steps[0].bytes_of("all")))
    count = max(2, min(count, int(CACHE_BYTES // of_layer)))
    steps += [layer() for _ in range(count - 1)]
    scratch = steps[0].scratch("cuda")
    launches = launches_of(scratch, steps[0])
    report: dict[str, Any] = {"layers": count, "times": TIMES, "launches": launches}
    rests = [RestOfLayer.of(shape, *sizes, batch) for _ in steps] if sizes else []

    def us_of(make: Callable[[int, Decode], Call]) -> float:
        calls = [make(i, step) for i, step in enumerate(steps * TIMES)]
        if rests:
            both = zip(rests * TIMES, steps * TIMES, calls, strict=True)
            calls = [rest.around(step, call) for rest, step, call in both]
        return min(measure(partial(run_all, calls), repeats) for _ in range(2)) / len(calls)

    def rest_us() -> float:
        return us_of(lambda _, step: nothing) if rests else 0.0

    rest_before = rest_us()

    def time(name: str, op: str, make: Callable[[int, Decode], Call]) -> None:
        nonlocal rest_before
        us, rest_after = us_of(make), rest_us()
        rest, rest_before = (rest_before + rest_after) / 2, rest_after
        ideal = steps[0].bytes_of(op) / bandwidth
        report[name] = {"us": round(us - rest, 2), "ideal_us": round(ideal, 2)}
        report[name]["of_bandwidth"] = round(ideal / (us - rest), 3)
        if rests:
            report[name]["rest_us"] = round(rest, 2)

    time("stock", "stock", lambda _, step: stock_attention(step))
    variants = variants_of(scratch, size.rows)
    ways = {name: partial(_reuse, each, 1) for name, each in variants.items()}
    chooses = scratch.that_chooses
    ways |= {f"reuse_layers={n}": partial(_reuse, chooses, n) for n in (2, 3, 4, 8)}
    for name, way in ways.items():
        if only and name not in only:
            continue
        # Bytes are those of a layer that chooses.
        time(name, "all", way)
        report[name]["stock_by_this"] = round(report["stock"]["us"] / report[name]["us"], 2)
    return report


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    cases = [Case.of(name) for name in CASES]
    parser.add_argument("--cases", nargs="+", type=Case.of, default=cases, help="such as 6x130000")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="of the layers")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[], help="names of variants")
    rest = "with the rest of a layer between, for " + " and ".join(SIZES)
    parser.add_argument("--with-rest", action="store_true", help=rest)
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args(argv)
    if args.with_rest and args.shape not in SIZES:
        parser.error(f"--with-rest is for --shape {' and '.join(SIZES)}")
    return args


def main() -> None:
    args = parse_args()
    if not ON_GPU:
        raise SystemExit("error: times are those of a GPU, and there is none")
    what = "A layer as a step has it, several in one CUDA graph: retrieval beside stock attention."
    report = head_of(what, "benchmarks.ops.retrieval_step", args.commit)
    bandwidth = bytes_per_us(torch.cuda.get_device_name())
    report |= {"shape": args.shape, "budget": args.budget, "bytes_per_us": bandwidth, "cases": {}}
    report["with_rest"] = args.with_rest
    sizes = SIZES[args.shape] if args.with_rest else None
    for each in args.cases:
        shape, only = SHAPES[args.shape], args.only
        found = case(shape, each, args.budget, args.repeats, bandwidth, only, sizes)
        report["cases"][each.name] = found
        print(each.name, json.dumps({k: v["us"] for k, v in found.items() if isinstance(v, dict)}))
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
