"""How fast attention of prefill is that reads chosen blocks of keys, against FlashAttention's.

    python -m benchmarks.ops.sparse_prefill --output NAME.json

One layer of Llama-3.1-8B's shape in bfloat16 over a paged cache as vLLM lays it out, in chunks of
8,192 queries as vLLM prefills, and whole. A share of the blocks of 128 keys is read by each block
of 128 queries and KV head: the first one, its own, and random others.

- `fa3 heads`: paged FlashAttention 3, where a block of queries is a sequence whose block table
  lists the pages that it reads; a launch for each KV head.
- `fa3 one`: the same in one launch. The cache is viewed as overlapping pages of one head, the first
  of which begins at each entry of each head; queries are copied in order of their KV head, and
  their outputs back.
- `triton`: ``sparse_prefill_triton``.

`ideal` is the dense time by the products that are left. Also what it costs to choose the blocks:
estimates (see ``prefill_blocks``) in torch, by 1-bit keys in Triton, too; the cover; and lists and
block tables. `--dry` tries everything at tiny sizes, also on a CPU.
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
from benchmarks.ops.prefill_blocks import Setting, attend, cover, estimate, one_bit_keys
from benchmarks.ops.prefill_scores_triton import one_bit_shares
from benchmarks.ops.sparse_prefill_triton import Tiles, listed
from benchmarks.ops.sparse_prefill_ways import (
    BLOCK,
    DEVICE,
    ON_GPU,
    Call,
    Layer,
    Part,
    dense,
    parts_of,
    sparse_flash,
    sparse_triton,
    tables_of,
)

CHUNK = 8192
WAYS = ("fa3 heads", "fa3 one", "triton")
TILES = (
    Tiles(),
    Tiles(warps=4),
    Tiles(keys=128),
    Tiles(queries=64),
    Tiles(queries=64, keys=128),
)
COSTS = (
    "antidiagonal:cover=0.95,stride=16",
    "antidiagonal:cover=0.95,stride=8",
    "pooled:cover=0.95",
    "pooled:cover=0.95,pool=16",
    "one_bit:cover=0.95",
    "one_bit:cover=0.95,by=max",
)
Line = dict[str, Any]
Shape = tuple[int, int, int]


def milliseconds(call: Call, repeats: int) -> float:
    """The median, by the device's clock where there is one."""
    call()
    samples = []
    for _ in range(repeats):
        if ON_GPU:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            samples.append(first.elapsed_time(last))
        else:
            began = time.perf_counter()
            call()
            samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


def timed(line: Line, call: Callable[[], Call], repeats: int) -> Line:
    """The line with its time, or with what went wrong."""
    try:
        return line | {"ms": round(milliseconds(call(), repeats), 3)}
    except Exception as error:  # Such as: out of memory, or a shape that a kernel does not take.
        return line | {"error": str(error).splitlines()[0]}


