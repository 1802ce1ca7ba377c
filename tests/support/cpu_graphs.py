"""FULL CUDA graphs of decode steps where there is no GPU: what is in them runs again in Python.

vLLM's own manager describes, dispatches and pads. What it captures is kept as a function of the
buffers that it was captured with, padding included, and a replay calls it: whatever a step sets but
in these buffers does not reach it. Attention on CPU plans a batch on the host, which is done again
by the lengths that the buffers hold then, as backends of GPUs do within their kernels.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.gpu import cudagraph_utils

from support.inside import capture_sets_of
from support.replays import plan_again, replay_in_python


@contextmanager
def graphs_on_cpu(engine: Any, sizes: Sequence[int]) -> Iterator[Counter[int]]:
    """Inside, decode steps of up to `sizes` tokens replay graphs; yields how often, by size."""
    runner, builders = engine.runner, dict[int, Any]()
    compilation = runner.vllm_config.compilation_config
    with pytest.MonkeyPatch.context() as patch:
        counts = replay_in_python(patch)
        _remember_builders(patch, builders)
        _plan_again(patch, builders)
        patch.setattr(compilation, "cudagraph_capture_sizes", list(sizes))
        patch.setattr(compilation, "max_cudagraph_capture_size", max(sizes))
        manager = cudagraph_utils.ModelCudaGraphManager(
            runner.vllm_config,
            runner.device,
            CUDAGraphMode.FULL_DECODE_ONLY,
            decode_query_len=runner.decode_query_len,
        )
        capture_sets_of(engine, manager)
        patch.setattr(runner, "cudagraph_manager", manager)
        with torch.inference_mode():
            manager.capture(
                runner.model,
                runner.model_state,
                runner.input_buffers,
                runner.intermediate_tensors,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
            )
        yield counts


def _remember_builders(patch: pytest.MonkeyPatch, builders: dict[int, Any]) -> None:
    build: Callable[..., Any] = CPUAttentionMetadataBuilder.build

    def built(self: Any, *args: Any, **options: Any) -> Any:
        metadata = build(self, *args, **options)
        builders[id(metadata)] = (self, metadata)
        return metadata

    patch.setattr(CPUAttentionMetadataBuilder, "build", built)


def _plan_again(patch: pytest.MonkeyPatch, builders: dict[int, Any]) -> None:
    stock = cudagraph_utils.set_forward_context

    def set_forward_context(attn_metadata: Any, *args: Any, **options: Any) -> Any:
        for each in {id(m): m for m in attn_metadata.values()}.values():
            builder, _ = builders[id(each)]
            plan_again(builder, each)
        return stock(attn_metadata, *args, **options)

    patch.setattr(cudagraph_utils, "set_forward_context", set_forward_context)
