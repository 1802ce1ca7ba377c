"""No kernel is compiled while serving: vLLM's monitor makes one that is an error."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from reference.zoo import build
from support.engine import running
from support.gpu import COMPILED
from support.prompts import prompts_of

from vllm_kvx.worker import worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# By the server's policy, what else it makes room for.
SERVERS = {
    "snapkv:kv_floor=0": [
        "criticalkv:kv_floor=0",
        "pyramidkv:kv_floor=0",
        "knorm:kv_floor=0",
        "streamingllm:recent=1020",
        "criticalkv:kv_floor=0,lookahead=5",
    ],
    "fastkv:kv_floor=0,tsp_layer=3": [
        "structkv:pivot=3,kv_floor=0",
        "gemfilter:layer=3,kv_floor=0",
    ],
    "structkv:pivot=online,kv_floor=0": [],
    "structkv:pivot=3,kv_floor=0,granularity=block": [],
    "speed-4+fier-64": ["fier-64"],
    "quest-64": [],
}


@pytest.fixture(autouse=True)
def monitor_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one for all engines of a process, and never ends."""
    monkeypatch.setattr("vllm.utils.jit_monitor._active", False)
    monkeypatch.setattr("vllm.utils.jit_monitor._mode", "warn")


# Modules of the kernels that are compiled beside vLLM's part of the start.
AHEAD = ("vllm_kvx.ops.prompt.", "vllm_kvx.ops.radix", "vllm_kvx.ops.retrieval.index_layout")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that were compiled when policies ran once, and should have been before.

    Nothing is left of other tests: what the thread does not compile is missing.
    """
    found: list[str] = []
    stock = worker.warm_up
    modules = [module for name, module in sys.modules.items() if name.startswith(AHEAD)]
    for kernel in (each for module in modules for each in vars(module).values()):
        if isinstance(kernel, triton.JITFunction):
            kernel.device_caches.clear()

    def warm_up(*args: Any) -> Any:
        def hook(*, fn: Any, **_: Any) -> None:
            if fn.module.startswith(AHEAD):
                found.append(fn.name)

        with monkeypatch.context() as watched:
            watched.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
            return stock(*args)

    monkeypatch.setattr(worker, "warm_up", warm_up)
    return found


@pytest.mark.parametrize("policy", SERVERS)
def test_nothing_is_compiled_while_serving(
    tiny: Callable[..., Path], policy: str, monkeypatch: pytest.MonkeyPatch, late: list[str]
) -> None:
    """Short and long prompts, in one chunk and in several, beside decodes, under each policy."""
    model = tiny(head_dim=64, hidden=128)
    names = [policy, *SERVERS[policy], "full"]
    options = COMPILED | {
        "dtype": "bfloat16",
        "block_size": 32,  # Retrieval's groups.
        "max_num_batched_tokens": 512,
        "jit_monitor_mode": "error",
    }
    lengths = (1, 2, 5, 16, 33, 64, 65, 130, 300, 511, 512, 513, 700, 1024, 1500, 2048)
    prompts = prompts_of(lengths)
    with running(
        model, policy, config={"kv_layout": SERVERS[policy]}, max_num_seqs=32, **options
    ) as engine:
        with monkeypatch.context() as lenient:
            # vLLM compiles its sampler's kernel of logprobs when first asked for some.
            lenient.setattr("vllm.utils.jit_monitor._mode", "warn")
            engine.generate(prompts[:1], 2, ["full"])
        for name in names:
            engine.generate(prompts[::3], 40, [name] * len(prompts[::3]))
        mixed = [names[i % len(names)] for i in range(len(prompts))]
        engine.generate(prompts, 40, mixed)
        for prompt, name in zip(prompts, mixed, strict=True):
            engine.generate([prompt], 3, [name])
        engine.assert_idle()
    assert not late, late


@pytest.mark.parametrize("quantization", [None, "fp8_per_tensor"])
def test_no_kernel_of_experts_is_compiled_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """Above a cut there are any numbers of rows, odd ones too, beside decodes of any number."""
    model = build(tmp_path / "model", "qwen3_moe", head_dim=64, hidden_size=256)
    options = COMPILED | {
        "dtype": "bfloat16",
        "quantization": quantization,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "jit_monitor_mode": "error",
    }
    names = ["speed-4", "fastkv:tsp_layer=3,tsp_rate=0.3,kv_floor=0"]
    with running(model, names[0], config={"kv_layout": names[1:]}, **options) as engine:
        with monkeypatch.context() as lenient:
            lenient.setattr("vllm.utils.jit_monitor._mode", "warn")
            engine.generate(prompts_of((5,)), 2, ["full"])
        for count in (1, 2, 7, 31):
            prompts = prompts_of([17 + 23 * i % 501 for i in range(count)], seed=count)
            engine.generate(prompts, 40, [names[i % 2] for i in range(count)])
        engine.assert_idle()
