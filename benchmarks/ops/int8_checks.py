"""How far the kernels over 8-bit pages are from plain torch, at a small size; ``int8_cache``."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.int8_decode_ways import Step
from benchmarks.ops.int8_pages import LAYOUTS, Int8Pages, code_writer, slots_of
from benchmarks.ops.int8_prefill_ways import Prefill, Way, attention
from benchmarks.ops.int8_store_triton import store_with_codes
from benchmarks.ops.retrieval_layer import DEVICE, DTYPE, GROUP, INDEX, ON_GPU, Call, Heads
from vllm_kvx.ops.int8.numbers import quantized
from vllm_kvx.ops.int8.store import store_in_triton as store
from vllm_kvx.ops.int8.undo import undo_in_torch
from vllm_kvx.ops.int8.undo import undo_in_triton as undo

Line = dict[str, Any]
_GROUPS, _PROGRAMS = 3, 8


def checks(shape: Heads) -> Iterator[Line]:
    """A line for each kernel and layout.

    off_by: the largest difference from the reference, of poisoned outputs; where numbers are
    stored, that of numbers of 8 bits, of which the nearest two may be as near. differ: share of
    1-bit codes that do.
    """
    for of in (stored, prefilled, decoded):
        yield from of(shape)


def guarded(line: Line, found: Callable[[], Line]) -> Line:
    try:
        return line | found()
    except Exception as error:  # Such as: a shape that a kernel does not take.
        return line | {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}


def off_by(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())


def stored(shape: Heads) -> Iterator[Line]:
    """Three groups in pages anywhere, the first page being another request's."""
    tokens = _GROUPS * GROUP
    blocks = tokens // shape.block_size
    size = tokens, shape.kv_heads, shape.head_dim
    key, value = (torch.randn(size, dtype=DTYPE, device=DEVICE) for _ in range(2))
    table = (torch.randperm(blocks, device=DEVICE) + 1).int()
    slots = slots_of(table, shape.block_size, 0, tokens)
    for layout in LAYOUTS:
        pages, other = (Int8Pages.empty(shape, blocks + 1, layout) for _ in range(2))
        line: Line = {"layout": layout}
        run: Call = partial(store, pages.paged, key, value, slots)
        yield guarded(
            line | {"check": "vLLM's store"}, partial(_store, run, pages, slots, (key, value))
        )
        run = partial(store_with_codes, other, key, value, table, 0)
        yield guarded(
            line | {"check": "one store"}, partial(_store, run, other, slots, (key, value))
        )
        run = code_writer(pages, table, 0, _GROUPS)
        yield guarded(line | {"check": "codes"}, partial(_codes, run, pages, table))
        yield guarded(line | {"check": "codes of one store"}, partial(_codes, None, other, table))
        yield guarded(line | {"check": "undo"}, partial(_undo, pages, table, tokens - 7))


def _store(run: Call, pages: Int8Pages, slots: Tensor, entries: tuple[Tensor, Tensor]) -> Line:
    run()
    paged = pages.paged
    at = slots // paged.block_size, slice(None), slots % paged.block_size
    assert paged.key_scales is not None and paged.value_scales is not None
    found = ((paged.keys, paged.key_scales), (paged.values, paged.value_scales))
    numbers = scales = 0.0
    for (of, of_scales), x in zip(found, entries, strict=True):
        right, right_scales = quantized(x)
        numbers = max(numbers, off_by(of[at], right))
        ratio = of_scales[at] / right_scales
        scales = max(scales, off_by(ratio, torch.ones_like(ratio)))
    beside = float(paged.keys[0].float().abs().max() + paged.values[0].float().abs().max())
    return {"off_by": numbers, "scales_off_by": scales, "beside": beside}


def _codes(run: Call | None, pages: Int8Pages, table: Tensor) -> Line:
    """What is there, or what `run` writes, against what the reference writes in its place."""
    if run is not None:
        run()
    signs, *found = pages.sidecar.dense(table, _GROUPS)
    INDEX.write_in_torch(pages.paged, pages.sidecar, table, 0, _GROUPS)
    right, *expected = pages.sidecar.dense(table, _GROUPS)
    assert signs is not None and right is not None
    differ = float((signs != right).float().mean())
    off = max(off_by(one, other) for one, other in zip(found, expected, strict=True))
    return {"off_by": off, "differ": differ}


def _undo(pages: Int8Pages, table: Tensor, end: int) -> Line:
    """Of entries that begin and end within a page."""
    first = 5
    size = end - first, pages.paged.num_heads, pages.paged.head_dim
    outputs = torch.full((4, *size), torch.nan, dtype=DTYPE, device=DEVICE)
    # Rounded once: both are the same number in 16 bits.
    ends = torch.tensor([0, end - first], dtype=torch.int32, device=DEVICE)
    where = pages.paged, table[None], first, ends, end - first
    undo_in_torch(*where, outputs[0], outputs[1])
    undo(*where, outputs[2], outputs[3])
    return {"off_by": off_by(outputs[2:], outputs[:2])}


