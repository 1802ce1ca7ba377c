"""CUDA graphs where there is no GPU: what a graph has in it runs again in Python.

It reads and writes the same buffers, padding included, as a graph does when it replays.
"""

from collections import Counter
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


def replay_in_python(patch: pytest.MonkeyPatch) -> Counter[int]:
    """vLLM's managers of graphs keep what they capture as functions, and call these to replay.

    Returns how often, by the graph's number of tokens, as it grows.
    """
    counts = Counter[int]()

    def capture(self: Any, create: Any, progress_bar_desc: str = "") -> None:
        most = self._max_full_descs_to_capture
        for each in self._capture_descs[CUDAGraphMode.FULL][:most]:
            create(each, warmup=True)(CUDAGraphMode.NONE)
            self.graphs[each] = create(each, warmup=False)
            self.graphs[each](CUDAGraphMode.NONE)
        self._graphs_captured = True

    def run_fullgraph(self: Any, desc: Any) -> None:
        counts[desc.num_tokens] += 1
        self.graphs[desc](CUDAGraphMode.NONE)

    patch.setattr(CudaGraphManager, "capture", capture)
    patch.setattr(CudaGraphManager, "run_fullgraph", run_fullgraph)
    for name in ("get_global_graph_pool", "graph_pool_handle"):
        patch.setattr(type(current_platform), name, lambda *_: None, raising=False)
    return counts


def plan_again(builder: Any, metadata: Any) -> None:
    """vLLM's CPU attention plans a batch by the lengths that its buffers hold now.

    builder: that made `metadata`, of the graph.
    """
    from vllm import _custom_ops as ops

    metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=metadata.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=False,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
