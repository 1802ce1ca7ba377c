"""Which cached prefix a request may read, and what becomes of its own in the cache.

A block in the prefix cache holds, for the layers of its KV group, the entries that stock vLLM
would hold. Who computed it does not matter. A request publishes a group's blocks if it computes
every prompt token in the group's layers, and reads those groups that it would compute in full.
Of layers that it skips it needs the anchors' entries, or the states of tokens that are selected.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, resolve_block_hashes
from vllm.v1.request import Request

from vllm_kvx.cache.admission import in_both
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import PolicyKVCacheManager
from vllm_kvx.cache.messages import PrivateBlocks, StateBlocks
from vllm_kvx.cache.other_groups import OtherGroups, peak_blocks
from vllm_kvx.cache.prefix_eviction import Recency, Rivals
from vllm_kvx.cache.request_kv import RequestKV, anchor_hash
from vllm_kvx.cache.states import StateCache
from vllm_kvx.cache.step_room import StepRoom
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.axes import ScoreSpec
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import Storage, storage_of


class PrefixSharing:
    """The rules of one server, over its managers."""

    def __init__(
        self,
        settings: KVSettings,
        kv_cache_manager: KVCacheManager,
        managers: Sequence[PolicyKVCacheManager],
        config: VllmConfig,
    ) -> None:
        self._settings, self._kv_cache_manager = settings, kv_cache_manager
        self._managers = sorted(managers, key=lambda manager: manager.kv_cache_group_id)
        self._pool, self._block_size = kv_cache_manager.block_pool, managers[0].block_size
        self._stages = settings.layout.stages
        self._is_on = kv_cache_manager.enable_caching
        self._full = [m for m in self._managers if not self._stages[m.stage].slides]
        self._num_groups = len(kv_cache_manager.kv_cache_config.kv_cache_groups)
        self.step_room = StepRoom(self._managers, kv_cache_manager, config)
        self._others = OtherGroups.of(kv_cache_manager.coordinator, self._full)
        if self._others is not None:
            self._others.follow(self._managers[0].requests)
        self._ends = dict(pairwise((*settings.layout.stage_starts, settings.num_layers)))
        # The first layer above the one that selects, of each running request that does.
        self._resumes: dict[str, int] = {}
        # Of these, in the order of arrival, those whose prompt is not in.
        self._coming: dict[str, None] = {}
        # By waiting request, how many blocks of its prompt were cached when it was last looked up.
        self._runs: dict[str, int] = {}
        # By request that was looked up in this step: tokens that it takes, and that are cached.
        self.looked_up: dict[str, tuple[int, int]] = {}
        # By the same requests, see `Recency`.
        self._rivals: dict[str, Rivals | None] = {}
        # Layers of other kinds may come first in the model, and so their groups.
        self._first = next(m.kv_cache_group_id for m in self._managers if m.stage == 0)
        self.recency: Recency | None = None
        if self._is_on and settings.keeps_by_reuse:
            self.recency = Recency(self._pool, group=self._first)
        self.states: StateCache | None = None
        if self._is_on and settings.shares and settings.layout.stash:
            config_of_groups = kv_cache_manager.kv_cache_config
            self.states = StateCache.of(config_of_groups, config, self._pool, self._block_size)

    def add_request(self, request: Request, policy: KVPolicy, row: int) -> list[Storage]:
        """Tells the managers what the request stores and shares; returns what each stage stores.

        row: the policy's, by which blocks are counted.
        """
        prompt_len, num_layers = request.num_prompt_tokens, self._settings.num_layers
        prefix = policy.shared_prefix
        anchors = prefix.anchors if prefix is not None else 0
        publishes, shares = self.publishes(request, policy), self.shares(request, policy)
        projects_from = policy.projects_from
        by_block = policy.retain is not None and policy.retain.unit == "block"
        selection = policy.selection(prompt_len, num_layers)
        if shares and selection is not None:
            self._resumes[request.request_id] = selection.resumes_at
            self.restart(request.request_id)
        size = self._block_size
        storages = [
            storage_of(policy, prompt_len, stage.start, size, num_layers, stage.slides)
            for stage in self._stages
        ]
        # From there on a prompt's tail does not see what is before it, in layers that slide.
        turned = [s.start for s, its in zip(self._stages, storages, strict=True) if its.turn]
        turns_at = min(turned, default=num_layers)
        resumes = self._resumes_of(request, policy)
        for manager in self._managers:
            storage = storages[manager.stage]
            kv = RequestKV(storage, policy, resumes=resumes, by_block=by_block, row=row)
            # Whether every prompt token is computed in the manager's layers, and sees all others.
            is_whole = not (storage.prefill.size or storage.prefill.grows)
            is_whole &= manager.start_layer < turns_at
            end = self._ends[manager.start_layer]
            if selection is not None:
                is_whole = end <= selection.resumes_at
            elif projects_from is not None:
                is_whole = end <= projects_from
            kv.reads = shares and is_whole
            if not (is_whole and publishes):
                kv.publishes = 0
            elif policy.is_lossy_decode:
                # Generated tokens of its own are not what a prompt's would be.
                kv.publishes = prompt_len // size * size
            above = storage.prefill.size > 0 and not self._stages[manager.stage].slides
            if above and kv.publishes == 0 and 0 < anchors <= size and self._is_on:
                kv.anchors = anchors
                kv.anchor_hash = anchor_hash(request, anchors)
                kv.first_hash = next(iter(self._hashes(request)), None)
            manager.add_request(request.request_id, kv)
        return storages

    def _resumes_of(self, request: Request, policy: KVPolicy) -> tuple[int, ...]:
        """Tokens after which this prompt, and one that goes on from it, may take from the cache."""
        limit, grain = self.limit(request, policy) or 0, self._block_size
        if self.states is not None and request.request_id in self._resumes:
            grain = self.states.tokens
        return tuple(tokens // grain * grain for tokens in (limit, request.num_prompt_tokens))

    def publishes(self, request: Request, policy: KVPolicy) -> bool:
        """Whether others may read what such a request computes in full."""
        selection = policy.selection(request.num_prompt_tokens, self._settings.num_layers)
        if not self._settings.shares and (policy.retain is not None or selection is not None):
            return False
        if selection is not None:
            # Found online, the layer is above some that hold nothing until then; and from layer 0
            # on there are no states.
            fits = selection.online is None and self._ends[0] <= selection.resumes_at
            return self.states is not None and fits
        return self._is_on

    def shares(self, request: Request, policy: KVPolicy) -> bool:
        """Whether such a request also reads prefixes of others.

        Entries that are projected from below need the states of all tokens, which nobody keeps.
        """
        return policy.projects_from is None and self.publishes(request, policy)

    def limit(self, request: Request, policy: KVPolicy) -> int | None:
        """Longest prefix that the request may take, in tokens of whole blocks.

        None if its policy cannot share at all. What has to be computed by the request itself: the
        window whose queries score the keys; the tail and all between it and the anchors, which
        layers above hold; and one token, of which the first answer comes.
        """
        if not self.shares(request, policy):
            return None
        prompt_len, prefix = request.num_prompt_tokens, policy.shared_prefix
        end, least = request.num_tokens - 1, 0
        if policy.is_lossy_decode:
            end = min(end, prompt_len)
        if policy.retain is not None:
            by = policy.retain.keeps_by
            window = by.prompt_window if isinstance(by, ScoreSpec) else 0
            end = min(end, prompt_len - window, prompt_len - 1)
        selection = policy.selection(prompt_len, self._settings.num_layers)
        if selection is not None:
            end = min(end, prompt_len - selection.score.window, prompt_len - 1)
        if prefix is not None:
            if prefix.anchors > self._block_size:
                return None
            end, least = min(end, prompt_len - prefix.tail), prefix.anchors
        limit = max(end, 0) // self._block_size * self._block_size
        return limit if limit > least else 0

    def find(self, request: Request, limit: int) -> tuple[KVCacheBlocks, int, int]:
        """The longest cached prefix of at most `limit` tokens: blocks by KV group, and tokens.

        The third is vLLM's ``shared_prefix_boundary``: where a longer prefix ends that only lacks
        windows or states, 0 if none does. vLLM ends a chunk there, so that the next one finds all.
        """
        manager = self._kv_cache_manager
        needed, name = [], request.request_id
        kvs = [m.requests[name] for m in self._managers]
        for each in self._full:
            kv = each.requests[name]
            if kv.reads:
                needed.append(each.kv_cache_group_id)
            elif kv.anchor_hash is not None:
                assert isinstance(each, LaterStageKVCacheManager)
                if each.find_anchors(kv) is None:
                    self.pass_up(request)
                    return manager.empty_kv_cache_blocks, 0, 0
        assert needed, "every request that shares runs the first stage whole"
        hits: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        num_blocks, hashes, size = 0, self._hashes(request), self._block_size
        layer = self._resumes.get(request.request_id)
        if layer is not None and self.states is not None:
            states = self._find_states(request, hashes, layer, limit)
            limit = len(states) * self.states.tokens
        for block_hash in hashes[: limit // size]:
            cached = self._pool.get_cached_block(block_hash, needed)
            if cached is None:
                break
            num_blocks += 1
            for group, block in zip(needed, cached, strict=True):
                hits[group].append(block)
        in_cache = self._run(request, num_blocks)
        grain = size
        if layer is not None and self.states is not None:
            # Whole blocks of states.
            grain = self.states.tokens
            num_blocks = num_blocks * size // grain * grain // size
        theirs: dict[int, list[KVCacheBlock]] = {}
        boundary = 0
        if self._others is not None and num_blocks:
            length = num_blocks * size
            found, theirs = self._others.find(name, request.block_hashes, length, grain)
            if found < length and not self._others.are_drafters:
                boundary = length
            num_blocks = found // size
        if num_blocks * size <= max(kv.anchors for kv in kvs):
            num_blocks, theirs = 0, {}
        hits = [blocks[:num_blocks] for blocks in hits]
        if layer is not None and self.states is not None:
            self.states.hold(name, states[: num_blocks * size // grain])
        self._note_fit(request, hashes, layer, num_blocks, hits, kvs)
        self.looked_up[request.request_id] = num_blocks * size, in_cache * size
        if num_blocks == 0:
            return manager.empty_kv_cache_blocks, 0, boundary
        for group, blocks in theirs.items():
            hits[group] = blocks
        if manager.enable_kv_cache_events:
            report: Any = getattr(request, "kv_cache_report_mode", "incremental")
            if report == "full":  # As vLLM's own lookup does.
                manager.coordinator.emit_cached_block_events(request, tuple(hits))
        return manager.create_kv_cache_blocks(tuple(hits)), num_blocks * size, boundary

    def _note_fit(
        self,
        request: Request,
        hashes: Sequence[BlockHash],
        layer: int | None,
        num_blocks: int,
        hits: Sequence[Sequence[KVCacheBlock]],
        kvs: Sequence[RequestKV],
    ) -> None:
        """Tells managers how much of the prompt may stay in the cache once it is no longer held."""
        if self.recency is None:
            return
        following = [hashes[num_blocks]] if num_blocks < len(hashes) else []
        if layer is not None and self.states is not None:
            following += self.states.following(hashes, layer, num_blocks * self._block_size)
        # What is there, but not of use to this request, is not lost.
        following = [
            each for each in following if not self._pool.get_cached_block(each, [self._first])
        ]
        found = list(chain.from_iterable(hits))
        needed = self._peak_blocks(request) - len(found)
        each_rivals = (self.recency.too_late(each, found, needed) for each in following)
        rivals = next((each for each in each_rivals if each is not None), None)
        self._rivals[request.request_id] = rivals
        for kv in kvs:
            kv.stays = num_blocks if rivals is not None and self.recency.is_strict else None

    def pass_up(self, request: Request) -> None:
        """The request takes nothing of what is cached."""
        self.looked_up[request.request_id] = 0, self._run(request, 0) * self._block_size

    def _run(self, request: Request, known: int) -> int:
        """How many blocks in a row the first stage has in the cache, `known` of them at least.

        A waiting request is looked up in every step. Blocks are evicted from a prefix's end, so
        where the last one that was there still is, so are those before, but where a prompt that
        stays in place took its own first blocks out. It counts for the metrics alone.
        """
        groups = [m.kv_cache_group_id for m in self._managers if m.stage == 0]
        hashes, get = self._hashes(request), self._pool.get_cached_block
        end = (request.num_tokens - 1) // self._block_size
        before = self._runs.get(request.request_id, 0)
        count = known
        if known < before <= end and get(hashes[before - 1], groups) is not None:
            count = before
        while count < end and get(hashes[count], groups) is not None:
            count += 1
        self._runs[request.request_id] = count
        return count

    def _find_states(
        self, request: Request, hashes: Any, layer: int, limit: int
    ) -> list[KVCacheBlock]:
        """The cached states that the request may hold.

        Held blocks are taken from the free ones. Where the whole prompt would not fit beside them
        it runs cold, instead of waiting for ever.
        """
        assert self.states is not None
        self.states.let_go(request.request_id)
        blocks = self.states.find(hashes, layer, limit)
        needed = self._peak_blocks(request) + self._kv_cache_manager.watermark_blocks
        if self._others is not None:
            needed += self._others.peak_blocks(request.num_tokens)
        room = self._pool.get_num_free_blocks() - needed
        return blocks[: max(room, 0)]

    def _peak_blocks(self, request: Request) -> int:
        """Blocks of KV groups of policy stages that the request holds at most on its way."""
        kvs = ((each, each.requests[request.request_id]) for each in self._managers)
        return sum(peak_blocks(m, kv.storage.peak_len(request.num_tokens)) for m, kv in kvs)

    def end_step(
        self, scheduled: dict[str, int], requests: dict[str, Request]
    ) -> dict[str, StateBlocks]:
        """The states that requests of this step read and fill, by request id."""
        if self.states is None:
            return {}
        found: dict[str, StateBlocks] = {}
        for request_id, blocks in self.states.held.items():
            if request_id in scheduled:
                found[request_id] = StateBlocks(tuple(block.block_id for block in blocks))
        for request_id in in_both(self._coming, scheduled):
            count = scheduled[request_id]
            request, layer = requests[request_id], self._resumes[request_id]
            end = min(request.num_computed_tokens, request.num_prompt_tokens)
            if end == request.num_prompt_tokens:
                del self._coming[request_id]
            first = (request.num_computed_tokens - count) // self.states.tokens
            last = end // self.states.tokens
            if (stays := self._managers[0].requests[request_id].stays) is not None:
                last = min(last, stays * self._block_size // self.states.tokens)
            if first < last:
                filled = self.states.publish(self._hashes(request), layer, first, last)
                if filled.write:
                    before = found.get(request_id, StateBlocks())
                    found[request_id] = replace(filled, read=before.read)
        self.states.end_step()
        return found

    def begin_prompts(self, scheduled: Collection[str], requests: Mapping[str, Request]) -> None:
        """Notes the use of their prefixes by requests that were looked up and then scheduled."""
        rivals, self._rivals = self._rivals, {}
        if self.recency is None:
            return
        for request_id in in_both(rivals, scheduled):
            hashes, layer = self._hashes(requests[request_id]), self._resumes.get(request_id)
            asked = [hashes]
            if layer is not None and self.states is not None:
                asked.append(self.states.keys(hashes, layer))
            self.recency.begin_prompt(chain.from_iterable(asked), rivals[request_id])

    def keep_all(self, request_id: str) -> None:
        """What the request gives back stays in the cache as long as it may."""
        for manager in self._managers:
            manager.requests[request_id].stays = None

    @property
    def state_tokens(self) -> int:
        """Tokens of a block of states; 0 where none are kept."""
        return self.states.tokens if self.states is not None else 0

    def restart(self, request_id: str) -> None:
        """The request's prompt comes in, for the first time or again."""
        if request_id in self._resumes:
            self._coming[request_id] = None

    def prompt_is_in(self, request_id: str) -> None:
        """Another server has computed the request's prompt."""
        self._coming.pop(request_id, None)

    def remove_request(self, request_id: str) -> None:
        """Forgets a request that ended."""
        self._resumes.pop(request_id, None)
        self._coming.pop(request_id, None)
        self._runs.pop(request_id, None)
        if self.states is not None:
            self.states.let_go(request_id)

    def private_blocks(self, request_id: str) -> list[PrivateBlocks | None]:
        """Where the entries that the request keeps are copied when it is compacted, by KV group."""
        by_group: list[PrivateBlocks | None] = [None] * self._num_groups
        for manager in self._managers:
            by_group[manager.kv_cache_group_id] = manager.private_blocks(request_id)
        return by_group

    def _hashes(self, request: Request) -> Any:
        hashes, size = request.block_hashes, self._pool.hash_block_size
        return resolve_block_hashes(hashes, size, self._block_size)
