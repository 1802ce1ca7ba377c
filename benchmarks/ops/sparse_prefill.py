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
estimates (see ``prefill_blocks``), the cover, and lists and block tables, in plain torch. `--dry`
tries everything at tiny sizes, also on a CPU.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.ops.prefill_blocks import (
    Setting,
    attend,
    causal_blocks,
    cover,
    estimate,
    one_bit_keys,
    read_blocks,
)
from benchmarks.ops.sparse_prefill_triton import Tiles, attend_blocks, listed
from vllm_kvx.ops.paged import PagedKV

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BLOCK, CHUNK = 128, 8192
TILES = (
    Tiles(),
    Tiles(stages=2),
    Tiles(warps=8),
    Tiles(keys=128, warps=8, stages=2),
    Tiles(queries=64, warps=8),
)
COSTS = (
    "antidiagonal:cover=0.95,stride=16",
    "antidiagonal:cover=0.95,stride=8",
    "pooled:cover=0.95",
    "pooled:cover=0.95,pool=16",
    "one_bit:cover=0.95",
    "one_bit:cover=0.95,by=max",
)
Call = Callable[[], Any]
Line = dict[str, Any]


class Layer:
    """One request's queries and paged cache.

    query: (N, H, D). paged: its entries, `table` (pages,) int32 in random order.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, length: int, page: int) -> None:
        self.length, self.page, self.scaling = length, page, dim**-0.5
        pages = -(-length // page)
        # As FlashAttention's cache lies in memory: the heads of an entry side by side.
        cache = torch.randn(pages, page, kv_heads, 2 * dim, dtype=DTYPE, device=DEVICE)
        self.paged = PagedKV.of(cache.transpose(1, 2), dim)
        self.table = torch.randperm(pages, device=DEVICE).int()
        self.query = torch.randn(length, heads, dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.query)

    @property
    def kv_heads(self) -> int:
        return self.paged.num_heads

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.length, size):
            yield first, min(first + size, self.length)


def random_reads(layer: Layer, first: int, end: int, share: float) -> Tensor:
    """(G, Q, K) bool: of the blocks that each block of queries sees, the share, rounded up.

    The first and the queries' own are among them, so the least is two.
    """
    blocks, seen = -(-(end - first) // BLOCK), -(-end // BLOCK)
    own = first // BLOCK + torch.arange(blocks, device=DEVICE)[:, None]
    index = torch.arange(seen, device=DEVICE)
    chance = torch.rand(layer.kv_heads, blocks, seen, device=DEVICE)
    chance.masked_fill_((index == 0) | (index == own), 2).masked_fill_(index > own, -1)
    counts = (share * (own + 1)).ceil().clamp(min=2).long().minimum(own + 1)
    return chance.argsort(dim=-1, descending=True).argsort(dim=-1) < counts


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lens: Tensor,
    longest: tuple[int, int],
    out: Tensor,
    splits: int = 1,
) -> None:
    """vLLM's paged FlashAttention 3; on a CPU, for the dry run, what it computes.

    query, out: (rows, H, D), sequences one after the other, from `starts` (S + 1,) int32.
    keys, values: (pages, page, G, D). table: (S, pages) int32. lens: (S,) int32, keys of each
    sequence; the last query sees all of them. longest: the most queries and keys of a sequence.
    splits: parts of a sequence's keys; 0 leaves them to FlashAttention, as vLLM does.
    """
    scaling = query.shape[-1] ** -0.5
    if not ON_GPU:
        for s, length in enumerate(lens.tolist()):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            tokens = torch.arange(length)
            pages = table[s, tokens // keys.shape[1]].long()
            k, v = (x[pages, tokens % keys.shape[1]].transpose(0, 1) for x in (keys, values))
            q = query[rows].transpose(0, 1)
            k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
            own = length - q.shape[1] + torch.arange(q.shape[1])[:, None]
            logits = (q @ k.mT * scaling).masked_fill(tokens > own, -torch.inf)
            out[rows] = (logits.softmax(dim=-1) @ v).transpose(0, 1)
        return
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=longest[0],
        seqused_k=lens,
        max_seqlen_k=longest[1],
        softmax_scale=scaling,
        causal=True,
        block_table=table,
        num_splits=splits,
        fa_version=3,
    )


def dense(layer: Layer, size: int) -> Call:
    """All chunks of `size` queries, as vLLM calls it."""
    keys, values = (x.transpose(1, 2) for x in (layer.paged.keys, layer.paged.values))
    parts = [
        (slice(first, end), _int([0, end - first]), _int([end]), (end - first, end))
        for first, end in layer.chunks(size)
    ]

    def run() -> None:
        for rows, starts, lens, longest in parts:
            query, out = layer.query[rows], layer.out[rows]
            flash(query, keys, values, layer.table[None], starts, lens, longest, out, splits=0)

    return run


def tables_of(layer: Layer, chosen: Tensor, one: bool) -> Tensor:
    """(G, Q, pages) int32: the pages of lists (G, Q, most) of blocks.

    one: as pages of `overlapping`.
    """
    each = BLOCK // layer.page
    index = (chosen[..., None] * each + torch.arange(each, device=DEVICE)).flatten(2)
    # A last block may have fewer pages; they are not read.
    pages = layer.table[index.clamp_(max=len(layer.table) - 1)]
    if one:
        keys = layer.paged.keys
        heads = torch.arange(layer.kv_heads, device=DEVICE, dtype=torch.int32)
        pages = pages * (keys.stride(0) // keys.stride(1)) + heads[:, None, None]
    return pages


def overlapping(cache: Tensor) -> Tensor:
    """Keys or values (blocks, G, page, D) as (n, page, 1, D): one head's pages, which overlap.

    That of block b and head g is the one with number b * (stride of blocks / stride of heads) + g.
    """
    blocks, heads, page, dim = cache.shape
    step = cache.stride(1)
    assert cache.stride(0) % step == 0, "a block's bytes are no multiple of an entry's"
    count = (blocks - 1) * (cache.stride(0) // step) + heads
    shape, strides = (count, page, 1, dim), (step, cache.stride(2), step, 1)
    return cache.as_strided(shape, strides, cache.storage_offset())


def sparse_flash(layer: Layer, parts: list[Line], one: bool) -> Call:
    """FlashAttention over the blocks that are read; tables are made before."""
    kv_heads = layer.kv_heads
    each = layer.query.shape[1] // kv_heads
    prepared: list[tuple[Any, ...]] = []
    for part in parts:
        rows, tables = part["rows"], tables_of(layer, part["chosen"], one)
        count = rows.stop - rows.start
        begins = torch.arange(0, count, BLOCK, device=DEVICE)
        own = (count - begins).clamp(max=BLOCK)
        lens = ((part["counts"] - 1) * BLOCK + own).int()
        longest = BLOCK, int(lens.max())
        if one:
            heads = torch.arange(kv_heads, device=DEVICE)[:, None] * count
            starts = torch.cat([(heads + begins).flatten(), _int([kv_heads * count])]).int()
            prepared.append((rows, tables.flatten(0, 1), lens.flatten(), starts, longest))
        else:
            starts = torch.cat([begins, _int([count])]).int()
            prepared.append((rows, tables, lens, starts, longest))
    of_heads = [x.transpose(1, 2) for x in (layer.paged.keys, layer.paged.values)]
    of_one = [overlapping(x) for x in (layer.paged.keys, layer.paged.values)]

    def run_heads() -> None:
        keys, values = of_heads
        for rows, tables, lens, starts, longest in prepared:
            for g in range(kv_heads):
                mine = slice(g * each, (g + 1) * each)
                query, out = layer.query[rows, mine], layer.out[rows, mine]
                k, v = keys[:, :, g : g + 1], values[:, :, g : g + 1]
                flash(query, k, v, tables[g], starts, lens[g], longest, out)

    def run_one() -> None:
        for rows, tables, lens, starts, longest in prepared:
            query = layer.query[rows].unflatten(1, (kv_heads, each)).transpose(0, 1)
            query = query.flatten(0, 1)  # A copy.
            out = torch.empty_like(query)
            flash(query, *of_one, tables, starts, lens, longest, out)
            back = out.unflatten(0, (kv_heads, -1)).transpose(0, 1)
            layer.out[rows].unflatten(1, (kv_heads, each)).copy_(back)

    return run_one if one else run_heads


def sparse_triton(layer: Layer, parts: list[Line], tiles: Tiles) -> Call:
    def run() -> None:
        for part in parts:
            rows = part["rows"]
            attend_blocks(
                layer.query[rows],
                layer.paged,
                layer.table,
                part["chosen"],
                part["counts"],
                rows.start,
                BLOCK,
                tiles,
                layer.out[rows],
            )

    return run


def parts_of(layer: Layer, size: int, share: float) -> list[Line]:
    """By chunk its rows, and what they read: see `listed`."""
    parts = []
    for first, end in layer.chunks(size):
        reads = random_reads(layer, first, end, share)
        chosen, counts = listed(reads)
        found = causal_blocks(reads, first, end, Setting("dense"))
        parts.append(
            {"rows": slice(first, end), "chosen": chosen, "counts": counts, "found": found}
        )
    return parts


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


def errors(shape: tuple[int, int, int], page: int, tiles: tuple[Tiles, ...]) -> list[Line]:
    """How far each way is from masked attention, over several chunks and a short last block."""
    layer = Layer(*shape, 5 * BLOCK + 77, page)
    dense_parts = [
        x(layer.table, layer.length) for x in (layer.paged.dense_keys, layer.paged.dense_values)
    ]
    found = []
    for size in (2 * BLOCK, 1 << 30):
        parts = parts_of(layer, size, 0.5)
        expected = torch.empty_like(layer.out)
        for part in parts:
            rows = part["rows"]
            index = torch.arange(-(-rows.stop // BLOCK), device=DEVICE)
            live = torch.arange(part["chosen"].shape[-1], device=DEVICE) < part["counts"][..., None]
            reads = ((part["chosen"][..., None] == index) & live[..., None]).any(dim=2)
            query = layer.query[rows].transpose(0, 1)
            k, v = (x[:, : rows.stop] for x in dense_parts)
            of_part = attend(query, k, v, reads, rows.start, layer.scaling, Setting("dense"))
            expected[rows] = of_part.transpose(0, 1)
        ways: dict[str, Call] = {
            "fa3 heads": sparse_flash(layer, parts, one=False),
            "fa3 one": sparse_flash(layer, parts, one=True),
        } | {f"triton {each}": sparse_triton(layer, parts, each) for each in tiles}
        for name, run in ways.items():
            layer.out.fill_(torch.nan)
            line: Line = {"page": page, "way": name, "chunk": min(size, layer.length)}
            try:
                run()
                off = (layer.out.float() - expected.float()).abs().max()
                found.append(line | {"off_by": float(off)})
            except Exception as error:
                found.append(line | {"error": str(error).splitlines()[0]})
    return found


def cases(shape: tuple[int, int, int], args: argparse.Namespace, tiles: Tiles) -> Iterator[Line]:
    """A line for each length, page, chunk, share and way."""
    for length in args.lengths:
        for page in args.pages:
            layer = Layer(*shape, length, page)
            for size in (args.chunk, length):
                head = {"length": length, "page": page, "chunk": size}
                base = timed(head | {"way": "fa3 dense"}, lambda: dense(layer, size), args.repeats)
                yield base
                for share in args.shares:
                    parts = parts_of(layer, size, share)
                    read, causal = (sum(part["found"][i] for part in parts) for i in (0, 1))
                    ways: dict[str, Callable[[], Call]] = {
                        "fa3 heads": lambda: sparse_flash(layer, parts, one=False),
                        "fa3 one": lambda: sparse_flash(layer, parts, one=True),
                    }
                    ways["triton"] = lambda: sparse_triton(layer, parts, tiles)
                    for name, make in ways.items():
                        line = head | {"asked": share, "share": round(read / causal, 4)}
                        line = timed(line | {"way": name}, make, args.repeats)
                        if "ms" in line and "ms" in base:
                            line["to_dense"] = round(line["ms"] / base["ms"], 4)
                            line["ideal_ms"] = round(base["ms"] * read / causal, 3)
                        yield line


def tile_times(
    shape: tuple[int, int, int], args: argparse.Namespace, tiles: tuple[Tiles, ...]
) -> list[Line]:
    """Triton's ways to cut the work at the first length and page and the last share."""
    layer = Layer(*shape, args.lengths[0], args.pages[0])
    parts = parts_of(layer, args.chunk, args.shares[-1])
    return [
        timed({"tiles": vars(each)}, lambda each=each: sparse_triton(layer, parts, each), 5)
        for each in tiles
    ]


