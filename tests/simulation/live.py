"""What requests that run should have in the cache: the expectation that reads are held against.

An entry is an int64. Entries of one layer are equal only if they were made of the same tokens under
the same salt and adapter, which is what requests may share. Where a policy has left something out
on the way, the entry is the request's own, and nobody else's is equal to it.
"""

import zlib
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import NewRequestData

from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import Storage, storage_of

Ints = npt.NDArray[np.int64]

# Odd constants: multiplied in int64 they keep different numbers apart.
_MIX, _OWN = np.int64(0x9E3779B97F4A7C1), 0x3C79AC492BA7B653
NEVER = 1 << 40


class Expected:
    """Every request's entries, in the order of their slots.

    entries: (L, R, N), by layer and request state. lens: (L, R), how many there are.
    """

    def __init__(self, num_layers: int, max_reqs: int, max_len: int) -> None:
        self.entries = np.zeros((num_layers, max_reqs, max_len + 1), dtype=np.int64)
        self.lens = np.zeros((num_layers, max_reqs), dtype=np.int64)

    def append(self, layer: int, requests: Ints, entries: Ints) -> None:
        """One more entry for each of `requests`, (n,) states: those of a request are adjacent."""
        if not len(requests):
            return
        first = np.flatnonzero(np.diff(requests, prepend=-1))
        counts = np.diff(first, append=len(requests))
        places = np.arange(len(requests)) - np.repeat(first, counts)
        self.entries[layer, requests, self.lens[layer, requests] + places] = entries
        self.lens[layer, requests[first]] += counts

    def of(self, layer: int, request: int) -> Ints:
        return self.entries[layer, request, : self.lens[layer, request]]

    def put(self, layer: int, request: int, entries: Ints) -> None:
        """These in the place of all."""
        self.entries[layer, request, : len(entries)] = entries
        self.lens[layer, request] = len(entries)


def begin_chain(under: str) -> list[int]:
    """What the first token follows. under: see ``Text``."""
    return [zlib.crc32(under.encode())]


def extend_chain(chain: list[int], tokens: Iterable[int]) -> None:
    """Appends for each token what it and all before it are."""
    for token in tokens:
        chain.append(hash((chain[-1], token)))


def shared_entries(chained: Ints, layer: int) -> Ints:
    """What a layer makes of tokens where nothing is left out. chained: see `extend_chain`."""
    return chained * _MIX + layer


class Live:
    """A running request.

    Attributes:
        index: its request state. number: of no other request, nor of the same one before it was
            preempted.
        tokens: ids, the sampled ones included, and in a step those that are drafted.
        done: how many of them are computed. known: the same, or with the last step's `rejected`
            ones, which the scheduler may not know of yet.
        prefill_len: how many of them it came with.
        storages: by layer. floor: entries from which on its answer retrieves; dense: in the layers
            from this one on.
        chosen: the tokens that go on, once they are chosen.
        queries: of the window while it is spread over chunks, by slot and layer: by place, the
            positions.
    """

    def __init__(
        self,
        new: NewRequestData,
        index: int,
        number: int,
        policy: KVPolicy,
        under: str,
        storages: list[Storage],
    ) -> None:
        """under: see ``Text``."""
        self.req_id, self.index, self.number = new.req_id, index, number
        self.policy, self.prompt_len, self.storages = policy, new.prompt_len, storages
        self.tokens, self.done = list(new.prefill_token_ids or ()), new.num_computed_tokens
        self.known, self.rejected = self.done, 0
        self.prefill_len = len(self.tokens)
        self.floor = NEVER if policy.retrieve is None else policy.retrieve.floor(0)
        self.dense = 0 if policy.retrieve is None else policy.retrieve.dense_layers
        self.selection = policy.selection(self.prompt_len, len(storages))
        restarts = self.selection is not None and self.selection.resumes_at == 0
        self.is_lossy = policy.is_lossy_decode or restarts
        self.chosen: Ints | None = None
        self.queries: dict[tuple[int, int], dict[int, int]] = {}
        self._prefixes = begin_chain(under)

    def __str__(self) -> str:
        return f"{self.req_id} ({self.policy}, {self.prompt_len} tokens)"

    @property
    def is_shared(self) -> bool:
        """Whether its prompt's entries are what any request's with the same text would be."""
        return self.policy.keeps_prompts and self.policy.projects_from is None

    def reject(self, count: int) -> None:
        """Takes back the last tokens, which were drafted and computed."""
        self.done -= count
        self.rejected = count
        del self.tokens[len(self.tokens) - count :]
        del self._prefixes[len(self.tokens) + 1 :]

    def shared(self, positions: Ints) -> Ints:
        """What the entries at these positions are made of, if nothing is left out before them."""
        known = self._prefixes
        extend_chain(known, self.tokens[len(known) - 1 :])
        return np.array(known, dtype=np.int64)[positions + 1]

    def entries(self, positions: Ints, layer: int, is_own: np.ndarray) -> Ints:
        """What a layer makes of the tokens at these positions. is_own: (n,) bool."""
        shared = shared_entries(self.shared(positions), layer)
        return np.where(is_own, shared ^ np.array([self.number]) * _OWN, shared)

    def state_at(self, position: int) -> int:
        """What the state of a prompt token below the layer that selects is made of."""
        online = self.selection is not None and self.selection.online is not None
        made_of = int(self.shared(np.array([position]))[0])
        # Found online, the layers between compute the prompt for this request alone.
        return made_of ^ self.number if online else made_of

    def is_projected(self, layer: int) -> bool:
        """Whether the layer's prompt entries are projected from below, instead of computed."""
        first = self.policy.projects_from
        return first is not None and layer >= first

    def is_stored(self, positions: Ints, layer: int) -> np.ndarray:
        """(n,) bool: whether the layer stores these positions in a pass over the batch."""
        if self.is_projected(layer):
            return positions >= self.prompt_len
        gap = self.storages[layer].prefill
        if gap.grows:  # The last of these tokens alone, in the place of the one before.
            is_last = positions == positions[-1]
            return (positions < gap.start) | ((positions >= gap.start + gap.size) & is_last)
        in_gap = (positions >= gap.start) & (positions < gap.start + gap.size)
        return ~in_gap | (positions >= self.prompt_len)

    def alone_from(self, layer: int) -> int:
        """The position from which on tokens see nothing before it in windows below `layer`."""
        speed, windows = self.policy.propagate, self.policy.windows
        if not isinstance(speed, Speed) or windows is None or windows.layers[-1] < speed.cutoff:
            return NEVER
        tail = self.prompt_len - speed.tail
        return tail if tail > 0 and layer >= speed.cutoff else NEVER

    def is_own(self, positions: Ints, layer: int) -> np.ndarray:
        """(n,) bool: whether something was left out before the layer at these positions."""
        if self.is_projected(layer):
            return np.ones(len(positions), dtype=bool)
        own = (positions >= self.prompt_len) & self.is_lossy
        own |= positions >= self.alone_from(layer)
        gap, selection = self.storages[layer].prefill, self.selection
        if selection is None:
            # Above a cutoff anchors see all that is before them, and nothing else does.
            return own | (positions >= gap.start) if gap.size or gap.grows else own
        above = self.chosen is not None if selection.online else layer > selection.after
        return own | above

    def stored_len(self, layer: int) -> int:
        """Entries that the layer should hold between steps."""
        online = self.selection.online if self.selection is not None else None
        if online is not None and self.done < self.prompt_len and layer > online.lowest:
            return 0  # It has room for them, and waits for the prompt's end.
        return self.storages[layer].stored_len(self.done)


