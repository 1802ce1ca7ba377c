"""A worker's extension, by which the second rank of two finds another environment than the first.

Workers are spawned, and import it before they load the model.
"""

import os
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from vllm_kvx.ops.retrieval import retrieve
from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE

_stock = retrieve.choose_backend


def _by_rank(device: torch.device) -> Any:
    if get_tp_group().rank_in_group or get_pp_group().rank_in_group:
        os.environ[BACKEND_VARIABLE] = "triton"
    return _stock(device)


class UnlikeRank:
    """Adds nothing to the worker."""


retrieve.choose_backend = _by_rank
