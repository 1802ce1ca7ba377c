"""What passes need to know of the step's batch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from vllm_kvx.models.passes import AttnMetadata
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.batch import PassBatch
from vllm_kvx.worker.decode.step import RetrievalStep
from vllm_kvx.worker.rows import ProjectedRows


class MetadataOf(Protocol):
    """Builds attention metadata of some KV groups."""

    def __call__(
        self,
        batch: PassBatch,
        ends: np.ndarray,
        groups: Collection[int],
        is_prefill: bool = True,
        is_known: np.ndarray | None = None,
    ) -> AttnMetadata:
        """ends: (P,) int32 entries that the last row of each sees.

        is_prefill: whether all rows are of prompts that come in; otherwise as in the step's batch,
            and `ends` is the most that they can see where drafts are not known to stay yet, but
            for those that are `is_known`, (P,) bool.
        """


@dataclass(frozen=True)
class StepBatch:
    """What passes need to know of the step's batch.

    Attributes:
        requests: (R,) int64 request-state indices. row_ends: (R,) end of each request's rows.
        begins, counts: (R,) first position and tokens of each.
        stored_lens: (S, R) entries in each KV stage, this step's included.
        positions: (T,) int64. block_tables: (R, B) int32 by KV group. slots: (G, T) int64.
        metadata: of the layers, by name. metadata_of: builds that of a pass of its own.
        projected: rows whose entries are projected into layers above; None if there are none.
        retrieval: what decode tokens read; None on a server that does not retrieve.
    """

    requests: np.ndarray
    row_ends: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    stored_lens: IntArray
    positions: Tensor
    block_tables: Sequence[Tensor]
    slots: Tensor
    metadata: AttnMetadata
    metadata_of: MetadataOf
    projected: ProjectedRows | None = None
    retrieval: RetrievalStep | None = None
