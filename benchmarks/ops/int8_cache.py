"""What a cache in 8 bits costs a layer that retrieves: store, prefill, decode, bytes, errors.

    python -m benchmarks.ops.int8_cache --output NAME.json

One layer of Llama-3.1-8B's shape in bfloat16 against the same in 8 bits with a scale for each token
and KV head, in two layouts, beside FIER's 1-bit keys (``int8_pages``).

- `store`: a chunk's keys and values into pages, by vLLM's kernels, and the 1-bit codes; both in
  one kernel.
- `prefill`: a chunk over an earlier context. In 8 bits the context is undone into scratch of 16
  bits, whole or by slices whose attention is merged; then FlashAttention 3 reads it. Short chunks
  share the undoing of a long context among few queries. vLLM's Triton attention needs none. `lost`
  is the share of time lost to FlashAttention 3 over pages of 16 bits: the median over turns in
  which every way runs once. `ideal_ms` is that one's time and the bytes of undoing and merging.
- `decode`: attention over chosen entries by the Triton and the CUDA op, 16 bits and 8; and over all
  entries, as layers read that do not retrieve. `us` is a CUDA graph's time by its calls, none
  of which reads what an earlier one left in L2.
- `accuracy`: outputs over 8 bits against 16 bits, by kind of keys (``int8_accuracy``).
- `token_bytes`: of each layout, so how many more tokens a pool holds.
- `checks`: how far each kernel is from its reference at a small size.

A way that fails has its error in its line. `--dry` tries everything at tiny sizes, also on a CPU,
where plain torch stands for FlashAttention and Triton's interpreter runs the kernels.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.ops import int8_accuracy
from benchmarks.ops.int8_checks import checks
from benchmarks.ops.int8_decode_ways import Step
from benchmarks.ops.int8_pages import (
    LAYOUTS,
    code_writer,
    copied,
    entry_bytes,
    slots_of,
    stored_16_bits,
    token_bytes,
)
from benchmarks.ops.int8_prefill_ways import Prefill, Way
from benchmarks.ops.int8_store_triton import store_with_codes
from benchmarks.ops.retrieval_layer import (
    GROUP,
    INDEX,
    LLAMA_8B,
    ON_GPU,
    Call,
    Heads,
    Layer,
    measure,
    run_all,
)
from benchmarks.ops.retrieval_step import Case
from benchmarks.ops.saliency import bytes_per_us
from vllm_kvx.ops.int8.store import store_in_triton as store

PARTS = ("checks", "prefill", "store", "accuracy", "decode")
CASES = ("1x130000", "6x130000", "12x32768", "24x32768")
# Programs that share attention over chosen entries; the fastest counts.
PROGRAMS = (256, 512, 1024) if ON_GPU else (16,)
# Clocks that a GPU waits before it is timed, about a millisecond: the host is to be ahead of it, as
# in a server, where it queues the layers of a step one after the other.
WAIT = 2_000_000
# What is read before anything is read again: several times what a GPU's L2 holds.
UNSEEN_BYTES = 200 << 20
DRY = Heads(4, 2, 32)
Line = dict[str, Any]


def what_went_wrong(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def in_turns(ways: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each way in each turn, by the device's clock where there is one."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            if ON_GPU:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(WAIT)
                first.record()
                run()
                last.record()
                torch.cuda.synchronize()
                samples[name].append(first.elapsed_time(last))
            else:
                began = time.perf_counter()
                run()
                samples[name].append((time.perf_counter() - began) * 1e3)
    return samples


def prefill(shape: Heads, args: argparse.Namespace, bandwidth: float) -> Iterator[Line]:
    """A line for each context, chunk and way."""
    pairs = [(context, args.chunk) for context in args.contexts]
    pairs += [(args.contexts[-1], chunk) for chunk in args.short_chunks]
    for context, chunk in pairs:
        head = {"context": context, "chunk": chunk}
        try:
            made = Prefill(shape, context, chunk)
        except Exception as error:  # Such as: out of memory.
            yield head | {"error": what_went_wrong(error)}
            continue
        ways: dict[str, Callable[[], Way]] = {
            "16 bits": made.stock,
            "16 bits, contiguous": made.contiguous,
        }
        for layout in LAYOUTS:
            ways[f"whole, {layout}"] = partial(made.whole, layout)
            ways[f"undoing alone, {layout}"] = partial(made.undoing, layout)
            ways[f"vLLM's Triton, {layout}"] = partial(made.unified, layout)
        ways["whole, apart, by table"] = partial(made.whole, "apart", by_table=True)
        ways["whole, apart, own exact"] = partial(made.whole, "apart", own="exact")
        for size in args.slices if context else ():
            ways[f"slices of {size}, apart"] = partial(made.sliced, "apart", size)
        yield from timed_ways(head, ways, args.repeats, bandwidth)
        del made, ways
        free()


def timed_ways(
    head: Line, ways: dict[str, Callable[[], Way]], repeats: int, bandwidth: float
) -> Iterator[Line]:
    """What `prefill` says of these; of them `16 bits` is what the others are held against."""
    ready: dict[str, Way] = {}
    for name, make in ways.items():
        try:
            way = make()
            way.run()
            if ON_GPU:
                torch.cuda.synchronize()
            ready[name] = way
        except Exception as error:
            yield head | {"way": name, "error": what_went_wrong(error)}
    samples = in_turns({name: way.run for name, way in ready.items()}, repeats)
    base = samples.get("16 bits")
    for name, ms in samples.items():
        way = ready[name]
        line = head | {"way": name, "ms": round(statistics.median(ms), 4)}
        line["range_ms"] = [round(min(ms), 4), round(max(ms), 4)]
        line |= {"scratch_bytes": way.scratch, "moved_bytes": way.moved}
        ideal = way.moved / bandwidth / 1e3
        if base is not None and "alone" not in name:
            ideal += statistics.median(base)
            ratios = (mine / stock for mine, stock in zip(ms, base, strict=True))
            line["lost"] = round(statistics.median(ratios) - 1, 4)
        yield line | {"ideal_ms": round(ideal, 4)}


def decode(shape: Heads, args: argparse.Namespace, bandwidth: float) -> Iterator[Line]:
    """A line for each case, budget and way, and for each way to read all entries."""
    for case in args.cases:
        try:
            of_layer = case.batch * case.length * shape.kv_heads * 4 * shape.head_dim
            step = Step(shape, case.length, case.batch, 4 if of_layer < 1 << 30 else 2)
        except Exception as error:
            yield {"case": case.name, "error": what_went_wrong(error)}
            continue
        for budget in args.budgets:
            yield from chosen(step, case.name, budget, args.repeats, bandwidth)
        yield from everything(step, case.name, args.repeats, bandwidth)
        del step
        free()


def chosen(step: Step, case: str, budget: int, repeats: int, bandwidth: float) -> Iterator[Line]:
    """Attention over chosen entries: each call reads others."""
    count = max(2, int(UNSEEN_BYTES // step.bytes_of("apart", budget)[0])) if ON_GPU else 1
    picked = step.selections(budget, count)
    pairs = [(step.tables[i % len(step.tables)], indices) for i, indices in enumerate(picked)]

    def calls(of: Callable[[Tensor, Tensor], Call]) -> list[Call]:
        return [of(table, indices) for table, indices in pairs]

    ways: dict[str, tuple[str, Callable[[], list[Call]]]] = {}
    for programs in PROGRAMS:
        name = f"{programs} programs"
        of_16 = partial(step.chosen, "16 bits", programs=programs)
        ways[f"16 bits, Triton, {name}"] = "16 bits", partial(calls, of_16)
        for layout in LAYOUTS:
            of_8 = partial(step.chosen, layout, programs=programs)
            ways[f"8 bits, {layout}, Triton, {name}"] = layout, partial(calls, of_8)
    ways["16 bits, CUDA"] = "16 bits", lambda: calls(step.in_cuda("16 bits", budget))
    ways["8 bits, apart, CUDA"] = "apart", lambda: calls(step.in_cuda("apart", budget))
    for name, (layout, make) in ways.items():
        line = {"case": case, "budget": budget, "way": name, "calls": count}
        yield per_call(line, make, repeats, *step.bytes_of(layout, budget), bandwidth)


def everything(step: Step, case: str, repeats: int, bandwidth: float) -> Iterator[Line]:
    """Attention over all entries: each call reads another layer's."""
    ways: dict[str, tuple[str, Callable[[Tensor], Call]]] = {
        "16 bits, FlashAttention": ("16 bits", step.stock),
        "16 bits, vLLM's Triton": ("16 bits", partial(step.unified, "16 bits")),
    }
    for layout in LAYOUTS:
        ways[f"8 bits, {layout}, vLLM's Triton"] = layout, partial(step.unified, layout)
    for programs in PROGRAMS:
        every = partial(step.all_of, "apart", programs=programs)
        ways[f"8 bits, apart, ours, {programs} programs"] = "apart", every
    for layout in ("16 bits", "apart"):
        bits = "8 bits, apart" if layout == "apart" else layout
        ways[f"{bits}, ours, CUDA"] = layout, partial(step.all_in_cuda, layout)
    for name, (layout, of) in ways.items():
        line = {"case": case, "budget": "all", "way": name, "calls": len(step.tables)}
        moved, _ = step.bytes_of(layout, step.length)

        def make(of: Callable[[Tensor], Call] = of) -> list[Call]:
            return [of(table) for table in step.tables]

        yield per_call(line, make, repeats, moved, moved, bandwidth)


