"""Layouts: which KV groups a server has, fixed when the engine starts, and what fits into them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_kvx.policy.axes import Positions, Retrieve, ScoreSpec
from vllm_kvx.policy.beside_server import (
    beside_drafts,
    beside_drafts_ahead,
    beside_drafts_by_states,
    beside_own_drafts,
    in_a_pipeline,
)
from vllm_kvx.policy.beside_windows import beside_windows
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.retrieval_layers import OF_PAPERS, RetrievalLayers
from vllm_kvx.policy.spec import servable
from vllm_kvx.policy.windows import Windows


@dataclass(frozen=True)
class RetrievalLayout:
    """What the server's pages hold for retrieval, and what its decode steps do with it.

    index: the row of ``indexes/table.py``. group: tokens of a group, or a page.
    unit: tokens that are read together.
    reduction: see ``equations.retrieval``. max_units: units that a step may read at most.
    reuse_layers, dense_layers: see ``Retrieve``.
    """

    index: str
    group: int
    unit: int
    reduction: str
    max_units: int
    reuse_layers: int = 1
    dense_layers: int = OF_PAPERS.dense

    @classmethod
    def of(cls, method: Retrieve) -> "RetrievalLayout":
        """The layout of pages and decode steps that `method` needs."""
        index = method.index
        return cls(
            index.name,
            index.group,
            index.unit,
            method.reduction,
            method.budget_units,
            method.reuse_layers,
            method.dense_layers,
        )

    def is_like(self, other: "RetrievalLayout") -> bool:
        """Whether all but the budgets is as in `other`."""
        return replace(self, max_units=other.max_units) == other

    def fits(self, other: "RetrievalLayout | None") -> bool:
        """Whether a server laid out like `other` can do this."""
        return other is not None and self.is_like(other) and self.max_units <= other.max_units

    def nearest(self, method: Retrieve) -> Retrieve:
        """What a server laid out like this can do in the place of `method`."""
        budget = min(max(method.budget, self.group), self.max_units * self.unit)
        return self._of_budget(budget, method.dense_below)

    @property
    def retrieving(self) -> RetrievalLayers:
        """The layers that retrieve."""
        return RetrievalLayers(self.dense_layers, self.reuse_layers)

    @property
    def largest(self) -> Retrieve:
        """The policy of the largest budget that fits, which retrieves where that pays."""
        return self._of_budget(self.max_units * self.unit, "auto")

    def _of_budget(self, budget: int, dense_below: int | str) -> Retrieve:
        return self._method.of_index(
            self.group, budget, self.reduction, dense_below, self.retrieving
        )

    @property
    def _method(self) -> type[Retrieve]:
        """The method with this index."""
        methods = (m for m in METHODS.values() if issubclass(m, Retrieve))
        return next(method for method in methods if method.index_name == self.index)

    def as_json(self) -> dict[str, object]:
        """The sidecar in ``GET /v1/kv_policy``."""
        return {
            "has_codes": self.unit == 1,
            "group": self.group,
            "reduction": self.reduction,
            "max_units": self.max_units,
            "reuse_layers": self.reuse_layers,
            "dense_layers": self.dense_layers,
        }

    def __str__(self) -> str:
        what = self._method.index_words
        budget = self.max_units * self.unit
        layers = f", a choice for {self.reuse_layers} layers" if self.reuse_layers > 1 else ""
        if self.dense_layers != OF_PAPERS.dense:
            layers += f", the first {self.dense_layers} read whole"
        return (
            f"{what} of {self.group} tokens ({self.reduction}, budgets of up to {budget}{layers})"
        )


class Stage(NamedTuple):
    """Layers that store alike: those from `start` to the next stage's that slide, or do not."""

    start: int
    slides: bool = False


