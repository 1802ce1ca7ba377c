"""What the prefix cache keeps: sessions replayed through the scheduler, without a model.

    python -m benchmarks.serving.eviction --summary cpu-eviction

vLLM's scheduler and block pool, and ours, run as in a server; a step takes the time that its FLOPs
and bytes would take on the machine of `SPEED` and `BANDWIDTH`, and every answer is made of zeros.
So hits are what a server with a pool of this size would find, if its steps took that long; no
latency is to be read from this. Each load runs under each eviction (`kv_eviction`) and under stock
vLLM, with the same seeds.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from benchmarks.common.about import about, command_line
from benchmarks.common.files import RESULTS, write_json
from benchmarks.common.names import STOCK, served
from benchmarks.common.pools import pool_of
from benchmarks.engine.compare import prepare_model
from benchmarks.engine.shapes import SHAPES
from vllm_kvx.tools.ideal.shape import Shape

MODEL, BLOCK_SIZE, CHUNK = "llama-3.1-8b", 16, 8192
# Of one H200 as measured: FLOPs/s in prefill, bytes/s in decode. Seconds of every step.
SPEED, BANDWIDTH, OVERHEAD = 5.5e14, 3.4e12, 4e-3


@dataclass(frozen=True)
class Load:
    """Sessions that take turns.

    Attributes:
        blocks: of the pool, 16 tokens each. sessions: that are open at once.
        requests: after which no session asks on. first, last: tokens of a session's first prompt
            and of its longest; `step` are new in each turn, and `answer` generated.
        think: mean seconds between an answer and the next turn.
        stays: the chance that a session goes on after a turn; another one opens in its place.
        once: the chance that such a one asks once and never again.
    """

    blocks: int
    sessions: int
    requests: int
    first: int
    last: int
    step: int
    answer: int = 32
    think: float = 0.0
    stays: float = 1.0
    once: float = 0.0


# The first two are those of plans/turns.toml on one H200.
LOADS = {
    "turns": Load(57362, 16, 320, 8192, 65536, 3018),
    "turns, think 5 s": Load(57362, 16, 320, 8192, 65536, 3018, think=5.0),
    "sessions go on": Load(22000, 16, 400, 2048, 40960, 2048),
    "19 of 20 go on": Load(22000, 16, 400, 2048, 40960, 2048, stays=0.95),
    "19 of 20, think 5 s": Load(22000, 24, 400, 2048, 40960, 2048, think=5.0, stays=0.95),
    "9 of 10, some ask once": Load(14000, 16, 400, 2048, 40960, 2048, stays=0.9, once=0.4),
    "5 of 6 go on": Load(14000, 16, 400, 2048, 40960, 2048, stays=0.85),
    "60, think 0.5 s": Load(57362, 60, 600, 8192, 65536, 3018, think=0.5),
    "60, a pool for few": Load(14000, 60, 600, 2048, 40960, 2048, think=0.5),
    "5 of 6, room for all": Load(57362, 16, 400, 2048, 40960, 2048, stays=0.85),
}


class Session:
    """A conversation: what was said so far, and whether it goes on."""

    def __init__(self, load: Load, number: int, rng: random.Random) -> None:
        self._load, self._rng, self.number = load, rng, number
        self.tokens: list[int] = []
        spread = load.first if load.stays < 1 or load.once else 0
        self._new = load.first + (rng.randrange(spread) if spread else 0)
        self.is_once = rng.random() < load.once

    def ask(self) -> list[int]:
        """The next prompt."""
        count = self._load.step if self.tokens else self._new
        self.tokens += [self._rng.randrange(1, 1 << 30) for _ in range(count)]
        return self.tokens

    def goes_on(self) -> bool:
        """Whether there is a next turn."""
        load = self._load
        is_full = len(self.tokens) + load.step + load.answer > load.last
        return not (self.is_once or is_full) and self._rng.random() < load.stays


class Replay:
    """One server and its sessions."""

    def __init__(
        self, policy: str, eviction: str | None, load: Load, seed: int, model: str
    ) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.load, self._rng = load, random.Random(seed)
        self._shape = SHAPES[MODEL]
        self._scheduler = _scheduler(policy, eviction, load, model, self._shape)
        self.now, self._ids = 0.0, itertools.count()
        self.prompt_tokens = self.hit_tokens = self.preempted = 0
        # When whose session asks next; and by request, its session.
        self._waiting: list[tuple[float, int, Session]] = []
        self._asked: dict[str, Session] = {}

    def run(self) -> dict[str, float]:
        """Tokens of later turns' prompts that the cache had, of all that stood in earlier ones."""
        load, opened = self.load, itertools.count()
        for _ in range(load.sessions):
            self._open(next(opened), self._rng.random() * load.think)
        sent = 0
        while self._waiting or self._asked:
            if not self._asked:
                self.now = max(self.now, self._waiting[0][0])
            while self._waiting and self._waiting[0][0] <= self.now:
                self._send(heapq.heappop(self._waiting)[2])
                sent += 1
            for session in self._step():
                if sent + len(self._waiting) + len(self._asked) >= load.requests + load.sessions:
                    continue
                pause = self._rng.expovariate(1 / load.think) if load.think else 0.0
                if session.goes_on():
                    self._wait(session, pause)
                elif load.stays < 1 or load.once:
                    self._open(next(opened), pause)
        return {
            "hit_rate": self.hit_tokens / self.prompt_tokens,
            "seconds": self.now,
            "preempted": self.preempted,
        }

    def _open(self, number: int, pause: float) -> None:
        self._wait(Session(self.load, number, self._rng), pause)

    def _wait(self, session: Session, pause: float) -> None:
        heapq.heappush(self._waiting, (self.now + pause, next(self._ids), session))

    def _send(self, session: Session) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name, prompt = str(next(self._ids)), session.ask()
        params = SamplingParams(max_tokens=self.load.answer, ignore_eos=True, temperature=0.0)
        self._asked[name] = session
        self._scheduler.add_request(
            Request(
                name, list(prompt), params, None, arrival_time=self.now, block_hasher=self._hasher
            )
        )

    def _step(self) -> Iterator[Session]:
        """One step; sessions that were answered in it."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        output = scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.prompt_tokens += len(new.prompt_token_ids or ())
            self.hit_tokens += new.num_computed_tokens
        self.now += self._seconds(output)
        names = list(output.num_scheduled_tokens)
        sampled = [
            [0]
            if scheduler.requests[n].num_computed_tokens >= scheduler.requests[n].num_tokens
            else []
            for n in names
        ]
        ran = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        for client in scheduler.update_from_output(output, ran).values():
            for each in client.outputs:
                if each.finish_reason is not None:
                    session = self._asked.pop(each.request_id)
                    session.tokens = [*session.tokens, *[0] * self.load.answer]
                    yield session

    def _seconds(self, output: Any) -> float:
        shape, flops, read = self._shape, 0, 0
        per_pair = 4 * shape.heads * shape.head_dim
        for name, count in output.num_scheduled_tokens.items():
            end = self._scheduler.requests[name].num_computed_tokens
            flops += 2 * shape.layers * shape.layer_weights * count
            flops += shape.layers * per_pair * count * (end - count // 2)
            read += end * (count == 1)
        bytes_read = 2 * shape.layers * shape.layer_weights
        bytes_read += 4 * shape.layers * shape.kv_heads * shape.head_dim * read
        return OVERHEAD + max(flops / SPEED, bytes_read / BANDWIDTH)


def _scheduler(policy: str, eviction: str | None, load: Load, model: str, shape: Shape) -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_kvx.cache.kv_cache_specs import policy_kv_cache_specs
    from vllm_kvx.cache.scheduler import PolicyScheduler
    from vllm_kvx.config.settings import KVSettings

    is_stock = policy == STOCK
    settings = {} if is_stock else {"kv_policy": served(policy), "kv_eviction": eviction}
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="float32",  # Which CPU attention takes; nothing is computed.
        max_model_len=load.last + load.answer,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=64,
        block_size=32,
        enable_prefix_caching=True,
        async_scheduling=False,
        additional_config=settings,
    ).create_engine_config()
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = load.blocks
    config.cache_config.kv_cache_layout = "LBHNC"  # The engine asks the attention backend.
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_dim,
        dtype=torch.bfloat16,
    )
    layers: list[Any] = [
        SimpleNamespace(get_kv_cache_spec=lambda _: spec) for _ in range(shape.layers)
    ]
    if not is_stock:
        settings_ = KVSettings.from_vllm_config(config)
        assert settings_ is not None
        policy_kv_cache_specs(layers, settings_)
    specs = {f"layers.{i}.attn": each.get_kv_cache_spec(config) for i, each in enumerate(layers)}
    groups = get_kv_cache_groups(config, specs)
    return (Scheduler if is_stock else PolicyScheduler)(
        vllm_config=config,
        kv_cache_config=pool_of(groups, load.blocks),
        structured_output_manager=MagicMock(),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=False,
    )


def measure(names: list[str], policies: list[str], seeds: int) -> dict[str, Any]:
    """Hit rates by load and server: mean, and of each seed."""
    found: dict[str, Any] = {}
    servers = [(STOCK, None)] + [(p, e) for p in policies for e in ("lru", "adaptive")]
    with tempfile.TemporaryDirectory() as folder:
        _, model = prepare_model(MODEL, Path(folder))
        for name in names:
            load = LOADS[name]
            # Nothing is drawn where all sessions ask at once and go on.
            count = seeds if load.think or load.stays < 1 or load.once else 1
            entry = found[name] = {"load": asdict(load), "servers": {}}
            for policy, eviction in servers:
                runs = [
                    Replay(policy, eviction, load, seed, model["model"]).run()
                    for seed in range(count)
                ]
                label = policy if eviction is None else f"{policy}, {eviction}"
                rates = [round(run["hit_rate"], 4) for run in runs]
                entry["servers"][label] = {
                    "hit_rate": round(statistics.mean(rates), 4),
                    "of_each_seed": rates,
                    "seconds": [round(run["seconds"], 1) for run in runs],
                    "preempted": [run["preempted"] for run in runs],
                }
                print(f"{name}: {label} {json.dumps(entry['servers'][label])}", flush=True)
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving.eviction", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD")
    add("--policies", nargs="+", default=["snapkv:kv_rate=0.1", "full"], help="of one KV stage")
    add("--seeds", type=int, default=5)
    add("--summary", metavar="NAME", help="write benchmarks/results/serving/NAME.json")
    args = parser.parse_args(argv)
    loads = measure(args.loads, args.policies, args.seeds)
    if args.summary:
        what = "Prefix cache hits of sessions by load, under LRU and adaptive eviction; no model."
        head = about(what, command_line("benchmarks.serving.eviction", argv))
        write_json(RESULTS / "serving" / f"{args.summary}.json", {"about": head, "loads": loads})


if __name__ == "__main__":
    main(sys.argv[1:])
