"""How many layers a KV group holds: the choice that pads least, and how vLLM is made to take it."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8
# Share of the first stage's layers: what padding may cost to stay within MAX_GROUPS.
MAX_FIRST_PADDING = 0.05


@dataclass(frozen=True)
class GroupChoice:
    """How the layers of each segment are shared out to KV groups.

    size: layers that every group holds, padding included.
    groups_per_segment: groups of each segment, lowest first.
    padding_layers: layers that hold no KV, over all groups; first_segment_padding: those of the
    first segment.
    """

    size: int
    groups_per_segment: tuple[int, ...]
    padding_layers: int
    first_segment_padding: int


def choose_group_size(segment_sizes: Sequence[int]) -> GroupChoice:
    """How many layers a KV group holds, given the layers of each segment, lowest first.

    Every group holds the same number of layers, and a segment's last group is padded. The lower
    layers hold nearly all KV of a long prompt, so padding costs most there; every group costs a
    block table. Hence: of the sizes that give at most 8 groups with padding of at most 5% of the
    first segment's layers in that segment, the one with the fewest padding layers over all
    segments; if no size does, the one with the fewest padding layers of all sizes. Ties go to
    fewer groups. Raises ValueError unless all segments have layers.
    """
    if not segment_sizes or min(segment_sizes) < 1:
        raise ValueError(f"every segment needs at least one layer, got {tuple(segment_sizes)}")
    choices = [grouped(segment_sizes, size) for size in range(1, max(segment_sizes) + 1)]
    few = [
        choice
        for choice in choices
        if sum(choice.groups_per_segment) <= MAX_GROUPS
        and choice.first_segment_padding <= MAX_FIRST_PADDING * segment_sizes[0]
    ]
    return min(few or choices, key=lambda c: (c.padding_layers, sum(c.groups_per_segment)))


def grouped(segment_sizes: Sequence[int], size: int) -> GroupChoice:
    """The groups and their padding if every one holds `size` layers."""
    groups = tuple(-(-layers // size) for layers in segment_sizes)
    padding = [n * size - layers for n, layers in zip(groups, segment_sizes, strict=True)]
    return GroupChoice(size, groups, sum(padding), padding[0])


def group_layers(segment_sizes: Sequence[int]) -> GroupChoice:
    """The KV groups that vLLM forms for these segments, with the buckets given to it."""
    if buckets_of(segment_sizes) is not None:
        return choose_group_size(segment_sizes)
    return grouped(segment_sizes, _vllm_group_size(segment_sizes))


def buckets_of(segment_sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Buckets per segment that make vLLM pick our group size; None where it does without.

    None also where it cannot be made to: vLLM takes the smallest bucket's size unless the largest
    is less than 1.5 times that.
    """
    choice = choose_group_size(segment_sizes)
    if _vllm_group_size(segment_sizes) == choice.size:
        return None
    sizes = [
        layers // n + (i < layers % n)
        for layers, n in zip(segment_sizes, choice.groups_per_segment, strict=True)
        for i in range(n)
    ]
    return choice.groups_per_segment if _vllm_group_size(sizes) == choice.size else None


def _vllm_group_size(bucket_sizes: Sequence[int]) -> int:
    """The rule of ``_get_kv_cache_groups_uniform_page_size`` in vLLM 0.32."""
    small, large = min(bucket_sizes), max(bucket_sizes)
    return large if large < small * 1.5 else small