@dataclass(frozen=True)
class Layout:
    """Three kinds of boundary in the decoder, and what else the server has room for.

    later_starts: sorted layers, above 0 and below the number of layers, where a KV stage begins:
        its layers store alike, in KV groups of their own.
    sidecar: what KV pages hold beside their entries for retrieval; None without.
    retain: True if entries can be dropped once a prompt is in.
    window: the longest window whose queries may score keys; 0 if no policy scores any by queries.
    stash: True if hidden states of prompts can be kept until their last chunk selects some.
    row_cuts: sorted first layers that some rows do not run: the decoder is compiled in segments,
        which begin there or a layer below. Each is one of `later_starts`.
    online_cuts: sorted layers where a pass may begin or end that finds its pivot online; these cut
        no KV group.
    value_norms: True if keys can be scored by the norms of their projected values: the worker holds
        factors of the output projections.
    projects: True if layers may store entries of prompt tokens that do not run them, projected from
        the states below.
    lookahead: the most tokens that may be drafted behind a prompt to score its keys.
    windows: of a server that propagates, the layers that slide; None if none do. Above the first
        row cut they are in stages of their own, below it vLLM's own business.
    drafts: True if tokens are drafted, and computed before it is known whether they stay.
    drafts_ahead: True if a step is planned before it is known which drafts of the last one stay.
    drafts_by_states: True if they are drafted from the model's hidden states of the whole text.
    own_drafts: True if the model drafts them itself, from the entries that it holds.
    pipeline: True if several ranks have parts of the layers.
    """

    later_starts: tuple[int, ...]
    sidecar: RetrievalLayout | None = None
    retain: bool = False
    window: int = 0
    stash: bool = False
    row_cuts: tuple[int, ...] = ()
    online_cuts: tuple[int, ...] = ()
    value_norms: bool = False
    projects: bool = False
    lookahead: int = 0
    windows: Windows | None = None
    drafts: bool = False
    drafts_ahead: bool = False
    drafts_by_states: bool = False
    own_drafts: bool = False
    pipeline: bool = False

    @property
    def checks(self) -> tuple[Callable[[KVPolicy], str | None], ...]:
        """What says why a policy cannot run beside what else the server does, in turn."""
        asked = {
            beside_drafts: self.drafts,
            beside_drafts_ahead: self.drafts_ahead,
            beside_drafts_by_states: self.drafts_by_states,
            beside_own_drafts: self.own_drafts,
            in_a_pipeline: self.pipeline,
        }
        return tuple(check for check, applies in asked.items() if applies)

    @property
    def sliding(self) -> tuple[int, ...]:
        """Sorted layers that slide over a window."""
        return () if self.windows is None else self.windows.layers

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The first layer of every KV stage whose layers have full attention."""
        return (0, *self.later_starts)

    @property
    def retrieving(self) -> RetrievalLayers:
        """The layers that retrieve, if any do."""
        return OF_PAPERS if self.sidecar is None else self.sidecar.retrieving

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All KV stages: those with full attention, lowest first, then those that slide."""
        full = (Stage(start) for start in self.stage_starts)
        over = dict.fromkeys(self.stage_of(layer) for layer in self.sliding)
        slide = (Stage(self.stage_starts[stage], True) for stage in over if stage > 0)
        return (*full, *slide)

    def sliding_stage_of(self, layer: int) -> int | None:
        """The KV stage that `layer`, which slides, is in; None if it is vLLM's own business."""
        stage = Stage(self.stage_starts[self.stage_of(layer)], True)
        return self.stages.index(stage) if stage in self.stages else None

    @property
    def propagates(self) -> bool:
        """Whether some rows skip some layers, so that the model has to run in ranges of layers."""
        return bool(self.row_cuts or self.online_cuts)

    @property
    def shares_whole_prefixes(self) -> bool:
        """Whether a cached block of a prompt holds the entries of every layer, for all to read."""
        return not (self.later_starts or self.propagates or self.stash)

    @property
    def keeps_prompts(self) -> bool:
        """Whether every prompt has the entries of all its tokens, in all layers, to the end."""
        return self.shares_whole_prefixes and not self.retain

    @property
    def selects(self) -> bool:
        """Whether tokens that a score selects may run in passes of their own.

        Attention's metadata is then built several times a step. Requests may name any policy that
        fits, and one that runs its selection again needs no more than a window and a cut.
        """
        return self.stash or bool(self.window and self.row_cuts)

    def stage_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Layers in each KV stage, lowest first: of 32 layers, starts (24,) give (24, 8)."""
        edges = (*self.stage_starts, num_layers)
        return tuple(end - begin for begin, end in itertools.pairwise(edges))

    def stage_of(self, layer: int) -> int:
        """The KV stage that `layer` is in, if it has full attention."""
        return sum(start <= layer for start in self.later_starts)

    def __str__(self) -> str:
        groups = (
            f"KV groups split at {_layers(self.later_starts)}" if self.later_starts else "no split"
        )
        retain = ", retention" if self.retain else ""
        window = f", windows of up to {self.window} tokens" if self.window else ""
        stash = ", a stash" if self.stash else ""
        online = [cut - 1 for cut in self.online_cuts]
        cuts = f", online pivots at {_layers(online)}" if online else ""
        sidecar = f"a sidecar of {self.sidecar}" if self.sidecar else "no sidecar"
        norms = ", value norms" if self.value_norms else ""
        projects = ", projection" if self.projects else ""
        ahead = f", a lookahead of up to {self.lookahead} tokens" if self.lookahead else ""
        return f"{groups}, {sidecar}{retain}{window}{stash}{cuts}{norms}{projects}{ahead}"


def layout_of(policies: Iterable[KVPolicy], num_layers: int) -> Layout:
    """The smallest layout that all `policies` fit.

    Raises PolicyError for a policy that a model of `num_layers` layers cannot run, or whose split
    depends on a layer still to be calibrated (put the layer's number into the policy first), and
    for policies that need different sidecars.
    """
    later_starts: set[int] = set()
    row_cuts: set[int] = set()
    online_cuts: set[int] = set()
    sidecar: RetrievalLayout | None = None
    owner: KVPolicy | None = None  # of the sidecar
    retain, stash, window, value_norms, projects = False, False, 0, False, False
    lookahead = 0
    for policy in policies:
        policy.check_model(num_layers)
        if policy.propagate is not None:
            # A method may propagate only after the last layer: nothing lies above that cut.
            cuts = {layer for layer in policy.propagate.row_cuts(num_layers) if layer < num_layers}
            row_cuts |= cuts
            online = policy.propagate.online_rule(num_layers)
            if online is not None:
                online_cuts |= {layer + 1 for layer in range(online.lowest, online.highest + 1)}
            waits = policy.propagate.selects_by is not None and not policy.propagate.restarts
            stash |= online is not None or (waits and bool(cuts))
            window = max(window, _window(policy.propagate.selects_by))
            projects |= policy.projects_from is not None
        if policy.retain is not None:
            retain = True
            later_starts |= {
                layer for layer in policy.retain.stages(num_layers) if layer < num_layers
            }
            by = policy.retain.keeps_by
            window, lookahead = max(window, _window(by)), max(lookahead, policy.lookahead)
            value_norms |= isinstance(by, ScoreSpec) and by.needs_value_norms
        if policy.retrieve is not None:
            needed = RetrievalLayout.of(policy.retrieve)
            if sidecar is not None and not needed.is_like(sidecar):
                raise PolicyError(
                    f"one server holds one sidecar, but {owner} needs one of {sidecar}, and "
                    f"{policy} one of {needed}: give them the same method, group or page, "
                    "reduction, reuse_layers and dense_layers, or each a server of its own"
                )
            if not needed.fits(sidecar):
                sidecar, owner = needed, policy
    return Layout(
        tuple(sorted(later_starts | row_cuts)),
        sidecar,
        retain,
        window,
        stash,
        tuple(sorted(row_cuts)),
        tuple(sorted(online_cuts)),
        value_norms,
        projects,
        lookahead,
    )


def _window(score: ScoreSpec | Positions | None) -> int:
    return score.window if isinstance(score, ScoreSpec) else 0


def check_fits(policy: KVPolicy, layout: Layout, num_layers: int) -> None:
    """Raise PolicyError, saying what to change, unless a server with `layout` can run `policy`."""
    needed = layout_of([policy], num_layers)
    if layout.windows and (problem := beside_windows(policy, layout.windows, num_layers)):
        raise PolicyError(f"{policy} does not fit this server: {problem}")
    for problem in filter(None, (check(policy) for check in layout.checks)):
        raise PolicyError(f"{policy} does not fit this server: {problem}")
    missing = [layer for layer in needed.later_starts if layer not in layout.later_starts]
    needs = [f"a split at {_layers(missing)}"] if missing else []
    only_groups = set(layout.later_starts) - set(layout.row_cuts)
    if missing := [layer for layer in needed.row_cuts if layer in only_groups]:
        needs.append(
            f"rows to leave at {_layers(missing)}, where this server splits KV groups only"
        )
    if needed.sidecar is not None and not needed.sidecar.fits(layout.sidecar):
        needs.append(f"a sidecar of {needed.sidecar}")
    if needed.retain and not layout.retain:
        needs.append("retention")
    if needed.window > layout.window:
        needs.append(f"a window of {needed.window} tokens")
    if missing := [cut - 1 for cut in needed.online_cuts if cut not in layout.online_cuts]:
        needs.append(f"online pivots at {_layers(missing)}")
    if needed.value_norms and not layout.value_norms:
        needs.append("value norms")
    if needed.projects and not layout.projects:
        needs.append("projection")
    if needed.stash and not layout.stash:
        needs.append("a stash")
    if needed.lookahead > layout.lookahead:
        needs.append(f"a lookahead of {needed.lookahead} tokens")
    if needs:
        raise PolicyError(
            f"{policy} does not fit this server: its layout has {layout}; {policy} needs "
            f"{' and '.join(needs)}: {_way_out(policy, needed, layout, num_layers)}"
        )


def _way_out(policy: KVPolicy, needed: Layout, layout: Layout, num_layers: int) -> str:
    """What to do about a `policy` that needs more than `layout`."""
    theirs, ours = needed.sidecar, layout.sidecar
    name = servable(policy)
    if theirs is None or ours is None or theirs.is_like(ours):
        return f"start the server with --kv-policy {name}, or add {name} to its --kv-layout"
    # No server has room for two sidecars.
    alone = f"start a server of its own with --kv-policy {name}"
    other = KVPolicy.of(
        ours.nearest(part) if part is policy.retrieve else part for part in policy.parts
    )
    try:
        check_fits(other, layout, num_layers)
    except PolicyError:
        return alone
    return f"request {other}, which fits, or {alone}"


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
