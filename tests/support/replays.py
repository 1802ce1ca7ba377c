"""CUDA graphs where there is no GPU: what a graph has in it runs again in Python.

It reads and writes the same buffers, padding included, as a graph does when it replays.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.config.compilation import CUDAGraphMode


class Replays:
    """In the place of vLLM's ``CudaGraphManager``.

    counts: replays, by the graph's number of rows.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.counts: Counter[int] = Counter()
        self.pool: Any = None
        self._graphs: dict[Any, Callable[[CUDAGraphMode], None]] = {}
        self._capture_descs: dict[CUDAGraphMode, list[Any]] = {}
        self._max_full_descs_to_capture: int | None = None

    def capture(self, create: Any, progress_bar_desc: str = "") -> None:
        most = self._max_full_descs_to_capture
        for each in self._capture_descs[CUDAGraphMode.FULL][:most]:
            create(each, warmup=True)(CUDAGraphMode.NONE)
            self._graphs[each] = create(each, warmup=False)
            self._graphs[each](CUDAGraphMode.NONE)

    def run_fullgraph(self, desc: Any) -> None:
        self.counts[desc.num_tokens] += 1
        self._graphs[desc](CUDAGraphMode.NONE)


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