def costs(shape: tuple[int, int, int], args: argparse.Namespace) -> Iterator[Line]:
    """What choosing costs, chunk by chunk, over all chunks of a prompt; and of tables."""
    heads, kv_heads, dim = shape
    for length in args.lengths:
        layer = Layer(*shape, length, args.pages[0])
        query = layer.query.transpose(0, 1).contiguous()
        keys = layer.paged.dense_keys(layer.table, length).contiguous()
        codes = one_bit_keys(keys)
        chunks = list(layer.chunks(args.chunk))
        for text in args.costs:
            setting = Setting.parse(text)
            shares: dict[int, Tensor] = {}
            reads: dict[int, Tensor] = {}
            chosen: dict[int, Tensor] = {}

            def estimates() -> None:
                for first, end in chunks:
                    part, seen = query[:, first:end], keys[:, :end]
                    shares[first] = estimate(part, seen, codes, first, layer.scaling, setting)

            def covers() -> None:
                for first, end in chunks:
                    reads[first] = cover(shares[first], kv_heads, first, end, setting)

            def lists() -> None:
                for first, _ in chunks:
                    chosen[first] = listed(reads[first])[0]

            def tables() -> None:
                for first, _ in chunks:
                    tables_of(layer, chosen[first], one=True)

            line: Line = {"length": length, "setting": text}
            for name, call in (
                ("estimate", estimates),
                ("cover", covers),
                ("lists", lists),
                ("tables", tables),
            ):
                one = timed({}, lambda call=call: call, args.repeats)
                line |= {f"{name}_{key}": value for key, value in one.items()}
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


