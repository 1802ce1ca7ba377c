"""A router that follows a server by its KV cache events, as they go over the wire.

It knows texts and what they are computed under, and nothing else of the server. What it believes to
be there is held against what is in the blocks, and what it promises against what requests find.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.msgpack import Encoder, decode
from support import inside
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.request import Request

from simulation.cache import Cache, Mismatch
from simulation.live import begin_chain, extend_chain, shared_entries
from simulation.traffic import made_under


class Router:
    """One KV group's events.

    counts: how often what happened.
    """

    def __init__(self, scheduler: Any, cache: Cache, num_layers: int) -> None:
        self._pool = scheduler.kv_cache_manager.block_pool
        self._cache, self._num_layers = cache, num_layers
        self._encode = Encoder().encode
        # By the server's hash of a block, what its tokens are made of; see `extend_chain`.
        self._held: dict[Any, list[int]] = {}
        # The same of all that were ever stored, since blocks follow such as are gone.
        self._known: dict[Any, list[int]] = {}
        # How many hashes that are held stand for a text that ends so.
        self._ends = Counter[int]()
        self._read = 0  # Of the events that wait to be published.
        self.counts = Counter[str]()
        self._find = scheduler.sharing.find
        scheduler.sharing.find = self._found
        scheduler.kv_event_publisher.publish = self._published

    def check(self) -> None:
        """After a step.

        Raises:
            Mismatch: a block that may be read was never announced, or has been removed; or one that
                was announced is not there, or holds anything but what the event said.
        """
        self._look()
        cached = inside.cached_blocks(self._pool)
        if self._held.keys() != cached.keys():
            unsaid, untrue = cached.keys() - self._held.keys(), self._held.keys() - cached.keys()
            raise Mismatch(f"cached, and not announced: {unsaid}; announced, and gone: {untrue}")
        pairs = [(self._held[each], block) for each, blocks in cached.items() for block in blocks]
        self.counts["further blocks of a hash"] += len(pairs) - len(cached)
        if not pairs:
            return
        made_of = np.array([chain for chain, _ in pairs], dtype=np.int64)
        tables = np.array([[block] for _, block in pairs], dtype=np.int64)
        places = np.arange(self._cache.block_size)
        for layer in range(self._num_layers):
            wrong = self._cache.read(layer, tables, places) != shared_entries(made_of, layer)
            if wrong.any():
                block = int(tables[wrong.any(axis=1)][0, 0])
                raise Mismatch(f"block {block}, layer {layer}, holds other than was announced")

    def promised(self, tokens: Sequence[int], under: str) -> int:
        """Leading tokens of such a text that are there, in whole blocks. under: see ``Text``."""
        size, chain = self._cache.block_size, begin_chain(under)
        extend_chain(chain, tokens)
        ends = range(size, len(tokens) + 1, size)
        return next((end - size for end in ends if not self._ends[chain[end]]), len(ends) * size)

    def _found(self, request: Request, limit: int) -> Any:
        """In place of the server's lookup, whose outcome it compares."""
        found, size = self._find(request, limit), self._cache.block_size
        self._look()
        lora = request.lora_request
        under = made_under(request.cache_salt, None if lora is None else lora.lora_name)
        promised = min(self.promised(request.all_token_ids, under), limit // size * size)
        if found[1] != promised:
            raise Mismatch(
                f"{request.request_id} finds {found[1]} tokens under {under!r}, promised {promised}"
            )
        self.counts["promises kept"] += promised > 0
        return found

    # Events.

    def _published(self, batch: KVEventBatch) -> None:
        if len(batch.events) < self._read:
            raise Mismatch(f"of {self._read} events {len(batch.events)} are published")
        self._take(batch.events[self._read :])
        self._read = 0

    def _look(self) -> None:
        """At those to come, in their order: a server publishes them once a step has ended."""
        waiting = self._pool.kv_event_queue
        self._take(waiting[self._read :])
        self._read = len(waiting)

    def _take(self, events: Sequence[Any]) -> None:
        sent = self._encode(KVEventBatch(ts=0.0, events=list(events)))
        for event in decode(sent, type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.counts["cleared"] += 1
                self._held.clear()
                self._ends.clear()
            elif isinstance(event, BlockRemoved):
                self.counts["removed"] += len(event.block_hashes)
                for each in event.block_hashes:
                    if each not in self._held:
                        raise Mismatch(f"{each} is removed, and was never there, or is twice")
                    self._ends[self._held.pop(each)[-1]] -= 1
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = self._cache.block_size, event.parent_block_hash
        extra: Sequence[Any] = event.extra_keys or [None] * len(event.block_hashes)
        # As keys begin with the adapter; the first block's have the salt besides.
        of_all = () if event.lora_name is None else (event.lora_name,)
        salt = tuple(extra[0] or ())[len(of_all) :] if parent is None else ()
        wanted = [of_all + (salt if number == 0 else ()) for number in range(len(extra))]
        if (event.block_size, event.group_idx) != (size, 0) or [
            tuple(each or ()) for each in extra
        ] != wanted:
            raise Mismatch(f"an event that no router can read: {event}")
        under = made_under(salt[0] if salt else None, event.lora_name)
        end = begin_chain(under)[0] if parent is None else self._known[parent][-1]
        for number, each in enumerate(event.block_hashes):
            chain = [end]
            extend_chain(chain, event.token_ids[number * size : (number + 1) * size])
            end = chain[-1]
            self.counts["stored"] += 1
            if each not in self._held:
                self._ends[end] += 1
            self._held[each] = self._known[each] = chain[1:]
