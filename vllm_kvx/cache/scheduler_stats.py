"""What the scheduler knows and the metrics show: it rides to the workers on a step's output."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from vllm_kvx.cache.admission import PromptAdmission
from vllm_kvx.cache.block_owners import BlockOwners
from vllm_kvx.cache.latency import Latencies
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import FirstStageKVCacheManager
from vllm_kvx.cache.request_kv import RequestKV
from vllm_kvx.config.settings import KVSettings

# Blocks are counted no more often: it takes a look at every running request.
EVERY_S = 0.25

Manager = FirstStageKVCacheManager | LaterStageKVCacheManager


class RunInFull(StrEnum):
    """Why a request runs under `full` whose policy is another."""

    SESSION = "session"  # Its prompt has no end yet.
    MISFIT = "misfit"  # The server cannot run its policy, and it came past the API's check.


class PolicySchedulerStats:
    """Totals since the scheduler was made, and the blocks that requests hold.

    Workers keep what they were told last; a step's output carries it when a total changed, every
    `EVERY_S` seconds, and when no request runs any more.
    """

    def __init__(
        self,
        settings: KVSettings,
        pool: BlockPool,
        first_stage: Sequence[FirstStageKVCacheManager],
        later_stages: Sequence[LaterStageKVCacheManager],
        admission: PromptAdmission,
        owns_all: bool = True,
    ) -> None:
        """first_stage, later_stages: the managers of the KV groups that follow policies.

        owns_all: whether these are all groups of the pool.
        """
        self._policies, self._debug = settings.counted_policies(), settings.debug and owns_all
        self._first_stage, self._managers = first_stage, [*first_stage, *later_stages]
        self._admission = admission
        self.owners = BlockOwners(pool, len(self._managers), self._policies.size)
        for group, manager in enumerate(self._managers):
            manager.watch(self.owners, group)
        self._unshared: dict[int, int] = {}
        self._hits: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._states: dict[int, int] = {}
        self._drafted: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self._in_full = dict.fromkeys(map(str, RunInFull), 0)
        self._latencies = Latencies()
        self._changed = False
        self._told_at = float("-inf")

    def row_of(self, policy: str) -> int:
        """The policy's row, by which managers count its blocks."""
        return self._policies.row_of(policy)

    def add_unshared(self, policy: str) -> None:
        """A request could neither read nor publish a prefix because of its policy."""
        row = self._policies.row_of(policy)
        self._unshared[row] = self._unshared.get(row, 0) + 1
        self._changed = True

    def add_prefix(self, policy: str, hit: int, cached: int) -> None:
        """A request begins with `hit` tokens of the `cached` ones that its prompt begins with."""
        row = self._policies.row_of(policy)
        self._hits[row] = self._hits.get(row, 0) + hit
        self._cached[row] = self._cached.get(row, 0) + cached
        self._changed |= cached > 0

    def add_states(self, policy: str, tokens: int) -> None:
        """Hidden states of so many tokens go into the prefix cache."""
        row = self._policies.row_of(policy)
        self._states[row] = self._states.get(row, 0) + tokens

    def add_drafts(self, policy: str, drafted: int, accepted: int) -> None:
        """A step verified `drafted` tokens of a request, and the first `accepted` of them stay."""
        row = self._policies.row_of(policy)
        self._drafted[row] = self._drafted.get(row, 0) + drafted
        self._accepted[row] = self._accepted.get(row, 0) + accepted

    def add_run_in_full(self, why: RunInFull) -> None:
        """A request runs under `full` in the place of its policy."""
        self._in_full[why] += 1
        self._changed = True

    def add_request(self, request: Request, policy: str) -> None:
        """A request came, whose latencies count under `policy`."""
        self._latencies.begin(request, self._policies.row_of(policy))

    def add_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """What a step gave its requests."""
        self._changed |= self._latencies.add_step(outputs)

    def end_request(self, request: Request, is_told: bool = True) -> None:
        """A request ended, by itself or not; `is_told` as of ``Latencies.end``."""
        self._latencies.end(request, is_told)
        self._changed = True

    def news(self, requests: Mapping[str, Request]) -> dict[str, Any] | None:
        """What a step's output is to carry; None if it is not time.

        requests: all that have not ended, by id.
        """
        now = time.monotonic()
        is_idle = not any(manager.req_to_blocks for manager in self._first_stage)
        if self._changed or is_idle or now - self._told_at >= EVERY_S:
            self._changed, self._told_at = False, now
            return self.as_dict(requests)
        return None

    def as_dict(self, requests: Mapping[str, Request]) -> dict[str, Any]:
        """JSON-able; by policy name what is counted by policy."""
        held, saved = self._blocks(requests)
        rows = self._policies.names
        return {
            "unshared": {name: self._unshared[row] for name, row in rows if row in self._unshared},
            **{
                key: {name: counts[row] for name, row in rows if row in counts}
                for key, counts in (
                    ("prefix_hit", self._hits),
                    ("prefix_cached", self._cached),
                    ("prefix_states", self._states),
                    ("tokens_drafted", self._drafted),
                    ("tokens_accepted", self._accepted),
                )
            },
            "held": {name: held[row] for name, row in rows if held[row]},
            "saved": {name: saved[row] for name, row in rows if saved[row]},
            "run_in_full": dict(self._in_full),
            **self._latencies.as_dict(rows),
            "stash_waits": self._admission.stash_waits,
            "stash_wait_seconds": self._admission.stash_wait_seconds,
        }

    def _blocks(self, requests: Mapping[str, Request]) -> tuple[list[int], list[int]]:
        """By policy row, blocks held, and how many more stock vLLM would hold.

        That is for the same tokens of the same requests, who share the same prefixes: all groups
        would share what the first stage's do.
        """
        owners, managers = self.owners, self._managers
        if self._debug and owners.total != owners.given_out:
            raise RuntimeError(
                f"{owners.given_out} KV blocks are not free, {owners.total} are counted as held"
            )
        stock, listed = ([0] * self._policies.size for _ in range(2))
        for manager in self._first_stage:
            for kv, _, blocks in _holders(manager, requests):
                listed[kv.row] += len(blocks) + len(kv.undecided) + len(kv.private)
        for kv, request, _ in _holders(self._first_stage[0], requests):
            tokens = request.num_computed_tokens
            stock[kv.row] += sum(cdiv(tokens, manager.block_size) for manager in managers)
        groups, first_stage = range(len(managers)), range(len(self._first_stage))
        held, saved = ([0] * self._policies.size for _ in range(2))
        for _, row in self._policies.names:
            held[row] = sum(owners.held(group, row) for group in groups)
            once = sum(owners.held(group, row) for group in first_stage)
            shared = (listed[row] - once) * len(managers) // len(first_stage)
            saved[row] = stock[row] - shared - held[row]
        return held, saved


def _holders(
    manager: FirstStageKVCacheManager, requests: Mapping[str, Request]
) -> Iterator[tuple[RequestKV, Request, Sequence[KVCacheBlock]]]:
    """The requests that hold blocks of a KV group, and these."""
    for request_id, blocks in manager.req_to_blocks.items():
        if blocks:
            yield manager.requests[request_id], requests[request_id], blocks
