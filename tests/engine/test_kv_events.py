"""KV cache events of servers whose cached blocks all requests may read: a router is told the truth.

Here the router is an indexer as production-stack's and llm-d's. It sees what a server publishes,
in the form that goes over the wire, and nothing else.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.hybrids import build as build_hybrid
from support import inside, options
from support.adapters import make_adapter
from support.cpu_hybrids import complete_cpu_hybrids
from support.engine import BLOCK, Engine, keep_in_process, running
from support.expected import FULL, Policy, Read, named
from support.nightly import nightly
from support.parity import room_for
from support.prompts import prompt_of

POLICIES: list[Policy] = [
    FULL,
    Keep(kv_rate=0.3),
    Read(Retrieve(64, dense_below=0)),
    Keep(sinks=4, recent=60),
]
ROUNDS = options.turns(8, at_night=80)


class Index:
    """Which blocks a server holds, by its events.

    Blocks have the router's own keys, made of tokens, what comes before them, and adapters: a
    router looks prompts up for which no server has made a hash. `held` has the server's hashes, and
    their KV groups. `several` counts those that had more than one block after a step.
    """

    def __init__(self, is_hybrid: bool = False) -> None:
        """is_hybrid: there are several KV groups, and prompts are not looked up."""
        self.held: set[tuple[int, int]] = set()
        self.several, self._is_hybrid = 0, is_hybrid
        self._keys: dict[int, int] = {}
        self._is_there: Counter[int] = Counter()

    def read(self, batch: bytes) -> None:
        """The events of one step, in their order."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch

        for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                self._is_there.clear()
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    self._remove(each, event.group_idx)
            elif self._is_hybrid:
                self.held.update((each, event.group_idx) for each in event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: Any) -> None:
        parent = event.parent_block_hash
        key = 0 if parent is None else self._keys[parent]
        assert event.block_size == BLOCK and event.group_idx == 0
        extra = event.extra_keys or [None] * len(event.block_hashes)
        for place, each in enumerate(event.block_hashes):
            tokens = event.token_ids[place * BLOCK : (place + 1) * BLOCK]
            key = self._keys[each] = _key(key, tokens, event.lora_name, extra[place])
            if (each, 0) not in self.held:
                self.held.add((each, 0))
                self._is_there[key] += 1

    def _remove(self, each: int, group: int) -> None:
        assert (each, group) in self.held, "it removes what was never there, or twice"
        self.held.remove((each, group))
        if not self._is_hybrid:
            self._is_there[self._keys[each]] -= 1

    def promised(self, prompt: Sequence[int], adapter: str | None) -> int:
        """Leading tokens of the prompt that the server holds, in whole blocks."""
        key = count = 0
        extra = None if adapter is None else [adapter]
        for first in range(0, len(prompt) - BLOCK + 1, BLOCK):
            key = _key(key, prompt[first : first + BLOCK], adapter, extra)
            if not self._is_there[key]:
                break
            count += BLOCK
        return count


def _key(parent: int, tokens: Sequence[int], adapter: str | None, extra: Any) -> int:
    return hash((parent, tuple(tokens), adapter, tuple(extra or ())))


def follow(engine: Engine, is_hybrid: bool = False) -> Index:
    """An index of this engine's events, compared with its prefix cache after every step."""
    index = Index(is_hybrid)

    def compare() -> None:
        assert not engine.pool.kv_event_queue, "not all is published"
        assert index.held == inside.cached_hashes(engine)
        index.several += inside.hashes_of_several_blocks(engine)

    inside.read_events(engine, index.read, compare)
    return index


def own(policy: Policy) -> int:
    """Last prompt tokens that a request computes itself."""
    if policy in (FULL, POLICIES[2]) or getattr(policy, "sinks", None) is not None:
        return 1
    return getattr(policy, "window", 1)


def events() -> dict[str, Any]:
    """An engine's options."""
    from vllm.config import KVEventsConfig

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return {"kv_events_config": config, "enable_prefix_caching": True}


@pytest.fixture
def engine(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A pool that holds a few of the prompts, so that most are compacted in place."""
    keep_in_process(monkeypatch)
    inside.use_dense_ops(monkeypatch)
    with running(
        tiny(),
        named(POLICIES[1]),
        config=room_for(POLICIES),
        enable_lora=True,
        max_lora_rank=8,
        max_model_len=320,
        num_gpu_blocks_override=16,
        max_num_seqs=4,
        **events(),
    ) as engine:
        yield engine


def test_an_index_of_events_is_the_cache(
    engine: Engine, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Texts come again under every policy, some at once; some requests are thrown out, or end.

    What the index promises is found, as far as a policy computes the end of a prompt itself.
    """
    rng = random.Random(0)
    adapter = make_adapter(tiny(), tmp_path / "adapter", 0)
    index, gone = follow(engine), inside.watch_evictions(engine)
    texts = [prompt_of(rng.randrange(70, 290), seed) for seed in range(6)]
    for number in range(ROUNDS):
        asked = []
        for _ in range(5):
            text = rng.choice(texts)
            asked.append(text[: rng.choice([len(text), len(text), 64, 97])])
        policies = rng.choices(POLICIES, k=5)
        adapters = [rng.choice([None, None, adapter]) for _ in asked]
        ids = engine.submit(asked, 5, [named(policy) for policy in policies], adapters)
        engine.step(2)
        if number % 3 == 1:
            engine.throw_out()
        if number % 3 == 2:
            engine.abort(ids[:2])
        engine.finish()
        for text in rng.sample(texts, 2):
            policy, other = rng.choice(POLICIES), rng.choice([None, adapter])
            promised = index.promised(text, None if other is None else other.name)
            most = (len(text) - own(policy)) // BLOCK * BLOCK
            (answer,) = engine.generate([text], 2, [named(policy)], adapters=[other])
            assert answer.cached == min(promised, most), named(policy)
        engine.assert_idle()
    # Retention took blocks out, and some of them were not the last of their hash.
    assert gone and index.several
    assert engine.scheduler.reset_prefix_cache()
    engine.generate([texts[0]], 2, ["full"])
    assert index.held == inside.cached_hashes(engine) and index.held


@nightly
@pytest.mark.parametrize(("name", "blocks"), [("gemma3_text", 40), ("qwen3_next", 60)])
def test_every_group_of_a_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, blocks: int
) -> None:
    """Blocks of windows and of states are vLLM's own, and reported as they come and go."""
    complete_cpu_hybrids(monkeypatch)
    inside.use_dense_ops(monkeypatch)
    rng, texts, hits = random.Random(0), [prompt_of(70 + 50 * seed, seed) for seed in range(5)], 0
    with running(
        build_hybrid(tmp_path / "model", name),
        "full",
        config=room_for(POLICIES),
        max_model_len=320,
        num_gpu_blocks_override=blocks,
        max_num_seqs=4,
        **events(),
    ) as engine:
        index = follow(engine, is_hybrid=True)
        for _ in range(6):
            asked = rng.choices(texts, k=4)
            policies = [named(policy) for policy in rng.choices(POLICIES, k=4)]
            hits += sum(answer.cached for answer in engine.generate(asked, 4, policies))
            engine.assert_idle()
    assert hits and len({group for _, group in index.held}) > 1
