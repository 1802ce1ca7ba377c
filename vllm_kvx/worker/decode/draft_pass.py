"""What drafted tokens read: one row of each of some requests, whose lengths the device knows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import HostRows, Mode, RetrievalPass


@dataclass(frozen=True)
class DraftReads:
    """What P rows retrieve, all of them, of a server with one KV stage.

    Attributes:
        requests: (P,) request states.
        least, most: (P,) entries that each row sees, its own included: bounds of a number that the
            device knows.
        budget: units to read; of a row that sees no more all are read.
    """

    requests: np.ndarray
    least: IntArray
    most: IntArray
    budget: int


def draft_pass(
    retrieval: Retrieval, reads: DraftReads, lens: Tensor, tables: Sequence[Tensor]
) -> RetrievalPass:
    """The pass of these rows, as Python runs it.

    lens: (P,) int32 entries that each sees. tables: (P, max_blocks) int32 by KV group.
    """
    index = np.arange(len(reads.most))
    budgets = np.full(len(index), reads.budget)
    batches = retrieval.on_device(HostRows(index, index, reads.most), budgets)
    begin = 0
    for rows in batches:
        # Their scores have room by the bounds.
        end = begin + len(rows.lens)
        rows.lens.copy_(lens[begin:end])
        begin = end
    return RetrievalPass((Mode.ALL,), [batches], tables, writes=True)
