"""Compiles the kernels of `benchmarks.ops.int8_cache` for a Hopper GPU that is not there.

python -m support.int8_compiles

Triton's interpreter takes more than its compiler does. Prints what was compiled for each layout: a
kernel's name, and how many of its loads and stores move one byte each. A launch that compiles
nothing anew is left out.
"""

import json
import re
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends import Backend, backends
from triton.runtime.jit import JITFunction, MockTensor

from support.compiles_ahead import NoGPU

Kernels = list[tuple[str, int]]


class Placed(MockTensor):
    """A tensor without memory, at an address that is as aligned as it is in its storage."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.dtype)
        self._address = tensor.storage_offset() * tensor.itemsize

    def data_ptr(self) -> int:  # type: ignore[override]
        return self._address


def compiled_into(found: Kernels, stock: Any) -> Any:
    """`JITFunction.run` that compiles a launch of tensors without memory, and runs nothing."""

    def mock(value: Any) -> Any:
        return Placed(value) if isinstance(value, FakeTensor) else value

    known: list[Any] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        named = {name: mock(value) for name, value in named.items()}
        made = stock(kernel, *map(mock, args), grid=grid, warmup=True, **named)
        if made in known:  # As an earlier launch, though addresses and numbers were others.
            return
        known.append(made)
        by_byte = re.findall(r"(?:ld|st)\.global[\w.:]*\.b8\b", made.asm["ptx"])
        found.append((kernel.fn.__name__, len(by_byte)))

    return run


def main() -> dict[str, Kernels]:
    triton.runtime.driver.set_active(NoGPU)
    # vLLM's CPU build leaves Triton alone without it.
    backends["cpu"] = Backend(compiler=None, driver=NoGPU)
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON
    del backends["cpu"]
    from benchmarks.ops.int8_pages import LAYOUTS

    names: dict[str, Kernels] = {}
    stock = JITFunction.run
    for layout in LAYOUTS:
        names[layout] = []
        JITFunction.run = compiled_into(names[layout], stock)
        with torch.no_grad(), FakeTensorMode():
            launch(layout)
    return names


def launch(layout: str) -> None:
    from benchmarks.ops import int8_pages, int8_store_triton
    from benchmarks.ops.int8_unified import unified
    from benchmarks.ops.retrieval_layer import LLAMA_8B as SHAPE
    from vllm_kvx.ops.int8.store import store_in_triton
    from vllm_kvx.ops.int8.undo import undo_in_triton
    from vllm_kvx.ops.retrieval.attend import attend
    from vllm_kvx.ops.retrieval.rows import RetrievalRows

    pages = int8_pages.Int8Pages.empty(SHAPE, 64, layout)
    paged = pages.paged
    tokens, dim, kv_heads, splits = 64, SHAPE.head_dim, SHAPE.kv_heads, 4

    def of(heads: int) -> torch.Tensor:
        return torch.empty(tokens, heads, dim, dtype=torch.bfloat16)

    def ints(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    key, value, query, table = of(kv_heads), of(kv_heads), of(SHAPE.heads), ints(2, 16)
    store_in_triton(paged, key, value, ints(tokens, dtype=torch.int64))
    int8_store_triton.store_with_codes(pages, key, value, table[0], 0)
    # The rows of a table that is as wide as no multiple of 16, wherever they begin.
    for first, count, tables in ((0, tokens, table), (32, 33, ints(3, 17)[1:]), (0, 1, table[1:])):
        ends = ints(9)[count % 2 : count % 2 + len(tables) + 1]
        undo_in_triton(paged, tables, first, ends, count, key, value)
    rows = RetrievalRows.of_fields(ints(4, 2), ints(2, dtype=torch.int64))
    partial_lse = torch.empty(2, SHAPE.heads, splits)
    for unit in (1, SHAPE.block_size):
        attend(
            query,
            paged,
            table,
            rows,
            ints(2, kv_heads, 16),
            ints(2, kv_heads),
            torch.empty(*partial_lse.shape, dim),
            partial_lse,
            query,
            unit=unit,
            scale=0.1,
            key_scale=1.0,
            value_scale=1.0,
            splits=splits,
        )
    for longest in (1, tokens):
        unified(query, paged, table, ints(3), ints(2), (longest, 512), query)()


if __name__ == "__main__":
    print(json.dumps(main()))
