"""What layers refuse once vLLM has formed its KV groups and bound its caches."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker.layer_hooks import LayerHook, LayerHooks

LAYERS, BLOCKS, HEADS, HEAD_DIM = 4, 3, 2, 32


def backend(name: str, sizes: list[int | MultipleOf]) -> Any:
    """An attention backend whose kernels take blocks of these sizes."""

    class Backend(AttentionBackend):
        forward_includes_kv_cache_update = False

        @staticmethod
        def get_name() -> str:
            return name

        @classmethod
        def get_supported_kernel_block_sizes(cls, *_: Any) -> list[int | MultipleOf]:
            return sizes

    return Backend


def bind(policies: Sequence[str], attention: Any, block_size: int) -> None:
    """Binds a model's layers to caches that vLLM allocates for this backend."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )
    names = [str(number) for number in range(LAYERS)]
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=LAYERS * BLOCKS * page,
        layers=names,
        layer_stride=BLOCKS * page,
        block_stride=page,
    )
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
    sizes = prepare_kernel_block_sizes(config, [[AttentionGroup(attention, names, spec, 0)]])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, sizes)
    layers = [
        SimpleNamespace(
            layer_name=name,
            attn_backend=attention,
            impl=SimpleNamespace(forward=None, head_size=HEAD_DIM),
            kv_cache=caches[name],
            kv_cache_dtype="auto",
        )
        for name in names
    ]
    model: Any = SimpleNamespace(attention_layers=lambda: layers, every_layer=lambda: layers)
    layout = layout_of([parse_policy(policy) for policy in policies], LAYERS)
    LayerHooks(model, [0] * LAYERS, torch.float32, layout).bind(config, layout)


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_floor=0", "knorm:kv_floor=0", "streamingllm:recent=1020", "fier-64"]
)
def test_kernels_that_split_blocks_are_refused(policy: str) -> None:
    split = backend("TRITON_ATTN", [16, 32, 64])
    with pytest.raises(RuntimeError, match=r"128 tokens, .* into blocks of 64.* --block-size 64"):
        bind([policy], split, block_size=128)
    bind([policy], split, block_size=64)
    bind([policy], backend("TRITON_ATTN", [MultipleOf(16)]), block_size=128)


def test_layers_whose_entries_nobody_looks_up_may_be_split() -> None:
    bind(["speed-2"], backend("FLASHINFER", [16, 32, 64]), block_size=128)


def test_flashinfer_that_vllm_chose_itself() -> None:
    flashinfer = backend("FLASHINFER", [16, 32, 64])
    for policies in (
        ["fastkv:kv_floor=0,tsp_layer=1"],
        ["gemfilter:layer=1,kv_floor=0"],
        ["speed-2", "snapkv:kv_floor=0"],
    ):
        with pytest.raises(RuntimeError, match="to one of FLASH_ATTN, TRITON_ATTN, CPU_ATTN"):
            bind(policies, flashinfer, block_size=16)
    bind(["snapkv:kv_floor=0"], flashinfer, block_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_queries_that_were_quantised_are_exact(dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    query = every[every.float().isfinite()].repeat(2)[: 6 * 2 * HEAD_DIM].view(-1, 2 * HEAD_DIM)
    layer = SimpleNamespace(
        impl=SimpleNamespace(forward=None, num_heads=2, head_size=HEAD_DIM), _q_scale_float=scale
    )
    hooks: Any = SimpleNamespace(dtype=dtype)
    found = LayerHook(hooks, layer, 0, 0)._unquantized(query)
    assert found.dtype == dtype and found.shape == (len(query), 2, HEAD_DIM)
    wanted = query.double() * float(torch.tensor(scale, dtype=torch.float32))
    assert torch.equal(found, wanted.view(found.shape).to(dtype))
    plain = torch.randn(3, 2 * HEAD_DIM, dtype=dtype)
    assert torch.equal(LayerHook(hooks, layer, 0, 0)._unquantized(plain).flatten(1), plain)
