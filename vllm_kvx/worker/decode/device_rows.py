"""Rows that retrieve in a step that runs in Python, brought to the device."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.step import HostRows


def on_device(
    batches: Iterable[HostRows],
    budgets: IntArray,
    unit: int,
    device: torch.device,
    late: Tensor | None = None,
    floors: IntArray | None = None,
) -> list[RetrievalRows]:
    """Each of `batches`, whose rows follow one another.

    Args:
        budgets: (R,) units to read, by request of the step. unit: tokens of one.
        late: see ``RetrievalRows.take_back``; None where the host knows what rows see.
        floors: the same, (N,) on the host, of the rows of all batches.
    """
    found, begin = list[RetrievalRows](), 0
    for part in batches:
        end = begin + len(part.lens)
        many = budgets[part.requests]
        rows = RetrievalRows.of(part.tokens, part.requests, part.lens, many, unit, device)
        if late is not None and floors is not None:
            least = floors[begin:end].astype(np.int32)
            rows.take_back(late, async_tensor_h2d(least, device=device))
        found.append(rows)
        begin = end
    return found