def prefilled(shape: Heads) -> Iterator[Line]:
    """A chunk alone, and behind a context of which the last slice is short."""
    for context in (0, 3 * GROUP):
        made = Prefill(shape, context, 2 * GROUP)
        ways: dict[str, tuple[str, bool, Callable[[], Way]]] = {
            "16 bits": ("", True, made.stock),
            "16 bits, contiguous": ("", True, made.contiguous),
        }
        for layout in LAYOUTS:
            ways[f"whole, {layout}"] = layout, False, partial(made.whole, layout)
            sliced = partial(made.sliced, layout, 2 * GROUP)
            ways[f"slices, {layout}"] = layout, True, sliced
            ways[f"vLLM's Triton, {layout}"] = layout, False, partial(made.unified, layout)
        by_table = partial(made.whole, "apart", by_table=True)
        ways["whole, apart, by table"] = "apart", False, by_table
        ways["whole, apart, own exact"] = "apart", True, partial(made.whole, "apart", own="exact")
        for name, (layout, exact, make) in ways.items():
            line = {"check": f"prefill: {name}", "context": context}
            yield guarded(line, partial(_prefill, made, layout, exact, make))


def _prefill(made: Prefill, layout: str, exact: bool, make: Callable[[], Way]) -> Line:
    """layout: of the context, 16 bits without. exact: whether the chunk's own are of 16 bits."""
    keys, values = made.exact()
    if layout:
        end = made.context if exact else made.length
        ends = torch.tensor([0, end], dtype=torch.int32, device=DEVICE)
        undo_in_torch(made.pages[layout].paged, made.table[None], 0, ends, end, keys, values)
    expected, _ = attention(made.query, keys, values, True)
    made.out.fill_(torch.nan)
    make().run()
    return {"off_by": off_by(made.out, expected)}


def decoded(shape: Heads) -> Iterator[Line]:
    """Two requests whose last page is not full, in two layers."""
    step = Step(shape, 3 * GROUP + 9, 2, 2)
    table, picked = step.tables[1], step.selections(48, 1)[0]
    index = torch.arange(step.length, device=DEVICE)
    every = index.expand(step.batch, shape.kv_heads, -1)
    ways: dict[str, tuple[str, Tensor, Callable[[], Call]]] = {
        "chosen, 16 bits": (
            "16 bits",
            picked,
            partial(step.chosen, "16 bits", table, picked, _PROGRAMS),
        ),
        "all, 16 bits, vLLM's": ("16 bits", every, partial(step.unified, "16 bits", table)),
    }
    for layout in ("16 bits", "apart") if ON_GPU else ():
        cuda = partial(step.in_cuda(layout, 48), table, picked)
        ways[f"chosen, {layout}, CUDA"] = layout, picked, cuda
        cuda = partial(step.all_in_cuda, layout, table)
        ways[f"all, {layout}, CUDA"] = layout, every, cuda
    for layout in LAYOUTS:
        of = partial(step.chosen, layout, table, picked, _PROGRAMS)
        ways[f"chosen, {layout}"] = layout, picked, of
        ways[f"all, {layout}"] = layout, every, partial(step.all_of, layout, table, _PROGRAMS)
        ways[f"all, {layout}, vLLM's"] = layout, every, partial(step.unified, layout, table)
    for name, (layout, read, make) in ways.items():
        yield guarded({"check": f"decode: {name}"}, partial(_decode, step, layout, read, make))


def _decode(step: Step, layout: str, read: Tensor, make: Callable[[], Call]) -> Line:
    paged = step.paged(layout)
    share, table = step.shape.heads // step.shape.kv_heads, step.tables[1]
    step.out.fill_(torch.nan)
    make()()
    most = 0.0
    for r in range(step.batch):
        keys, values = (of(table[r], step.length) for of in (paged.dense_keys, paged.dense_values))
        for g in range(step.shape.kv_heads):
            heads, of_head = slice(g * share, (g + 1) * share), read[r, g].long()
            expected = _attended(step, r, heads, keys[g, of_head], values[g, of_head])
            most = max(most, off_by(step.out[r, heads], expected))
    return {"off_by": most}


def _attended(step: Step, r: int, heads: slice, keys: Tensor, values: Tensor) -> Tensor:
    """(H / G, D) float32 of one request and KV head."""
    query = step.query[r, heads].float()
    return (query @ keys.float().T * step.scale).softmax(dim=-1) @ values.float()
