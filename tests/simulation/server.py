"""What a server of the simulation is, what is asked of it, and how one seed of it schedules."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.configs import own_drafts, served, vllm_config, write_config
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig

from simulation.other_layers import Others
from vllm_kvx.cache.group_size import group_layers
from vllm_kvx.policy.beside_server import beside_drafts_ahead
from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.spec import parse_policy

NUM_LAYERS = 8
LORA_SLOTS = 2


@dataclass(frozen=True)
class Server:
    """What a server was started with, and its requests.

    policy, layout: `kv_policy` and `kv_layout`. requests: the policies that requests name.
    max_prompt, max_answer: tokens. stash: `kv_stash_tokens`; 0 where it has none.
    steps: of which in the last fifth nothing new comes.
    repeats: the share of the prompts that are one of the last few.
    others: layers beside the `NUM_LAYERS` that follow policies.
    drafts: tokens that may be drafted for a request in a step.
    drafter: what the model reads where it drafts for itself.
    adapters: LoRA adapters that requests may have; a step has room for `LORA_SLOTS` of them.
    events: whether it publishes KV cache events.
    connector: vLLM's name of its KV connector.
    ranks: of a pipeline, which share the layers out.
    """

    policy: str
    layout: tuple[str, ...]
    requests: tuple[str, ...]
    stash: int = 0
    block_size: int = 4
    max_len: int = 128
    max_prompt: int = 70
    max_answer: int = 25
    steps: int = 300
    repeats: float = 0.25
    others: Others | None = None
    drafts: int = 0
    drafter: str | None = None
    adapters: int = 0
    events: bool = False
    connector: str | None = None
    ranks: int = 1

    @property
    def num_numbered(self) -> int:
        """Layers that policies know of by number."""
        return NUM_LAYERS + (len(self.others.among) if self.others is not None else 0)

    @property
    def num_groups(self) -> int:
        """KV groups."""
        drafter = (self.drafter,) if self.drafter is not None else ()
        layout = layout_of(
            map(parse_policy, (self.policy, *self.layout, *drafter)), self.num_numbered
        )
        sizes = layout.stage_sizes(self.num_numbered)
        if self.others is None:
            return sum(group_layers(sizes).groups_per_stage)
        return self.others.num_groups(sizes, layout.stage_starts)

    @property
    def may_share(self) -> bool:
        """Whether it may have a prefix cache."""
        return self.others is None or self.others.may_share

    @property
    def retrieves(self) -> bool:
        """Whether its contexts are long: shorter ones are read whole."""
        return self.max_len > 128

    @property
    def may_schedule_ahead(self) -> bool:
        """Whether a step may be planned before the outcome of the last one is known."""
        if not self.drafts:
            return True
        named = map(parse_policy, (self.policy, *self.layout, *self.requests))
        alone = self.others is None and self.drafter is None
        return alone and not any(map(beside_drafts_ahead, named))

    def config(self, directory: Path) -> VllmConfig:
        """As the server would be configured, but for what is drawn; see `Case`."""
        stash: dict[str, Any] = {"kv_stash_tokens": self.stash} if self.stash else {}
        others = self.others or Others(0, mode="none")
        drafter = {"method": "ngram", "num_speculative_tokens": self.drafts, "prompt_lookup_max": 2}
        if self.drafter is not None:
            drafter = own_drafts(self.drafts, self.drafter)
        beside: dict[str, Any] = {}
        if self.adapters:
            beside |= dict(enable_lora=True, max_loras=LORA_SLOTS, max_lora_rank=8)
        if self.events:
            published = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            beside |= dict(kv_events_config=published, enable_prefix_caching=True)
        config = vllm_config(
            write_config(directory, **others.model(NUM_LAYERS)),
            served(self.policy),
            additional_config={
                "kv_layout": [served(name) for name in self.layout],
                "kv_debug": True,
                **stash,
            },
            dtype="float32",
            block_size=32,
            max_model_len=self.max_len,
            max_num_seqs=8,
            max_num_batched_tokens=max(128, self.max_len),
            speculative_config=drafter if self.drafts else None,
            **beside,
        )
        # What vLLM refuses in arguments: the simulated attention takes blocks of any size.
        config.cache_config.block_size = self.block_size
        config.cache_config.kv_cache_layout = "LBHNC"  # vLLM's engine asks the backend.
        config.cache_config.mamba_cache_mode = others.mode if others.is_state else "none"
        config.cache_config.mamba_block_size = self.block_size
        if self.connector is not None:
            config.kv_transfer_config = KVTransferConfig(self.connector, kv_role="kv_both")
        config.parallel_config.pipeline_parallel_size = self.ranks
        # vLLM describes no graphs on CPU; the worker here replays some.
        config.compilation_config.max_cudagraph_capture_size = 64
        return config


def long(**kwargs: Any) -> Server:
    """A server that retrieves."""
    defaults: dict[str, Any] = dict(
        block_size=32, max_len=512, max_prompt=300, max_answer=120, steps=340
    )
    return Server(**(defaults | kwargs))


@dataclass(frozen=True)
class Case:
    """How a server of one seed schedules: what all servers have in common.

    max_batch, max_chunk: tokens of a step, and of a prompt in it; 0 for any.
    resets: the chance of a reset of the prefix cache in a step.
    copies_pages: see ``Cache``.
    """

    is_async: bool
    by_priority: bool
    shares_prefixes: bool
    reserves_prompts: bool
    max_seqs: int
    max_batch: int
    max_chunk: int
    num_blocks: int
    resets: float
    copies_pages: bool

    @property
    def retention_interval(self) -> int | None:
        """vLLM's ``prefix_cache_retention_interval``: whether it keeps windows everywhere.

        By default it keeps those that a prompt may go on from. Not drawn by itself, so that seeds
        stay what they were.
        """
        return 0 if self.copies_pages else None

    @classmethod
    def draw(cls, server: Server, rng: random.Random) -> "Case":
        """Long and short chunks; pools that hold one request, or many.

        Priorities come without a prefix cache: where vLLM 0.32 preempts a request that it has
        scheduled in the same step, it leaves blocks in the cache that nobody computes.

        Where tokens are drafted, steps and chunks have room for a request's drafts: vLLM may draft
        for one that has a single token left, and then asserts that all of them run.
        """
        least = server.num_groups * -(-server.max_len // server.block_size) + 2
        scale = 8 if server.retrieves else 1
        by_priority = rng.random() < 0.3
        drafted = 1 + server.drafts if server.drafts else 0
        return cls(
            is_async=rng.random() < 0.75 and server.may_schedule_ahead,
            by_priority=by_priority,
            shares_prefixes=not by_priority and rng.random() < 0.8 and server.may_share,
            reserves_prompts=rng.random() < 0.5,
            max_seqs=rng.choice([4, 8]),
            max_batch=max(rng.choice([3, 5, 12, 24, 64, 128]) * scale, drafted),
            max_chunk=_at_least(rng.choice([0, 0, 0, 2, 7]) * scale, drafted),
            num_blocks=rng.choice([least, least + 10, 2 * least, 4 * least]),
            resets=rng.choice([0, 0.01, 0.2]),
            copies_pages=rng.random() < 0.5,
        )

    def config(self, server: VllmConfig) -> VllmConfig:
        """The server's configuration with this."""
        config = copy.deepcopy(server)
        config.cache_config.enable_prefix_caching = self.shares_prefixes
        config.cache_config.num_gpu_blocks = self.num_blocks
        scheduling = config.scheduler_config
        scheduling.policy = "priority" if self.by_priority else "fcfs"
        scheduling.max_num_seqs = self.max_seqs
        scheduling.max_num_batched_tokens = self.max_batch
        if scheduling.max_num_scheduled_tokens is not None:  # As vLLM has it where it drafts.
            scheduling.max_num_scheduled_tokens = self.max_batch
        scheduling.long_prefill_token_threshold = self.max_chunk
        scheduling.scheduler_reserve_full_isl = self.reserves_prompts
        ranks = config.parallel_config.pipeline_parallel_size
        if config.kv_transfer_config or config.speculative_config or ranks > 1:
            # It says how many steps may be under way, and whether drafts are known to stay.
            scheduling.async_scheduling = self.is_async
        return config


def _at_least(chunk: int, least: int) -> int:
    return max(chunk, least) if chunk else 0
