"""THE conversion between token positions and stored slots; scheduler and worker both call it.

Logical length is vLLM's and counts every token. In one KV segment of one request a policy may leave
a gap: prompt positions that hold no KV. Everything else is stored in order, so two numbers describe
the segment. Positions and lengths are in tokens; positions count from 0.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_kvx.policy.spec import KVPolicy
from vllm_kvx.policy.speed import Speed

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Gap:
    """Positions [start, start + size) hold no KV; every other position is stored in order."""

    start: int = 0
    size: int = 0

    def stored_len(self, logical_len: int) -> int:
        """How many of the positions below `logical_len` are stored."""
        return logical_len - min(max(logical_len - self.start, 0), self.size)

    def slot(self, position: int) -> int | None:
        """Index of `position` among the request's stored entries; None in the gap."""
        return self.stored_len(position) if self.is_kept(position) else None

    def is_kept(self, position: int) -> bool:
        """True if `position` is stored."""
        return not self.start <= position < self.start + self.size


NO_GAP = Gap()


def gap_of(policy: KVPolicy, prompt_len: int, segment_start_layer: int) -> Gap:
    """The gap that `policy` leaves in the segment that begins at `segment_start_layer`.

    SPEED stores anchors and tail alone from its cutoff on. Policies without a gap, lower segments
    and prompts no longer than anchors + tail give NO_GAP.
    """
    speed = policy.propagate
    if not isinstance(speed, Speed) or segment_start_layer < speed.cutoff:
        return NO_GAP
    size = prompt_len - speed.anchors - speed.tail
    return Gap(speed.anchors, size) if size > 0 else NO_GAP


def stored_len(
    policy: KVPolicy, prompt_len: int, logical_len: int, segment_start_layer: int
) -> int:
    """Entries that the segment stores once `logical_len` tokens of the request are computed."""
    return gap_of(policy, prompt_len, segment_start_layer).stored_len(logical_len)


def stored_lens(logical_lens: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """`Gap(start, size).stored_len(logical_len)` elementwise; int arrays (R,) or broadcastable."""
    return logical_lens - np.minimum(np.maximum(logical_lens - starts, 0), sizes)


def kept_counts(begins: IntArray, ends: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """Stored positions in [begin, end) elementwise; int arrays (R,) or broadcastable."""
    return stored_lens(ends, starts, sizes) - stored_lens(begins, starts, sizes)
