"""What the dense references of tests/reference expect, in one form, and their policies' names.

A test says what a policy means by a reference's own dataclass (``Keep``, ``Struct``, ...) or by one
of those below; `named` is the policy's name for an engine, `expect` the reference's word on it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from reference import (
    after,
    after_read,
    criticalkv,
    fastkv,
    fier,
    gemfilter,
    hybrid,
    hybrid_selection,
    knorm,
    lookahead,
    pyramidkv,
    selfonly,
    speed,
    structkv,
    structsnap,
    swiftkv,
)
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep, KeptResult
from reference.fier import ReadResult, Retrieve
from reference.gemfilter import Filter
from reference.hybrid import is_hybrid
from reference.hybrids import widen
from reference.knorm import Norm
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from reference.selfonly import Alone
from reference.structkv import WEIGHTS, Struct
from reference.structsnap import StructSnap
from reference.swiftkv import Swift
from torch import Tensor

from vllm_kvx.policy.methods.table import METHODS


@dataclass(frozen=True)
class Speed:
    """SPEED, or with no cutoff full attention, by transformers' own layers and a mask."""

    cutoff: int | None = None
    anchors: int = 1
    tail: int = 1


@dataclass(frozen=True)
class Online:
    """StructKV whose pivot is that of the paper's rule, found for each prompt between two layers.

    struct: the policy but for its pivot.
    """

    low: int
    high: int
    struct: Struct = field(default_factory=lambda: Struct(0))

    def found(self, model: Any, prompt: list[int]) -> Struct:
        """The policy with the pivot of this prompt."""
        metrics = structkv.metrics(model, [prompt])
        pivot = structkv.online_pivot(metrics, WEIGHTS, self.low, self.high)
        # Every layer keeps equally much, whatever the pivot.
        return replace(self.struct, pivot=pivot, most_kept=self.struct.struct_rate)


@dataclass(frozen=True)
class Below:
    """SPEED above `cutoff`, and below it `struct`, which selects no tokens."""

    cutoff: int
    struct: Struct


@dataclass(frozen=True)
class ByScore:
    """What `critical` says, by the name of SnapKV or FastKV with `score=critical`."""

    critical: Critical


@dataclass(frozen=True)
class Read:
    """Decode steps read what `retrieve` chooses of what `keep` stores."""

    retrieve: Retrieve
    keep: Keep | Struct | Online | Swift | After = field(default_factory=Keep)


Policy = (
    Speed
    | Keep
    | Struct
    | Online
    | Below
    | Read
    | Pyramid
    | Norm
    | Filter
    | StructSnap
    | Critical
    | After
    | Lookahead
    | ByScore
    | Swift
    | Alone
)
FULL = Keep()


@dataclass(frozen=True)
class Expected:
    """What a reference says of one answer of S tokens.

    name: of the policy.
    argmax: the greedy tokens.
    logprobs: (S,) of the tokens that were answered.
    slack: the least relative change of a score that could change what was chosen of the prompt.
    near_tie: with less slack, float32 sums in another order may choose otherwise.
    clear: so many of the first tokens follow from choices that are certain.
    """

    name: str
    argmax: list[int]
    logprobs: Tensor
    slack: float
    near_tie: float
    clear: int


@dataclass(frozen=True)
class Reference:
    """A dense reference.

    score: the distributions that tokens after a prompt were drawn from, by model, prompt, tokens
        and policy.
    name: of the policy that is meant.
    near_tie: see `Expected`.
    """

    score: Callable[[Any, list[int], list[int], Any], speed.Result]
    name: Callable[[Any], str]
    near_tie: float = 0.0


def named(policy: Policy) -> str:
    """The policy's name for an engine."""
    return _REFERENCES[type(policy)].name(policy)


def is_served(policy: Policy) -> bool:
    """Whether this version has every method of `policy`."""
    parts = (re.split("[-:]", part)[0] for part in named(policy).split("+"))
    return all(name == "full" or name in METHODS for name in parts)


def expect(
    model: Any, prompt: list[int], tokens: list[int], policy: Policy, near_tie: float | None = None
) -> Expected:
    """What the reference of `policy` says of an answer's tokens.

    model: loaded by `load`. near_tie: in place of the reference's own.
    """
    reference = _REFERENCES[type(policy)]
    score = _score_hybrid if is_hybrid(model) else reference.score
    result = score(model, prompt, tokens, policy)
    slack = result.slack if isinstance(result, KeptResult) else float("inf")
    near_tie = reference.near_tie if near_tie is None else near_tie
    clear = result.clear_steps if isinstance(result, ReadResult) else len(tokens)
    # What retention chose may differ, and with it whatever decode steps read.
    clear = clear if slack >= near_tie else 0
    return Expected(named(policy), result.argmax, result.chosen_logprob, slack, near_tie, clear)


