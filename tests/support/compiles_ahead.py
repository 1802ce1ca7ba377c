"""Compiles the kernels of policies ahead, for a Hopper GPU that is not there; prints their names.

python -m support.compiles_ahead CACHE_DTYPE POLICY...
"""

import json
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import triton
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64, 8
# These run every kernel that soft caps and sinks compile anew.
WITH_BOTH = {"fastkv:tsp_layer=3", "structkv:pivot=online"}


class NoGPU:
    """A driver of Triton; made: kernels whose launchers were asked for."""

    made: ClassVar[list[str]] = []
    is_active = staticmethod(lambda: True)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    launcher_cls = staticmethod(lambda src, metadata: NoGPU.made.append(metadata.name))


def at(tensor: Any, index: Any) -> Any:
    """Indexing, which in C++ asks for CUDA even where a tensor has no memory."""
    aten, dim = torch.ops.aten, 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is Ellipsis:
            dim = tensor.dim() - 1
        elif part is None:
            tensor, dim = aten.unsqueeze(tensor, dim), dim + 1
        elif isinstance(part, int):
            tensor = aten.select.int(tensor, dim, part)
        elif isinstance(part, slice):
            tensor, dim = aten.slice.Tensor(tensor, dim, part.start, part.stop), dim + 1
        else:
            tensor, dim = aten.index_select(tensor, dim, part), dim + 1
    return tensor


def main(servers: list[list[str]]) -> list[list[str]]:
    torch.Tensor.__getitem__ = at
    triton.runtime.driver.set_active(NoGPU)
    from triton.runtime.jit import JITFunction

    # vLLM's CPU build leaves Triton alone without it.
    backends["cpu"] = Backend(compiler=None, driver=NoGPU)
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON
    del backends["cpu"]
    check_compiling()
    stock = JITFunction.run
    names = [compiled(*server) for server in servers]
    assert JITFunction.run is stock
    # Its launcher is made with every kernel.
    assert set(NoGPU.made) == {name for each in names for name in each}
    return names


def check_compiling() -> None:
    """Other threads launch as ever, real tensors may be given, and an end by an error is one."""
    import threading

    from triton.runtime.jit import JITFunction

    from vllm_kvx.ops.triton_precompile import compiling

    @triton.jit
    def double(values):
        triton.language.store(values, triton.language.load(values) * 2)

    stock, launched = JITFunction.run, list[bool]()

    def fake(kernel: Any, *args: Any, warmup: bool, **_: Any) -> None:
        launched.append(warmup)

    JITFunction.run = fake
    try:
        with compiling() as found:
            thread = threading.Thread(target=lambda: double[(1,)](torch.ones(1)))
            thread.start()
            thread.join()
            double[(1,)](torch.empty(1))
            try:
                with compiling():
                    raise AssertionError("a second one is refused")
            except RuntimeError:
                pass
        assert launched == [False, True] and found.names == ["double"]
        try:
            with compiling():
                raise KeyError
        except KeyError:
            double[(1,)](torch.ones(1))
        assert launched == [False, True, False] and JITFunction.run is fake
    finally:
        JITFunction.run = stock
    real = torch.ones(4, 4)
    with compiling() as found:
        double[(1,)](real[1:])
    assert found.names == ["double"] and bool((real == 1).all())
    NoGPU.made.clear()


def compiled(dtype: str, *policies: str) -> list[str]:
    """By layers without soft caps and sinks; the same kernels by layers with both, of some."""
    names = _compiled(dtype, policies, has_both=False)
    if WITH_BOTH.intersection(policies):
        assert names == _compiled(dtype, policies, has_both=True)
    return names


def _compiled(dtype: str, policies: tuple[str, ...], has_both: bool) -> list[str]:
    from vllm_kvx.ops.paged import PagedKV
    from vllm_kvx.ops.triton_precompile import compiling
    from vllm_kvx.policy.spec import parse_policy
    from vllm_kvx.scores.base import LayerView
    from vllm_kvx.worker.triton_precompile import PromptKernels

    impl = SimpleNamespace(num_heads=HEADS, head_size=DIM)
    with torch.no_grad(), compiling() as found:
        device = torch.device("cuda", 0)
        size = (32, KV_HEADS, 16, 2 * DIM)
        cache = torch.empty(size, dtype=getattr(torch, dtype), device=device)
        factors = torch.empty(HEADS, DIM, DIM, dtype=torch.bfloat16, device=device)
        cap = 50.0 if has_both else None
        sinks = torch.empty(HEADS, dtype=torch.bfloat16, device=device) if has_both else None
        hook: Any = SimpleNamespace(
            layer=SimpleNamespace(impl=impl),
            paged=lambda: PagedKV.of(cache, DIM),
            value_scale=lambda paged: 1.0,
            view=lambda *queries_and_cache: LayerView(
                *queries_and_cache, 0.125, 1.0, cap, sinks, factors
            ),
        )
        kernels = PromptKernels(hook, torch.bfloat16, 8, device)
        kernels.launch([parse_policy(name) for name in policies], LAYERS, attends=True)
    return found.names


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
