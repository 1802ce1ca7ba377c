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