def load(model: Any) -> Any:
    """The reference's model, with windows as vLLM has them; a loaded one is passed through."""
    return widen(speed.load(model))


def _budget(policy: Any) -> str:
    if policy.kv_budget is not None:
        return f"kv_budget={policy.kv_budget}"
    return f"kv_rate={policy.kv_rate},kv_floor={policy.kv_floor}"


def _speed_name(policy: Speed) -> str:
    if policy.cutoff is None:
        return "full"
    return f"speed-{policy.cutoff}:anchors={policy.anchors},tail={policy.tail}"


def _keep_name(keep: Keep) -> str:
    parts = []
    if keep.cutoff is not None:
        parts.append(f"speed-{keep.cutoff}:anchors={keep.anchors},tail={keep.tail}")
    scored = f"{_budget(keep)},window={keep.window},kernel={keep.kernel}"
    if keep.sinks is not None:
        last = _budget(keep) if keep.recent is None else f"recent={keep.recent}"
        parts.append(f"streamingllm:sinks={keep.sinks},{last}")
    elif keep.tsp_layer is not None:
        propagates = f"tsp_layer={keep.tsp_layer},tsp_rate={keep.tsp_rate}"
        propagates += f",tsp_floor={keep.tsp_floor}"
        propagates += f",tsp_reduction={keep.tsp_reduction}"
        parts.append(f"fastkv:{propagates},{scored}")
    elif keep.kv_budget is not None or keep.kv_rate != 1:
        parts.append(f"snapkv:{scored}")
    return "+".join(parts) or "full"


def _struct_name(policy: Struct, pivot: str | None = None) -> str:
    return (
        f"structkv:pivot={policy.pivot if pivot is None else pivot},"
        f"struct_rate={policy.struct_rate},struct_floor={policy.struct_floor},{_budget(policy)},"
        f"window={policy.window},decay={policy.decay},struct_reduction={policy.struct_reduction}"
        + (
            ",granularity=block"
            if policy.block_size
            else f",heads={policy.heads},kernel={policy.kernel},score={policy.score}"
        )
    )


def _online_name(policy: Online) -> str:
    limits = f"min_layer={policy.low},max_layer={policy.high}"
    return f"{_struct_name(policy.struct, 'online')},{limits}"


def _read_name(policy: Read) -> str:
    retrieve = policy.retrieve
    method, size = ("quest", "page") if retrieve.pages else ("fier", "group")
    reads = (
        f"{method}-{retrieve.budget}:{size}={retrieve.group},reduction={retrieve.reduction},"
        f"dense_below={retrieve.dense_below}"
        + (f",reuse_layers={retrieve.reuse_layers}" if retrieve.reuse_layers > 1 else "")
        + (f",dense_layers={retrieve.dense_layers}" if retrieve.dense_layers != 2 else "")
    )
    kept = named(policy.keep)
    return reads if kept == "full" else f"{kept}+{reads}"


def _pyramid_name(policy: Pyramid) -> str:
    return (
        f"pyramidkv:{_budget(policy)},window={policy.window},kernel={policy.kernel},"
        f"beta={policy.beta},groups={policy.groups},score={policy.score}"
    )


def _critical_name(policy: Critical) -> str:
    scored = f"window={policy.window},kernel={policy.kernel}"
    retains = f"criticalkv:{_budget(policy)},{scored}"
    if policy.tsp_layer is None:
        return retains
    propagates = f"tsp_layer={policy.tsp_layer},tsp_rate={policy.tsp_rate},kv_rate=1,kv_floor=0"
    return f"fastkv:{propagates},{scored}+{retains}"


def _after_name(policy: After) -> str:
    waits = f"{named(policy.keep)},after={policy.after}"
    if policy.propagates is None:
        return waits
    return f"{named(policy.propagates)}+{waits}"


def _lookahead_name(policy: Lookahead) -> str:
    return f"{named(policy.keep)},lookahead={policy.count}"


def _by_score_name(policy: ByScore) -> str:
    by = policy.critical
    scored = f"{_budget(by)},window={by.window},kernel={by.kernel},score=critical"
    if by.tsp_layer is None:
        return f"snapkv:{scored}"
    return f"fastkv:tsp_layer={by.tsp_layer},tsp_rate={by.tsp_rate},tsp_floor=0,{scored}"


