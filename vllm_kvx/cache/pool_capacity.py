"""What the KV pool holds under a policy, against stock vLLM in the same memory."""

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from vllm_kvx.cache.group_size import blocks_per_token
from vllm_kvx.cache.kv_cache_specs import (
    DraftAttentionSpec,
    FirstStageAttentionSpec,
    LaterStageAttentionSpec,
    SlidingStageSpec,
    tail_bytes,
)
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import storage_of

# In the place of a stage's number, of KV groups that are vLLM's own: of windows, states and draft
# models.
VLLMS_OWN = -1


def stage_of(spec: object) -> tuple[int, int]:
    """Index and first layer of the KV stage that a KV group's spec belongs to."""
    if isinstance(spec, LaterStageAttentionSpec | SlidingStageSpec):
        return spec.stage, spec.start_layer
    return (0 if isinstance(spec, FirstStageAttentionSpec) else VLLMS_OWN), 0


def layer_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec of a KV group's layers, which differ only in their entries' dtype, if at all.

    Where some skip a quantized cache vLLM wraps the specs of all in one, on workers alone. It is
    that of the lowest layer then, as on the scheduler.
    """
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def policy_groups(config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """The KV groups of policy layers."""
    return [
        group
        for group in config.kv_cache_groups
        if isinstance(layer_spec(group), FirstStageAttentionSpec | LaterStageAttentionSpec)
    ]


@dataclass(frozen=True)
class PoolTokens:
    """Prompt tokens that fit, of prompts far longer than anchors and tail.

    Attributes:
        num_blocks: blocks of the pool, vLLM's null block included.
        policy: tokens under the server's policy.
        stock: tokens that stock vLLM would hold in the same memory.
    """

    num_blocks: int
    policy: int
    stock: int

    def lines(self, policy: str, max_model_len: int, whole: int | None) -> list[str]:
        """What the log says, beside vLLM's own line, of a server whose policy is `policy`.

        max_model_len: tokens. whole: the tokens of vLLM's line, None if it has none.
        """
        lines = [
            f"KV pool: {self.num_blocks:,} blocks hold {self.policy:,} prompt tokens under "
            f"{policy} once prompts are in: {self.policy / max_model_len:.2f} prompts of "
            f"--max-model-len {max_model_len:,}, and {self.policy / max(self.stock, 1):.2f}x the "
            f"{self.stock:,} tokens of stock vLLM in the same memory."
        ]
        if whole is not None:
            lines.append(
                f'KV pool: the "KV cache size: {whole:,} tokens" of vLLM\'s line are tokens that '
                "every layer stores: those of requests under full, and generated ones under any "
                "policy. Plan long answers by it, and long prompts by the line above."
            )
        return lines


def pool_tokens(config: KVCacheConfig, settings: KVSettings, prompt_len: int) -> PoolTokens:
    """Counts of prompts of `prompt_len` tokens, from the groups that vLLM formed, with padding."""
    usable, groups = config.num_blocks - 1, policy_groups(config)
    # Of a pipeline the layers are those of one rank, which holds its part of every block.
    num_layers = sum(len(group.layer_names) for group in groups)
    needed = blocks_per_token(
        settings.policy,
        prompt_len,
        [(stage_of(layer_spec(group))[1], group.kv_cache_spec.block_size) for group in groups],
        settings.num_layers,
    )
    group_layers = max(len(group.layer_names) for group in config.kv_cache_groups)
    spec = layer_spec(groups[0])
    # Stock pages have no sidecar. Those of layers that skip a quantized cache are larger, sidecars
    # are not.
    stock_blocks = usable
    if isinstance(spec, AttentionSpec):
        block = config.kv_cache_tensors[0].size // config.num_blocks
        beside = spec.page_size_bytes - spec.unpadded_page_size_bytes
        sidecars = group_layers * (beside - tail_bytes(spec, of_sidecar=0))
        stock_blocks = usable * block // (block - sidecars)
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    beside, beside_stock = (
        sum(_blocks_beside(spec, prompt_len, policy, settings.num_layers) for spec in specs)
        for policy in (settings.policy, KVPolicy())
    )
    of_stock = num_layers / (spec.block_size * group_layers)
    return PoolTokens(
        num_blocks=config.num_blocks,
        policy=int(usable / (needed + beside / prompt_len)),
        stock=int(stock_blocks / (of_stock + beside_stock / prompt_len)),
    )


def _blocks_beside(spec: object, prompt_len: int, policy: KVPolicy, num_layers: int) -> int:
    """Blocks that a prompt holds in a KV group of no policy layers.

    Those of a window, of states, or of a drafter.
    """
    if isinstance(spec, SlidingWindowSpec):
        held = prompt_len
        if isinstance(spec, SlidingStageSpec):
            where = spec.start_layer, spec.block_size, num_layers
            held = storage_of(policy, prompt_len, *where, slides=True).kept
        return cdiv(min(held, spec.sliding_window), spec.block_size) + 1
    if isinstance(spec, DraftAttentionSpec):
        return cdiv(prompt_len, spec.block_size)
    # The state that runs, and the one before it.
    return 2 if isinstance(spec, MambaSpec) else 0
