"""How many layers a KV group holds: the choice that pads least, and how vLLM is made to take it.

Needs neither torch nor vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import stored_len

MAX_GROUPS = 8
# Share of the first stage's layers: what padding may cost to stay within MAX_GROUPS.
MAX_FIRST_PADDING = 0.05
# What to do about more groups than that.
FEWER_GROUPS = "have policies cut the model at the same layers, or several layers apart"


@dataclass(frozen=True)
class GroupChoice:
    """How the layers of each stage are shared out to KV groups.

    size: layers that every group holds, padding included.
    groups_per_stage: groups of each stage, lowest first.
    padding_layers: layers that hold no KV, over all groups; first_stage_padding: those of the
    first stage.
    """

    size: int
    groups_per_stage: tuple[int, ...]
    padding_layers: int
    first_stage_padding: int

    @property
    def has_many(self) -> bool:
        """Whether there are more than MAX_GROUPS: every one costs time in every step."""
        return sum(self.groups_per_stage) > MAX_GROUPS

    def says(self, stage_sizes: Sequence[int]) -> str:
        """How the layers of the stages are shared out, as the log says it."""
        layers, groups = (" + ".join(map(str, n)) for n in (stage_sizes, self.groups_per_stage))
        return (
            f"stages of {layers} layers in {groups} KV groups of {self.size} layers, "
            f"{self.padding_layers} padding layers"
        )


def blocks_per_token(
    policy: KVPolicy, prompt_len: int, groups: Sequence[tuple[int, int]], num_layers: int
) -> float:
    """KV blocks that a token of a prompt of `prompt_len` tokens takes under `policy`, on average.

    Once what it drops is dropped.

    groups: first layer of the stage, and tokens of a block, of every KV group.
    """
    settled = prompt_len + policy.num_generated
    return sum(
        stored_len(policy, prompt_len, settled, start, size, num_layers) / prompt_len / size
        for start, size in groups
    )


def choose_group_size(stage_sizes: Sequence[int]) -> GroupChoice:
    """How many layers a KV group holds, given the layers of each stage, lowest first.

    Every group holds the same number of layers, and a stage's last group is padded. The first
    stage holds nearly all KV of a long prompt, so padding costs most there; every group costs a
    block table. Hence: of the sizes that give at most 8 groups with padding of at most 5% of the
    first stage's layers in that stage, the one with the fewest padding layers over all
    stages; if no size does, the one with the fewest padding layers of all sizes. Ties go to
    fewer groups. Raises ValueError unless all stages have layers.
    """
    if not stage_sizes or min(stage_sizes) < 1:
        raise ValueError(f"every stage needs at least one layer, got {tuple(stage_sizes)}")
    choices = [grouped(stage_sizes, size) for size in range(1, max(stage_sizes) + 1)]
    few = [
        choice
        for choice in choices
        if sum(choice.groups_per_stage) <= MAX_GROUPS
        and choice.first_stage_padding <= MAX_FIRST_PADDING * stage_sizes[0]
    ]
    return min(few or choices, key=lambda c: (c.padding_layers, sum(c.groups_per_stage)))


def grouped(stage_sizes: Sequence[int], size: int) -> GroupChoice:
    """The groups and their padding if every one holds `size` layers."""
    groups = tuple(-(-layers // size) for layers in stage_sizes)
    padding = [n * size - layers for n, layers in zip(groups, stage_sizes, strict=True)]
    return GroupChoice(size, groups, sum(padding), padding[0])


def group_layers(stage_sizes: Sequence[int]) -> GroupChoice:
    """The KV groups that vLLM forms for these stages, with the buckets given to it."""
    if buckets_of(stage_sizes) is not None:
        return choose_group_size(stage_sizes)
    return group_by_vllm(stage_sizes)


def group_by_vllm(stage_sizes: Sequence[int]) -> GroupChoice:
    """The KV groups that vLLM forms by itself, of all layers that it stores alike."""
    return grouped(stage_sizes, _vllm_group_size(stage_sizes))


def buckets_of(stage_sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Buckets per stage that make vLLM pick our group size; None where it does without.

    None also where it cannot be made to: vLLM takes the smallest bucket's size unless the largest
    is less than 1.5 times that.
    """
    choice = choose_group_size(stage_sizes)
    if _vllm_group_size(stage_sizes) == choice.size:
        return None
    sizes = [
        layers // n + (i < layers % n)
        for layers, n in zip(stage_sizes, choice.groups_per_stage, strict=True)
        for i in range(n)
    ]
    return choice.groups_per_stage if _vllm_group_size(sizes) == choice.size else None


def _vllm_group_size(bucket_sizes: Sequence[int]) -> int:
    """The rule of ``_get_kv_cache_groups_uniform_page_size`` in vLLM 0.32."""
    small, large = min(bucket_sizes), max(bucket_sizes)
    return large if large < small * 1.5 else small
