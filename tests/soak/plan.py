"""What the soak asks for: conversations under mixed policies, with faults that are drawn before.

Everything follows from a seed. A conversation's next prompt holds the prompt and the answer before
it, so it is known once each request was run alone.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import options
from support.adapters import RANK, make_adapter
from support.configs import own_drafts, speculative
from support.models import LOOKUP
from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt

LAYERS, BLOCK = 8, 32
MAX_LEN = 640
LONGEST_PROMPT = 460
# The model drafts for itself where all entries stay, in all layers.
DRAFTS_ITSELF = options.soak_drafts()[0] == "kvx"
# Those of one layout: a split at layer 4, a stash, windows of 8, and a sidecar of 1-bit keys.
_OF_TWO_STAGES = (
    "full",
    "speed-4",
    "speed-4:anchors=2,tail=3",
    "fastkv:tsp_layer=3,kv_rate=0.3,kv_floor=0",
    "fastkv:tsp_layer=3,tsp_rate=0.5,kv_budget=64,tsp_floor=0",
    "structkv:pivot=3,kv_rate=0.4,kv_floor=0",
    "snapkv:kv_rate=0.25,kv_floor=0",
    "snapkv:kv_budget=96",
    "streamingllm:sinks=4,recent=60",
    "knorm:kv_rate=0.5,kv_floor=0",
    "fier-64:dense_below=0",
    "speed-4+fier-96:dense_below=0",
    "snapkv:kv_rate=0.5,kv_floor=0+fier-64:dense_below=0",
)
_WHOLE = ("full", "fier-64:dense_below=0", "fier-96:dense_below=0", "fier-128:dense_below=200")
# Those that propagate refuse KV cache events.
_OF_ONE_STAGE = tuple(
    name for name in _OF_TWO_STAGES if not name.startswith(("speed", "fastkv", "structkv"))
)
# Layers above the split have blocks of their own.
KV_GROUPS = 1 if DRAFTS_ITSELF or options.soak_events() else 2
POLICIES = _WHOLE if DRAFTS_ITSELF else _OF_ONE_STAGE if KV_GROUPS == 1 else _OF_TWO_STAGES
SERVER_POLICY, ROOM = POLICIES[1], (*POLICIES[0:1], *POLICIES[2:])


def adapters_of(folder: Path) -> list[Path]:
    """Writes the run's LoRA adapters of the checkpoint to `folder`; none unless told."""
    count = options.soak_adapters()
    return [make_adapter(LOOKUP, folder / f"adapter-{seed}", seed) for seed in range(count)]


def with_adapters() -> dict[str, Any]:
    """An engine's options, by which its adapters take turns in one slot."""
    if not options.soak_adapters():
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}


def with_drafts() -> dict[str, Any]:
    """An engine's options under load; alone, requests have no drafts."""
    method, count = options.soak_drafts()
    config = own_drafts(count) if method == "kvx" else speculative(count)
    return {"speculative_config": config} if count else {}


def with_events() -> dict[str, Any]:
    """The options of an engine whose KV cache events are read."""
    from vllm.config import KVEventsConfig

    if not options.soak_events():
        return {}
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return {"kv_events_config": config}


@dataclass
class Turn:
    """One request.

    adapter: by number, of those that the run has; None: the base model.
    adds: tokens that follow what was said before. policy: by name. max_tokens: of the answer.
    abort_after: engine steps, or answer tokens of a client, after which it is given up; None to
    wait for the answer.
    prompt, answer, gaps: known once it was run alone; gaps: by token, how much likelier it was than
    the next one, in nats.
    """

    adds: list[int]
    policy: str
    max_tokens: int
    abort_after: int | None
    adapter: int | None = None
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def conversations(count: int, seed: int) -> list[list[Turn]]:
    """Of `count` requests together; half of the conversations have one turn.

    Half of them begin with the same document, which a prefix cache shares.
    """
    # Adapters are drawn apart: a run without them asks for the same.
    adapters, of_talks = options.soak_adapters(), random.Random(seed)
    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(LOOKUP)
    document = tokenizer(make_prompt(0, 140, tokenizer)[0]).input_ids
    found: list[list[Turn]] = []
    left = count
    while left:
        turns = min(rng.choice((1, 1, 1, 2, 3, 4)), left)
        left -= turns
        lengths = [rng.randint(48, LONGEST_PROMPT // 2 if turns > 1 else LONGEST_PROMPT)]
        lengths += [rng.randint(8, 56) for _ in range(turns - 1)]
        begin = document if rng.random() < 0.5 else []
        lengths[0] = min(lengths[0], LONGEST_PROMPT - len(begin))
        policy = rng.choice(POLICIES)
        adapter = of_talks.choice([None, *range(adapters)])
        talk: list[Turn] = []
        for length in lengths:
            text, _ = make_prompt(rng.randrange(1 << 30), max(length, 48), tokenizer)
            ids = ([] if talk else begin) + tokenizer(text).input_ids[-length:]
            # Most clients keep to a policy.
            name = policy if rng.random() < 0.7 else rng.choice(POLICIES)
            abort = rng.randint(0, 12) if rng.random() < 0.2 else None
            # Most answers are short; the others grow into further blocks.
            most = rng.randint(1, 8) if rng.random() < 0.85 else rng.randint(9, 32)
            talk.append(Turn(ids, name, most, abort, adapter))
        found.append(talk)
    return found


@dataclass
class Comparison:
    """How answers under load compare with those of the same requests alone.

    near_ties: requests that differ first where alone two tokens were equally likely but for
    rounding.
    """

    equal: int = 0
    near_ties: int = 0
    mismatches: list[str] = field(default_factory=list)

    def add(self, turn: Turn, tokens: list[int]) -> None:
        """One finished answer; tokens: as far as it came."""
        if tokens == turn.answer:
            self.equal += 1
            return
        pairs = zip(tokens, turn.answer, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None and turn.gaps and turn.gaps[first] < 1e-3:
            self.near_ties += 1
            return
        self.mismatches.append(
            f"{turn.policy}, {len(turn.prompt)} tokens: {tokens} under load, {turn.answer} alone"
        )