def per_call(
    line: Line,
    make: Callable[[], list[Call]],
    repeats: int,
    asked: float,
    sectors: float,
    bandwidth: float,
) -> Line:
    """The line with microseconds of a call, and the bytes that it asks for and that move."""
    line |= {"bytes": int(asked), "sector_bytes": int(sectors)}
    line |= {"ideal_us": round(asked / bandwidth, 2), "sectors_us": round(sectors / bandwidth, 2)}
    try:
        calls = make()
        us = min(measure(partial(run_all, calls), repeats) for _ in range(2)) / len(calls)
    except Exception as error:
        return line | {"error": what_went_wrong(error)}
    return line | {"us": round(us, 2), "of_bandwidth": round(asked / bandwidth / us, 3)}


def stores(shape: Heads, args: argparse.Namespace, bandwidth: float) -> Iterator[Line]:
    """A line for each number of tokens and way: a chunk's, and a decode step's."""
    try:
        layer = Layer(shape, args.chunk, 1)
        pages = {layout: copied(layer, layout) for layout in LAYOUTS}
    except Exception as error:
        yield {"error": what_went_wrong(error)}
        return
    table, of_all = layer.table[0], (layer.paged.dense_keys, layer.paged.dense_values)
    keys, values = (of(layer.table[0], args.chunk).transpose(0, 1).contiguous() for of in of_all)
    heads, groups = shape.kv_heads, args.chunk // GROUP
    code_bytes = INDEX.page_bytes(shape.page_shape) // shape.block_size
    # A token's numbers, as they come in; in 8 bits; its keys alone.
    whole, small = heads * layer.entry_bytes, heads * entry_bytes(shape.head_dim)
    for count in dict.fromkeys((args.chunk, 24, 1)):
        key, value = keys[:count], values[:count]
        slots = slots_of(table, shape.block_size, 0, count)
        ways: dict[str, tuple[Call, int]] = {
            "16 bits": (stored_16_bits(layer.paged, key, value, slots), 2 * whole)
        }
        for layout, to in pages.items():
            ways[f"8 bits, {layout}"] = partial(store, to.paged, key, value, slots), whole + small
        if count == args.chunk:
            ways["1-bit keys of 16 bits"] = codes_of_16_bits(layer), whole // 2 + code_bytes
            for layout, to in pages.items():
                codes = code_writer(to, table, 0, groups)
                ways[f"1-bit keys of 8 bits, {layout}"] = codes, small // 2 + code_bytes
                both = partial(store_with_codes, to, key, value, table, 0)
                ways[f"8 bits and 1-bit keys, {layout}"] = both, whole + small + code_bytes
        for name, (run, each) in ways.items():
            line = {"tokens": count, "way": name}
            moved = float(each * count)
            yield per_call(line, lambda run=run: [run], args.repeats, moved, moved, bandwidth)  # type: ignore[misc]


