"""What drafted tokens read: one row of each of some requests, whose lengths the device knows."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import HostRows, Mode, RetrievalPass


def draft_pass(
    retrieval: Retrieval, lens: Tensor, bounds: IntArray, budget: int, tables: Sequence[Tensor]
) -> RetrievalPass:
    """The pass of rows all of which retrieve, of a server with one KV stage.

    Args:
        lens: (P,) int32 entries that each sees. bounds: (P,) as many or more, on the host.
        budget: units to read; of a row that sees no more all are read.
        tables: (P, max_blocks) int32 by KV group.
    """
    index = np.arange(len(bounds))
    batches = retrieval.on_device(HostRows(index, index, bounds), np.full(len(bounds), budget))
    begin = 0
    for rows in batches:
        # Their scores have room by the bounds.
        end = begin + len(rows.lens)
        rows.lens.copy_(lens[begin:end])
        begin = end
    return RetrievalPass((Mode.ALL,), [batches], tables, writes=True)
