"""Which policies a model is asked under: those that it can run, and that gain for the workload."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm_kvx.config.policy_layers import is_full, layer_kinds, windows_by_config
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.beside_windows import beside_windows
from vllm_kvx.policy.cache_dtype import why_not_over
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.shares import untouched_tokens
from vllm_kvx.tools.recommend.defaults import LEAST_GAIN
from vllm_kvx.tools.recommend.gains import Gains

# Retention and retrieval, which any weights and any layers take.
_WITHOUT_LAYERS = (
    *("fier-4096", "fier-2048", "fier-1024", "fier-512"),
    *("snapkv:kv_rate=0.4", "snapkv:kv_rate=0.2"),
    *("criticalkv:kv_rate=0.4", "criticalkv:kv_rate=0.2"),
    *("snapkv:kv_rate=0.2,after=32", "snapkv:kv_rate=0.1,after=32"),
    *("snapkv:kv_rate=0.2,lookahead=32", "snapkv:kv_rate=0.1,lookahead=32"),
    "snapkv:kv_rate=0.4+fier-512",
)
# With the layer and the rate of propagation that were calibrated.
_FASTKV = ("fastkv:kv_rate=0.4", "fastkv:kv_rate=0.2", "fastkv:kv_rate=1+fier-1024")

# A method with the layer that was measured for it, as a server would find it; None if it would have
# to measure it.
WithLayer = Callable[[Method], Method | None]


class LeftOut(NamedTuple):
    """A policy that is not asked, and why."""

    policy: str
    why: str


@dataclass(frozen=True)
class Candidate:
    """A policy that is asked: its name, what it is, and what it would gain."""

    name: str
    policy: KVPolicy
    gains: Gains


@dataclass(frozen=True)
class ModelFacts:
    """What of a model decides which policies it can run.

    config: of the text model. limits: what keeps policies from it, in words, and whether that keeps
    only those from it that propagate. head_dims: those that retrieval knows.
    tuned: the policy that its weights were tuned for; None if for none.
    kv_cache_dtype: that engines are given, as names have it; None where they are given none.
    """

    config: Mapping[str, Any]
    limits: Sequence[tuple[str, bool]]
    head_dims: Sequence[int]
    with_layer: WithLayer
    tuned: str | None = None
    kv_cache_dtype: str | None = None

    @property
    def layers(self) -> int:
        """The model's decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def head_dim(self) -> int:
        """The size of its heads."""
        heads = self.config["num_attention_heads"]
        return int(self.config.get("head_dim") or self.config["hidden_size"] // heads)


def names_for(facts: ModelFacts) -> tuple[list[str], list[LeftOut]]:
    """The names of the ladder, and those that lack what the model's owner has to make first."""
    names, left_out = list(_WITHOUT_LAYERS), []
    for name in _FASTKV:
        head, _, rest = name.partition("+")
        (method,) = parse_policy(head).parts
        found = facts.with_layer(method)
        if found is None:
            why = "its layer is not known: `vllm-kvx calibrate MODEL` finds it"
            left_out.append(LeftOut(name, why))
            continue
        names.append(f"{found}+{rest}" if rest else str(found))
    if facts.tuned is not None:
        names += [facts.tuned, f"{facts.tuned}+fier-2048", f"{facts.tuned}+snapkv:kv_rate=0.4"]
    else:
        cutoff = max(facts.layers * 3 // 4, 1)
        why = "these weights were not tuned for it: `vllm-kvx tune-speed MODEL` does that"
        left_out.append(LeftOut(f"speed-{cutoff}", why))
    return names, left_out


def candidates(
    names: Sequence[str],
    facts: ModelFacts,
    longest_answer: int,
    longest_prompt: int,
    gains_of: Callable[[str], Gains | None],
) -> tuple[list[Candidate], list[LeftOut]]:
    """Those of `names` that the model can run and that gain, the ones that gain most first.

    longest_answer: tokens that an answer has at most: of no more than retention waits for it says
        nothing.
    longest_prompt: tokens; what looks ahead needs room behind them.
    gains_of: of a policy's name; None where it leaves a layer to measurement.
    """
    found: list[Candidate] = []
    left_out = []
    for name in names:
        try:
            policy = parse_policy(name)
            why = next(_problems(policy, facts, longest_answer, longest_prompt), None)
        except PolicyError as error:
            why = str(error)
        gains = None if why else gains_of(name)
        if why is None and gains is None:
            why = "its layer is not known: write it, or run `vllm-kvx calibrate MODEL`"
        if gains is not None and max(gains.requests, gains.ttft, gains.pool) < LEAST_GAIN:
            why = "it saves nothing of such prompts"
        if gains is not None and why is None:
            alike = (each for each in found if _are_alike(each, policy, gains))
            other = next(alike, None)
            why = None if other is None else f"of such prompts it saves as much as {other.name}"
        if why is not None or gains is None:
            left_out.append(LeftOut(name, why or ""))
        else:
            found.append(Candidate(name, policy, gains))
    found.sort(key=lambda each: -each.gains.requests)
    return found, left_out


def _are_alike(candidate: Candidate, policy: KVPolicy, gains: Gains) -> bool:
    """Whether two policies are the same methods and do as much; floors make short prompts so."""
    first, second = (
        ([part.name for part in each.parts], each.num_generated, each.lookahead)
        for each in (candidate.policy, policy)
    )
    return first == second and candidate.gains == gains


def _problems(
    policy: KVPolicy, facts: ModelFacts, longest_answer: int, longest_prompt: int
) -> Iterator[str]:
    """Why a model cannot run a policy; nothing if it can."""
    policy.check_composition()
    policy.check_model(facts.layers)
    if policy.is_full:
        yield "it is what the others are compared with"
    if 0 < longest_answer <= untouched_tokens(policy):
        yield (
            f"it drops nothing within {untouched_tokens(policy)} tokens, and no answer is longer: "
            "--tasks long_answers, or --prompts with long answers, would tell"
        )
    if (why := why_not_over(facts.kv_cache_dtype, policy)) is not None:
        yield f"it {why}"
    for said, only_propagation in facts.limits:
        if not only_propagation or policy.propagate is not None:
            yield said
    if policy.retrieve is not None and facts.head_dim not in facts.head_dims:
        known = ", ".join(map(str, facts.head_dims))
        yield f"the model's heads have {facts.head_dim} dimensions, and retrieval knows {known}"
    config = SimpleNamespace(**facts.config)
    windows = windows_by_config(config)
    if windows is not None and policy.propagate is not None:
        why = beside_windows(policy, windows, facts.layers)
        yield from [] if why is None else [why]
    room = facts.config["max_position_embeddings"] - longest_prompt
    if policy.lookahead > room:
        yield f"the model's context leaves {room} tokens behind the longest prompt to look ahead"
    if policy.lookahead:
        if windows is not None or not all(map(is_full, layer_kinds(config))):
            yield "some layers slide over a window or keep a state, with which it cannot look ahead"
        rope = facts.config.get("rope_parameters") or facts.config.get("rope_scaling") or {}
        if "mrope_section" in rope:
            yield "positions have several parts (M-RoPE), with which it cannot look ahead"


def that_may_win(remaining: Sequence[Candidate], kept: Candidate | None) -> list[Candidate]:
    """Those that gain more than the best one that was shown to keep the answers."""
    if kept is None:
        return list(remaining)
    return [each for each in remaining if each.gains.requests > kept.gains.requests]
