"""Layouts: which KV groups a server has, fixed when the engine starts, and what fits into them."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_kvx.policy.methods.fier import FIER
from vllm_kvx.policy.methods.quest import Quest
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.parameters import Retain, Retrieve, Select
from vllm_kvx.policy.spec import KVPolicy, PolicyError

MAX_GROUPS = 8
# Share of the first segment's layers: what padding may cost to stay within MAX_GROUPS.
MAX_FIRST_PADDING = 0.05


@dataclass(frozen=True)
class RetrievalLayout:
    """What the server's pages hold for retrieval, and what its decode steps do with it.

    has_codes: 1-bit keys (FIER), or bounds alone (Quest). group: tokens of a group, or a page.
    reduction: see ``equations.retrieval``. max_units: units that a step may read at most.
    """

    has_codes: bool
    group: int
    reduction: str
    max_units: int

    @classmethod
    def of(cls, method: Retrieve) -> "RetrievalLayout":
        """What `method` needs."""
        return cls(method.has_codes, method.group_tokens, method.reduction, method.budget_units)

    @property
    def unit(self) -> int:
        """Tokens that are read together."""
        return 1 if self.has_codes else self.group

    def is_like(self, other: "RetrievalLayout") -> bool:
        """Whether pages and reduction are those of `other`; budgets may differ."""
        return replace(self, max_units=other.max_units) == other

    def fits(self, other: "RetrievalLayout | None") -> bool:
        """Whether a server laid out like `other` can do this."""
        return other is not None and self.is_like(other) and self.max_units <= other.max_units

    def nearest(self, method: Retrieve) -> Retrieve:
        """What a server laid out like this can do in the place of `method`."""
        budget = min(max(method.budget, self.group), self.max_units * self.unit)
        near = FIER if self.has_codes else Quest
        return near(budget, self.group, self.reduction, method.dense_below)

    def __str__(self) -> str:
        what = "1-bit keys in groups" if self.has_codes else "bounds of pages"
        budget = self.max_units * self.unit
        return f"{what} of {self.group} tokens ({self.reduction}, budgets of up to {budget})"


@dataclass(frozen=True)
class Layout:
    """Where KV groups begin.

    splits: sorted layers, above 0 and below the number of layers, where a new segment begins.
    sidecar: what KV pages hold beside their entries for retrieval; None without.
    retain: True if entries can be dropped once a prompt is in.
    window: the longest window whose queries may score keys; 0 if no policy scores any.
    stash: True if hidden states of prompts can be kept until their last chunk selects some.
    cuts: sorted layers where a pass may begin or end that finds its pivot online; these cut no KV
        group.
    """

    splits: tuple[int, ...]
    sidecar: RetrievalLayout | None = None
    retain: bool = False
    window: int = 0
    stash: bool = False
    cuts: tuple[int, ...] = ()

    def segment_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Layers in each segment, lowest first: splits (24,) of 32 layers are (24, 8)."""
        edges = (0, *self.splits, num_layers)
        return tuple(end - begin for begin, end in itertools.pairwise(edges))

    def __str__(self) -> str:
        groups = f"KV groups split at {_layers(self.splits)}" if self.splits else "no split"
        retain = ", retention" if self.retain else ""
        window = f", windows of up to {self.window} tokens" if self.window else ""
        stash = ", a stash" if self.stash else ""
        cuts = f", online pivots at {_layers([c - 1 for c in self.cuts])}" if self.cuts else ""
        sidecar = f"a sidecar of {self.sidecar}" if self.sidecar else "no sidecar"
        return f"{groups}, {sidecar}{retain}{window}{stash}{cuts}"


def layout_of(policies: Iterable[KVPolicy], num_layers: int) -> Layout:
    """The smallest layout that all `policies` fit.

    Raises PolicyError for a policy that a model of `num_layers` layers cannot run, or whose split
    depends on a layer still to be calibrated (put the layer's number into the policy first), and
    for policies that need different sidecars.
    """
    splits: set[int] = set()
    cuts: set[int] = set()
    sidecar: RetrievalLayout | None = None
    owner: KVPolicy | None = None  # of the sidecar
    retain, stash, window = False, False, 0
    for policy in policies:
        policy.check_model(num_layers)
        retain |= policy.retain is not None
        for part in policy.parts:
            # A method may propagate only after the last layer: nothing lies above that split.
            above = {layer for layer in part.splits() if layer < num_layers}
            splits |= above
            if isinstance(part, Retrieve):
                needed = RetrievalLayout.of(part)
                if sidecar is not None and not needed.is_like(sidecar):
                    raise PolicyError(
                        f"one server holds one sidecar, but {owner} needs one of {sidecar}, and "
                        f"{policy} one of {needed}: give them the same method, group or page, and "
                        "reduction, or each a server of its own"
                    )
                if not needed.fits(sidecar):
                    sidecar, owner = needed, policy
            stash |= part is policy.propagate and isinstance(part, Select) and bool(above)
            if isinstance(part, StructKV) and part.is_online:
                low, high = part.limits(num_layers)
                cuts |= {layer + 1 for layer in range(low, high + 1)}
                stash = True
            if isinstance(part, (Select, Retain)):
                window = max(window, part.window)
    return Layout(tuple(sorted(splits)), sidecar, retain, window, stash, tuple(sorted(cuts)))


def check_fits(policy: KVPolicy, layout: Layout, num_layers: int) -> None:
    """Raise PolicyError, saying what to change, unless a server with `layout` can run `policy`."""
    needed = layout_of([policy], num_layers)
    missing = [layer for layer in needed.splits if layer not in layout.splits]
    needs = [f"a split at {_layers(missing)}"] if missing else []
    if needed.sidecar is not None and not needed.sidecar.fits(layout.sidecar):
        needs.append(f"a sidecar of {needed.sidecar}")
    if needed.retain and not layout.retain:
        needs.append("retention")
    if needed.window > layout.window:
        needs.append(f"a window of {needed.window} tokens")
    if missing := [cut - 1 for cut in needed.cuts if cut not in layout.cuts]:
        needs.append(f"online pivots at {_layers(missing)}")
    if needed.stash and not layout.stash:
        needs.append("a stash")
    if needs:
        raise PolicyError(
            f"{policy} does not fit this server: its layout has {layout}; {policy} needs "
            f"{' and '.join(needs)}: {_way_out(policy, needed, layout, num_layers)}"
        )


def _way_out(policy: KVPolicy, needed: Layout, layout: Layout, num_layers: int) -> str:
    """What to do about a `policy` that needs more than `layout`."""
    theirs, ours = needed.sidecar, layout.sidecar
    if theirs is None or ours is None or theirs.is_like(ours):
        room = json.dumps({"kv_layout": [str(policy)]})
        return (
            f"start the server with --kv-policy {policy}, or make room with --additional-config "
            f"'{room}'"
        )
    # No server has room for two sidecars.
    alone = f"start a server of its own with --kv-policy {policy}"
    other = KVPolicy.of(
        ours.nearest(part) if isinstance(part, Retrieve) else part for part in policy.parts
    )
    try:
        check_fits(other, layout, num_layers)
    except PolicyError:
        return alone
    return f"request {other}, which fits, or {alone}"


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


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