def expected(layer: Layer, parts: Sequence[Part]) -> Tensor:
    """What every way has to write: (N, H, D), by masked attention."""
    keys, values = (
        of(layer.table, layer.length) for of in (layer.paged.dense_keys, layer.paged.dense_values)
    )
    out = torch.empty_like(layer.out)
    for part in parts:
        first, end = part.rows.start, part.rows.stop
        index = torch.arange(-(-end // BLOCK), device=DEVICE)
        live = torch.arange(part.chosen.shape[-1], device=DEVICE) < part.counts[..., None]
        reads = ((part.chosen[..., None] == index) & live[..., None]).any(dim=2)
        query = layer.query[part.rows].transpose(0, 1)
        found = attend(
            query, keys[:, :end], values[:, :end], reads, first, layer.scaling, Setting("dense")
        )
        out[part.rows] = found.transpose(0, 1)
    return out


def errors(
    shape: Shape, page: int, tiles: Sequence[Tiles], names: tuple[str, ...]
) -> Iterator[Line]:
    """How far these ways are from masked attention, over chunks and with a short last block."""
    layer = Layer(*shape, 3 * BLOCK + 77, page)
    for size in (2 * BLOCK, 4 * BLOCK):
        parts = parts_of(layer, size, 0.5)
        right = expected(layer, parts).float()
        ways = {f"triton {vars(each)}": sparse_triton(layer, parts, each) for each in tiles}
        ways["fa3 heads"] = sparse_flash(layer, parts, one=False)
        ways["fa3 one"] = sparse_flash(layer, parts, one=True)
        for name, run in ways.items():
            if not name.startswith(names):
                continue
            line: Line = {"page": page, "way": name, "chunk": size}
            layer.out.fill_(torch.nan)
            try:
                run()
                line["off_by"] = float((layer.out.float() - right).abs().max())
            except Exception as error:
                line["error"] = str(error).splitlines()[0]
            yield line


def tile_times(shape: Shape, args: argparse.Namespace, tiles: Sequence[Tiles]) -> Iterator[Line]:
    """Triton's ways to cut the work, at the first length and page and the last share."""
    layer = Layer(*shape, args.lengths[0], args.pages[0])
    parts = parts_of(layer, args.chunk, args.shares[-1])
    for each in tiles:
        yield timed({"tiles": vars(each)}, partial(sparse_triton, layer, parts, each), 5)


def cases(shape: Shape, args: argparse.Namespace, tiles: Tiles) -> Iterator[Line]:
    """A line for each length, page, chunk, share and way."""
    for length in args.lengths:
        for page in args.pages:
            layer = Layer(*shape, length, page)
            for size in dict.fromkeys((args.chunk, length)):
                head = {"length": length, "page": page, "chunk": size}
                base = timed(head | {"way": "fa3 dense"}, partial(dense, layer, size), args.repeats)
                yield base
                for share in args.shares:
                    yield from shared(layer, size, share, base, tiles, args)


def shared(
    layer: Layer, size: int, share: float, base: Line, tiles: Tiles, args: argparse.Namespace
) -> Iterator[Line]:
    """A line for each way at one share; base: that of dense attention."""
    parts = parts_of(layer, size, share)
    found = sum(part.read for part in parts) / sum(part.causal for part in parts)
    ways: dict[str, Callable[[], Call]] = {
        "fa3 heads": partial(sparse_flash, layer, parts, one=False),
        "fa3 one": partial(sparse_flash, layer, parts, one=True),
        "triton": partial(sparse_triton, layer, parts, tiles),
    }
    for name in args.ways:
        line = {key: base[key] for key in ("length", "page", "chunk")}
        line |= {"way": name, "asked": share, "share": round(found, 4)}
        line = timed(line, ways[name], args.repeats)
        if "ms" in line and "ms" in base:
            line["to_dense"] = round(line["ms"] / base["ms"], 4)
            line["ideal_ms"] = round(base["ms"] * found, 3)
        yield line


class Choice:
    """The steps of choosing blocks, for all of a prompt's chunks, by one setting.

    fused: whether estimates by 1-bit keys are made in Triton.
    """

    def __init__(self, layer: Layer, size: int, setting: Setting, fused: bool = False) -> None:
        self.layer, self.setting, self.fused = layer, setting, fused
        self.chunks = list(layer.chunks(size))
        self.query = layer.query.transpose(0, 1).contiguous()
        self.keys = layer.paged.dense_keys(layer.table, layer.length).contiguous()
        self.codes = one_bit_keys(self.keys)
        self.shares: list[Tensor] = []
        self.reads: list[Tensor] = []
        self.lists: list[Tensor] = []

    def estimate(self) -> None:
        self.shares = []
        for first, end in self.chunks:
            query, codes = self.query[:, first:end], self.codes[:, :end]
            scaling, setting = self.layer.scaling, self.setting
            if self.fused:
                found = one_bit_shares(query, codes, first, scaling, setting)
            else:
                found = estimate(query, self.keys[:, :end], codes, first, scaling, setting)
            self.shares.append(found)

    def cover(self) -> None:
        self.reads = [
            cover(shares, len(self.keys), first, end, self.setting)
            for shares, (first, end) in zip(self.shares, self.chunks, strict=True)
        ]

    def list_blocks(self) -> None:
        self.lists = [listed(reads)[0] for reads in self.reads]

    def make_tables(self) -> None:
        for lists in self.lists:
            tables_of(self.layer, lists, one=True)


def costs(shape: Shape, args: argparse.Namespace) -> Iterator[Line]:
    """What the steps of choosing cost, over all chunks of a prompt."""
    for length in args.lengths:
        layer = Layer(*shape, length, args.pages[0])
        settings = [(text, Setting.parse(text)) for text in args.costs]
        every = [(text, setting, False) for text, setting in settings]
        every += [
            (text, setting, True) for text, setting in settings if setting.method == "one_bit"
        ]
        for text, setting, fused in every:
            choice = Choice(layer, args.chunk, setting, fused)
            line: Line = {"length": length, "setting": text, "way": "triton" if fused else "torch"}
            for step in (choice.estimate, choice.cover, choice.list_blocks, choice.make_tables):
                one = timed({}, lambda step=step: step, args.repeats)  # type: ignore[misc]
                line |= {f"{step.__name__}_{key}": value for key, value in one.items()}
                if "error" in one:
                    break
            yield line


def table(lines: list[Line]) -> str:
    """Markdown: milliseconds by way and share."""
    rows = ["| length | page | chunk | way | share | ms | to dense | ideal ms |", "|---" * 8 + "|"]
    for line in lines:
        found = f"{line['ms']:.2f}" if "ms" in line else line["error"][:60]
        cells = [line["length"], line["page"], line["chunk"], line["way"], line.get("share", 1.0)]
        cells += [found, line.get("to_dense", "-"), line.get("ideal_ms", "-")]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--lengths", type=int, nargs="+", default=[32768, 65536, 130_000])
    add("--pages", type=int, nargs="+", default=[16, 32, 128])
    add("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.3, 0.2, 0.1])
    add("--costs", nargs="+", default=COSTS, help="settings whose choice is timed")
    add("--chunk", type=int, default=CHUNK)
    add("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
    add("--repeats", type=int, default=3)
    add("--dry", action="store_true", help="tiny sizes, also on a CPU")
    add("--time-limit", type=float, default=400, help="seconds; what is left is not timed")
    add("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args(argv)
    if not (ON_GPU or args.dry):
        parser.error("times are those of a GPU, and there is none")
    shape: Shape = (32, 8, 128)
    tiles: Sequence[Tiles] = TILES
    if args.dry:
        shape, tiles = (4, 2, 16), TILES[:1]
        args.lengths, args.pages, args.shares, args.chunk = [300], [16], [0.5], 256
        args.repeats = 1
    deadline = time.monotonic() + args.time_limit
    torch.manual_seed(0)
    content: Line = {
        "about": about(
            "Attention of prefill over chosen blocks of keys, and what choosing costs, by share.",
            command_line("benchmarks.ops.sparse_prefill", argv),
            args.commit,
            ("triton",),
        ),
        "shape": dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True)),
        "block": BLOCK,
        "cut_off": False,
        "errors": [],
        "tiles": [],
        "costs": [],
        "cases": [],
    }

    def add_lines(name: str, lines: Iterator[Line]) -> None:
        for line in lines:
            content[name].append(line)
            print(json.dumps(line), flush=True)
            write_json(args.output, content)
            if time.monotonic() > deadline:
                content["cut_off"] = True
                break

    for page in args.pages:
        # Each of Triton's tiles takes seconds to compile, for each page.
        some = tiles if page == args.pages[0] else tiles[:1]
        add_lines("errors", errors(shape, page, some, tuple(args.ways)))
    add_lines("tiles", tile_times(shape, args, tiles))
    best = min(content["tiles"], key=lambda line: line.get("ms", float("inf")))
    add_lines("costs", costs(shape, args))
    add_lines("cases", cases(shape, args, Tiles(**best["tiles"])))
    write_json(args.output, content)
    print(table(content["cases"]))


if __name__ == "__main__":
    main(sys.argv[1:])