def storages_of(
    policy: KVPolicy, prompt_len: int, starts: list[int], block_size: int
) -> list[Storage]:
    """What such a request stores, by layer. starts: by layer, the first one of its KV stage."""
    by_start = {
        start: storage_of(policy, prompt_len, start, block_size, len(starts))
        for start in set(starts)
    }
    return [by_start[start] for start in starts]


class Made:
    """The entries that one pass makes of its rows.

    requests, positions: (N,), request state and position of each row. is_again: the tokens run
    again from their ids.
    """

    def __init__(
        self, live: dict[int, Live], requests: Ints, positions: Ints, is_again: bool, is_batch: bool
    ) -> None:
        """live: by request state. is_batch: the rows are of the batch, and some have no slot."""
        self.requests, self.positions = requests, positions
        self._is_again, self._is_batch = is_again, is_batch
        edges = [*np.flatnonzero(np.diff(requests, prepend=-1)).tolist(), len(requests)]
        self._parts = [(live[int(requests[a])], slice(a, b)) for a, b in pairwise(edges)]
        self._shared = np.zeros(len(requests), dtype=np.int64)
        self._numbers = np.zeros(len(requests), dtype=np.int64)
        # By row: from where on it retrieves, and in layers from which one on.
        self.floors = np.full(len(requests), NEVER)
        self.dense = np.zeros(len(requests), dtype=np.int64)
        for one, span in self._parts:
            at = positions[span]
            self._shared[span], self._numbers[span] = one.shared(at), one.number
            self.floors[span] = np.where(at >= one.prompt_len, one.floor, NEVER)
            self.dense[span] = one.dense
        self._shared *= _MIX
        self._numbers *= _OWN
        self._masks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def take_over(self, layer: int, expected: Expected) -> None:
        """Tokens whose gap grows up to them take the slot of the ones before."""
        for one, span in self._parts:
            gap = one.storages[layer].prefill
            if gap.grows and self.positions[span][-1] >= gap.start + gap.size:
                held = expected.lens[layer, one.index]
                expected.lens[layer, one.index] = min(held, gap.start)

    def in_layer(self, layer: int, start: int) -> tuple[Ints, np.ndarray]:
        """(N,) entries, and (N,) bool, whether they are stored. start: of the layer's stage."""
        if start not in self._masks:
            own, stored = np.ones((2, len(self.requests)), dtype=bool)
            for one, span in self._parts:
                if not self._is_again:
                    own[span] = one.is_own(self.positions[span], layer)
                if self._is_batch:
                    stored[span] = one.is_stored(self.positions[span], layer)
            self._masks[start] = own, stored
        own, stored = self._masks[start]
        shared = self._shared + layer
        return np.where(own, shared ^ self._numbers, shared), stored