def _int(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--lengths", type=int, nargs="+", default=[32768, 65536, 130_000])
    add("--pages", type=int, nargs="+", default=[16, 32, 128])
    add("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.3, 0.2, 0.1])
    add("--costs", nargs="+", default=COSTS, help="settings whose choice is timed")
    add("--chunk", type=int, default=CHUNK)
    add("--repeats", type=int, default=3)
    add("--dry", action="store_true", help="tiny sizes, also on a CPU")
    add("--time-limit", type=float, default=400, help="seconds; what is left is not timed")
    add("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args(argv)
    if not (ON_GPU or args.dry):
        parser.error("times are those of a GPU, and there is none")
    shape, tiles = (32, 8, 128), TILES
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
        "errors": [line for page in args.pages for line in errors(shape, page, tiles)],
        "tiles": tile_times(shape, args, tiles),
        "costs": [],
        "lines": [],
    }
    for line in (*content["errors"], *content["tiles"]):
        print(json.dumps(line), flush=True)
    best = min(content["tiles"], key=lambda line: line.get("ms", float("inf")))
    fastest = Tiles(**best["tiles"])
    for name, lines in (("costs", costs(shape, args)), ("lines", cases(shape, args, fastest))):
        for line in lines:
            content[name].append(line)
            print(json.dumps(line), flush=True)
            write_json(args.output, content)
            if time.monotonic() > deadline:
                content["cut_off"] = True
                break
    write_json(args.output, content)
    print(table(content["lines"]))


if __name__ == "__main__":
    main(sys.argv[1:])
