"""Whether all ranks of an engine plan retrieval alike: each goes by its own environment and GPU.

Ranks of several nodes may find other variables, other operators or another GPU. Each would retrieve
from other lengths on, or by other operators, and answers would be of no one policy.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import distributed
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from vllm_kvx.ops.library import COMMAND
from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE
from vllm_kvx.ops.retrieval.one_launch import VARIABLE
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.room import entry_bytes
from vllm_kvx.worker.decode.step import HookedLayer


class RankPlan(NamedTuple):
    """How a rank plans retrieval.

    heads: of its layers, by which it has its operators. machine: what it plans by besides: ranks of
        a pipeline may have unlike layers.
    ops: by which it scores and attends. lengths: from which on rows retrieve. says: both in words.
    """

    rank: int
    host: str
    heads: tuple[Any, ...]
    machine: tuple[Any, ...]
    ops: tuple[str, ...]
    lengths: tuple[Any, ...]
    says: str

    @classmethod
    def of(cls, retrieval: Retrieval, layers: Sequence[HookedLayer]) -> "RankPlan":
        """layers: this rank's policy layers."""
        impl, ops, costs = layers[0].layer.impl, retrieval.backends, retrieval.costs
        dtypes = {str(each.layer.kv_cache_dtype) for each in retrieval.above or layers}
        heads = impl.num_heads, impl.num_kv_heads, impl.head_size
        cap = getattr(impl, "logits_soft_cap", None)
        machine = cap, entry_bytes(layers), tuple(sorted(dtypes))
        names = BACKEND_VARIABLE, VARIABLE
        given = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
        says = (
            f"{retrieval.begins}; ops: {ops} ({ops.reason}); rows of a step that one launch does: "
            f"{costs.few_rows}; {', '.join(given) or 'neither variable is set'}"
        )
        lengths = retrieval.crossover, costs
        who = distributed.get_rank(), socket.gethostname()
        return cls(*who, heads, machine, (ops.score, ops.attend), lengths, says)


def check_alike(retrieval: Retrieval, layers: Sequence[HookedLayer]) -> None:
    """The ranks of an engine tell each other how they plan: every one of them has to call this.

    Raises:
        RuntimeError: ranks whose layers are alike plan unlike each other.
    """
    plans = [RankPlan.of(retrieval, layers)]
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            found: list[list[RankPlan]] = [[]] * group.world_size
            distributed.all_gather_object(found, plans, group=group.cpu_group)
            plans = [plan for each in found for plan in each]
    if told := unlike(plans):
        raise RuntimeError(told)


def unlike(plans: Sequence[RankPlan]) -> str:
    """What differs between ranks whose layers are alike, and what to change; empty if nothing."""
    by_heads = _grouped((each.heads, each.ops, each) for each in plans)
    by_machine = _grouped(((e.heads, e.machine), (e.ops, e.lengths), e) for e in plans)
    differing = [found for found in by_heads if len(found) > 1]
    differing = differing or [found for found in by_machine if len(found) > 1]
    lines = [
        f"- {', '.join(f'rank {each.rank} on {each.host}' for each in ranks)}: {ranks[0].says}"
        for found in differing
        for ranks in found
    ]
    if not lines:
        return ""
    return "\n".join(
        [
            "the ranks of this server do not retrieve alike:",
            *lines,
            f"Set {BACKEND_VARIABLE} and {VARIABLE} to the same values on all nodes, or on none, "
            f"and have GPUs of one kind and the same CUDA ops (`{COMMAND}`) on all of them",
        ]
    )


def _grouped(plans: Iterable[tuple[Any, Any, RankPlan]]) -> list[list[list[RankPlan]]]:
    """Of (what is alike, what has to be then, a plan): by the first, then by the second."""
    found: dict[Any, dict[Any, list[RankPlan]]] = defaultdict(lambda: defaultdict(list))
    for alike, then, plan in plans:
        found[alike][then].append(plan)
    return [list(each.values()) for each in found.values()]
