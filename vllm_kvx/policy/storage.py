"""THE conversion between token positions and stored slots; scheduler and worker both call it.

Logical length is vLLM's and counts every token. In one KV segment of one request a policy may leave
a gap: prompt positions that hold no KV. Everything else is stored in order, so two numbers describe
the segment. The gap may change once, when the prompt is in: then entries chosen by saliency appear
or go, and only their count is known here. Positions and lengths are in tokens; positions count
from 0.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.policy.parameters import Select
from vllm_kvx.policy.spec import KVPolicy

IntArray = npt.NDArray[np.integer]

# Tokens of a stash page; a prompt takes whole pages.
STASH_PAGE = 64


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


@dataclass(frozen=True)
class Storage:
    """What one segment stores of one request, before and after its prompt is in.

    prompt_len: N.
    prefill: the gap until position N - 1 is computed.
    rows: entries at the end of the step that computes it, before retention; the most ever held
        of the prompt.
    decode: the gap from then on. Positions below N have no slot of their own any more if it
        differs from `prefill`: the entries that stayed are the first `kept` ones.
    """

    prompt_len: int
    prefill: Gap = NO_GAP
    rows: int = 0
    decode: Gap = NO_GAP

    @property
    def kept(self) -> int:
        """Entries of the prompt that stay."""
        return self.prompt_len - self.decode.size

    @property
    def changes(self) -> bool:
        """True if entries appear or go when the prompt is in: then no step may cross its end."""
        return self.prefill != self.decode

    @property
    def compacts(self) -> bool:
        """True if entries go when the prompt is in."""
        return self.kept < self.rows

    def stored_len(self, logical_len: int) -> int:
        """Entries once `logical_len` tokens are computed and retention has run."""
        gap = self.prefill if logical_len < self.prompt_len else self.decode
        return gap.stored_len(logical_len)

    def peak_len(self, logical_len: int) -> int:
        """The most entries held on the way to `logical_len`."""
        stored = self.stored_len(logical_len)
        return stored if logical_len < self.prompt_len else max(stored, self.rows)


def storage_of(
    policy: KVPolicy, prompt_len: int, segment_start_layer: int, block_size: int
) -> Storage:
    """What `policy` stores in the segment that begins at `segment_start_layer`.

    SPEED stores anchors and tail alone from its cutoff on; retention leaves them alone. Above the
    layer that selects by saliency (FastKV, StructKV), if it is known, only the selected tokens are
    stored, all at once when the prompt is in. Retention keeps at most its cap of what a layer
    computed, or whole blocks of `block_size` entries.
    """
    gap, rows = NO_GAP, prompt_len
    if isinstance(policy.propagate, Speed):
        gap = gap_of(policy, prompt_len, segment_start_layer)
        rows = prompt_len - gap.size
        if gap.size:
            return Storage(prompt_len, gap, rows, gap)
    else:
        selector = selector_of(policy, prompt_len)
        # Where the layer is found online any may compute every token.
        known = selector is not None and not selector.is_online
        if selector is not None and known and segment_start_layer > selector.last_full_layer:
            rows = selector.num_propagated(prompt_len)
            gap = Gap(0, prompt_len)
    kept = rows
    if policy.retain is not None:
        kept = policy.retain.kept(prompt_len, rows, block_size)
    if kept == prompt_len:
        return Storage(prompt_len, gap, rows, NO_GAP)
    return Storage(prompt_len, gap, rows, Gap(kept, prompt_len - kept))


def selector_of(policy: KVPolicy, prompt_len: int) -> Select | None:
    """What chooses by saliency the tokens of such a prompt that go on; None if all do."""
    propagate = policy.propagate
    if isinstance(propagate, Select) and propagate.num_propagated(prompt_len) < prompt_len:
        return propagate
    return None


def gap_of(policy: KVPolicy, prompt_len: int, segment_start_layer: int) -> Gap:
    """The gap that `policy` leaves by position in the segment that begins at that layer.

    SPEED stores anchors and tail alone from its cutoff on. Other policies, lower segments and
    prompts no longer than anchors + tail give NO_GAP.
    """
    speed = policy.propagate
    if not isinstance(speed, Speed) or segment_start_layer < speed.cutoff:
        return NO_GAP
    size = prompt_len - speed.anchors - speed.tail
    return Gap(speed.anchors, size) if size > 0 else NO_GAP


def stored_len(
    policy: KVPolicy,
    prompt_len: int,
    logical_len: int,
    segment_start_layer: int,
    block_size: int,
) -> int:
    """Entries that the segment stores once `logical_len` tokens of the request are computed."""
    storage = storage_of(policy, prompt_len, segment_start_layer, block_size)
    return storage.stored_len(logical_len)


def stored_lens(logical_lens: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """`Gap(start, size).stored_len(logical_len)` elementwise; int arrays (R,) or broadcastable."""
    return logical_lens - np.minimum(np.maximum(logical_lens - starts, 0), sizes)


def kept_counts(begins: IntArray, ends: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """Stored positions in [begin, end) elementwise; int arrays (R,) or broadcastable."""
    return stored_lens(ends, starts, sizes) - stored_lens(begins, starts, sizes)


def stash_pages(num_tokens: int) -> int:
    """Stash pages that the hidden states of `num_tokens` prompt tokens take."""
    return -(-num_tokens // STASH_PAGE)