def codes_of_16_bits(layer: Layer) -> Call:
    """What writes the 1-bit keys of a layer's one request, as a server does."""
    groups = layer.length // GROUP
    if not ON_GPU:
        return partial(layer.write, 0, 0, groups)
    jobs = layer.jobs(0, 0, groups)
    return partial(layer.writer.write, jobs, layer.pointers, layer.strides)


def free() -> None:
    if ON_GPU:
        torch.cuda.empty_cache()


def table_of(content: Line) -> str:
    """Markdown: what prefill loses, and what decode takes."""
    rows = ["| context | chunk | way | ms | lost | ideal ms | scratch MB |", "|---" * 7 + "|"]
    for line in content["prefill"]:
        cells = [line.get("context", "-"), line.get("chunk", "-"), line.get("way", "-")]
        cells.append(line.get("ms", line.get("error")))
        cells += [line.get("lost", "-"), line.get("ideal_ms", "-")]
        cells.append(round(line.get("scratch_bytes", 0) / 1e6, 1))
        rows.append(f"| {' | '.join(map(str, cells))} |")
    rows += ["", "| case | entries | way | us | ideal us |", "|---" * 5 + "|"]
    for line in content["decode"]:
        cells = [line.get("case", "-"), line.get("budget", "-"), line.get("way", "-")]
        cells += [line.get("us", line.get("error")), line.get("ideal_us", "-")]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--contexts", type=int, nargs="+", default=[0, 24576, 57344, 122880])
    add("--chunk", type=int, default=8192, help="prompt tokens that are prefilled at once")
    add("--short-chunks", type=int, nargs="*", default=[2048, 512], help="over the last context")
    add("--slices", type=int, nargs="+", default=[8192, 32768], help="entries undone at a time")
    cases = [Case.of(name) for name in CASES]
    add("--cases", type=Case.of, nargs="+", default=cases, help="such as 6x130000")
    add("--budgets", type=int, nargs="+", default=[2048, 4096])
    add("--repeats", type=int, default=10)
    add("--dry", action="store_true", help="tiny sizes, also on a CPU")
    add("--time-limit", type=float, default=150, help="seconds; what is left is not measured")
    add("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args(argv)
    if args.chunk % GROUP:
        parser.error(
            f"--chunk {args.chunk}: give a multiple of {GROUP}, whole groups of 1-bit keys"
        )
    if args.dry:
        args.contexts, args.chunk, args.short_chunks, args.slices = [0, 96], 64, [32], [64]
        args.cases, args.budgets, args.repeats = [Case.of("2x70")], [32], 1
    return args


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    if not (ON_GPU or args.dry):
        raise SystemExit("error: times are those of a GPU, and there is none: try --dry")
    shape = DRY if args.dry else LLAMA_8B
    bandwidth = bytes_per_us(torch.cuda.get_device_name()) if ON_GPU else 1e6
    deadline = time.monotonic() + args.time_limit
    torch.manual_seed(0)
    content: Line = {
        "about": about(
            "A layer's cache in 8 bits against 16: store, prefill, decode, bytes and errors.",
            command_line("benchmarks.ops.int8_cache", argv),
            args.commit,
            ("triton",),
        ),
        "shape": str(shape),
        "block_size": shape.block_size,
        "bytes_per_us": bandwidth,
        "cut_off": False,
        "token_bytes": token_bytes(shape),
    }
    content |= {name: [] for name in PARTS}
    length, budget = (256, 64) if args.dry else (8192, 2048)
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "checks": partial(checks, shape),
        "prefill": partial(prefill, shape, args, bandwidth),
        "decode": partial(decode, shape, args, bandwidth),
        "store": partial(stores, shape, args, bandwidth),
        "accuracy": partial(int8_accuracy.lines, shape, length, budget),
    }
    for name in args.parts:
        if time.monotonic() > deadline:
            content["cut_off"] = True
            break
        try:
            for line in parts[name]():
                content[name].append(line)
                print(json.dumps(line), flush=True)
                write_json(args.output, content)
                if time.monotonic() > deadline:
                    content["cut_off"] = True
                    break
        except Exception as error:  # What no single way is to blame for; other parts go on.
            content[name].append({"error": what_went_wrong(error)})
        free()
    write_json(args.output, content)
    print(table_of(content))


if __name__ == "__main__":
    main(sys.argv[1:])