def _filter_name(policy: Filter) -> str:
    return (
        f"gemfilter:layer={policy.layer},rate={policy.rate},window={policy.window},"
        f"kernel={policy.kernel},kv_floor={policy.kv_floor}"
    )


def _structsnap_name(policy: StructSnap) -> str:
    return f"{_struct_name(replace(policy.struct, kv_rate=1))}+{named(policy.keep)}"


def _score_speed(model: Any, prompt: list[int], tokens: list[int], policy: Speed) -> speed.Result:
    return speed.score(
        model, prompt, tokens, cutoff=policy.cutoff, anchors=policy.anchors, tail=policy.tail
    )


def _score_online(model: Any, prompt: list[int], tokens: list[int], policy: Online) -> KeptResult:
    return structkv.score(model, prompt, tokens, policy.found(model, prompt))


@torch.no_grad()
def _score_below(model: Any, prompt: list[int], tokens: list[int], policy: Below) -> KeptResult:
    context, row = fastkv.prefill(model, prompt, Keep(cutoff=policy.cutoff))
    lower, _ = structkv.prefill(model, prompt, policy.struct)
    context.stored[: policy.cutoff] = lower.stored[: policy.cutoff]
    context.slack = lower.slack
    rows = [row, fastkv.decode(model, context, tokens[:-1])] if len(tokens) > 1 else [row]
    return context.result(list(tokens), rows)


def _score_by_score(
    model: Any, prompt: list[int], tokens: list[int], policy: ByScore
) -> KeptResult:
    return criticalkv.score(model, prompt, tokens, policy.critical)


def _score_read(model: Any, prompt: list[int], tokens: list[int], policy: Read) -> ReadResult:
    keep = policy.keep
    if isinstance(keep, After):
        return after_read.score(model, prompt, tokens, policy.retrieve, keep)
    keep = keep.found(model, prompt) if isinstance(keep, Online) else keep
    return fier.score(model, prompt, tokens, policy.retrieve, keep)


def _score_hybrid(model: Any, prompt: list[int], tokens: list[int], policy: Any) -> speed.Result:
    """Where only some layers have full attention. Raises ValueError for what has no reference."""
    if isinstance(policy, Speed):
        return hybrid.cut(
            model, prompt, tokens, cutoff=policy.cutoff, anchors=policy.anchors, tail=policy.tail
        )
    if isinstance(policy, ByScore):
        policy = policy.critical
    if isinstance(policy, Read):
        return hybrid.read(model, prompt, tokens, policy.retrieve, policy.keep)
    if hybrid_selection.propagates(policy):
        return hybrid_selection.score(model, prompt, tokens, policy)
    return hybrid.score(model, prompt, tokens, policy)


# Near-ties: by FastKV's and SnapKV's saliency; StructKV's centrality adds up more in float32.
SALIENCY_TIE, CENTRALITY_TIE = 1e-5, 5e-5
# Knorm's slack is of one number a key, which float32 kernels round alike but for rotation.
NORM_TIE = 5e-5

_REFERENCES: dict[type, Reference] = {
    Speed: Reference(_score_speed, _speed_name),
    Keep: Reference(fastkv.score, _keep_name, SALIENCY_TIE),
    Struct: Reference(structkv.score, _struct_name, CENTRALITY_TIE),
    Online: Reference(_score_online, _online_name, CENTRALITY_TIE),
    Below: Reference(
        _score_below,
        lambda policy: f"speed-{policy.cutoff}+{named(policy.struct)}",
        CENTRALITY_TIE,
    ),
    Read: Reference(_score_read, _read_name),
    Pyramid: Reference(pyramidkv.score, _pyramid_name, SALIENCY_TIE),
    Critical: Reference(criticalkv.score, _critical_name, SALIENCY_TIE),
    After: Reference(after.score, _after_name, SALIENCY_TIE),
    Lookahead: Reference(lookahead.score, _lookahead_name, SALIENCY_TIE),
    ByScore: Reference(_score_by_score, _by_score_name, SALIENCY_TIE),
    Norm: Reference(knorm.score, lambda policy: f"knorm:{_budget(policy)}", NORM_TIE),
    Filter: Reference(gemfilter.score, _filter_name, SALIENCY_TIE),
    Alone: Reference(
        selfonly.score, lambda policy: f"selfonly-{policy.cutoff}:anchors={policy.anchors}"
    ),
    Swift: Reference(swiftkv.score, lambda policy: f"swiftkv-{policy.cutoff}"),
    StructSnap: Reference(structsnap.score, _structsnap_name, CENTRALITY_TIE),
}
