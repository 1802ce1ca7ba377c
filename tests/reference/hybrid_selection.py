"""Dense references of token selection on models of which some layers slide over a window.

What a prompt's layers run above the choice are the chosen tokens alone, at the positions they had.
A *full* layer shows all of them that come before; a layer that slides shows those within its
window, which is one of positions. So that later tokens find in a window all that it shows, the last
tokens of the prompt go on whatever their score, as many as the longest window reaches. Those are
`reach`, the configuration's window: vLLM's layers see that many tokens, or that many and
themselves. What the score chooses before them are as many as in `fastkv.py`, `structkv.py` and
`gemfilter.py` before the score's own window.

Only full layers choose and add to centrality, and only they retain. GemFilter's second run is one
of the whole model over the chosen tokens.

Where retention waits for generated tokens, these see all that a full layer ran of the prompt.

Prompt and generated tokens run together, in one forward of transformers' model, two for GemFilter.
Tokens that do not exist in a layer see themselves there, and nobody sees them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv, fastkv, structkv
from .after import After
from .criticalkv import Critical
from .fastkv import Keep, KeptResult, load, saliency, top
from .gemfilter import Filter
from .hybrid import full_layers, read_rows
from .masked import Call, causal, output_weight_of, run, text_config
from .structkv import Struct

Policy = Keep | Struct | Filter | Critical | After
# The rows that go on, (m,) int64 ascending, and the slack of the choice; from a full layer's number
# and weights (H, P, P), where every prompt token runs. None where the layer chooses none.
Chooses = Callable[[int, Tensor], tuple[Tensor, float] | None]
# The rows (G, kept) int64 that stay of those that a full layer ran, and the slack, from the call,
# which is of these rows, its weights, and their positions.
Retains = Callable[[Call, Tensor, Tensor], tuple[Tensor, float]]


def propagates(policy: object) -> bool:
    """Whether `policy` selects tokens."""
    if isinstance(policy, After):
        return propagates(policy.propagates or policy.keep)
    if isinstance(policy, (Struct, Filter)):
        return True
    return isinstance(policy, (Keep, Critical)) and policy.tsp_layer is not None


def reach(model: PreTrainedModel) -> int:
    """Tokens before the next one that the longest window shows, by the configuration."""
    config = text_config(model)
    return config.sliding_window - getattr(model, "_is_widened", False)


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], policy: Policy
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    if isinstance(policy, Filter):
        first = _Run(model, len(prompt), _filters(model, len(prompt), policy), _keeps_all)
        first.forward(prompt, [0])
        layers = _Run(model, len(prompt), _chooses_none, _keeps_all)
        layers.exists, layers.slack = first.exists, first.slack
    else:
        chooses, retains, more = policy, policy, 0
        if isinstance(policy, After):
            chooses, more = policy.propagates or policy.keep, policy.after
            retains = _with_generated(policy, len(prompt))
        layers = _Run(
            model, len(prompt), _chooses(model, len(prompt), chooses), _retains(retains), more
        )
    rows = layers.forward(prompt, generated)
    chosen = layers.exists.nonzero()[:, 0].tolist()
    return KeptResult(list(generated), rows, layers.retained, chosen, layers.slack)


@dataclass
class _Run:
    """One forward, and what full layers did in it, each after the one below it."""

    model: PreTrainedModel
    total: int  # prompt tokens
    chooses: Chooses
    retains: Retains
    waits: int = 0  # for so many generated tokens, before anything is dropped
    exists: Tensor = field(init=False)  # (P,) bool, the prompt tokens that the next layer runs
    retained: list[list[list[int]]] = field(default_factory=list)
    slack: float = float("inf")

    def __post_init__(self) -> None:
        self.exists = torch.ones(self.total, dtype=torch.bool)

    def forward(self, prompt: list[int], generated: list[int]) -> Tensor:
        """(S, V) log-softmax of the rows whose next tokens are `generated`."""
        with torch.no_grad():
            return run(self.model, prompt + generated[:-1], self.attend, last=len(generated))

    def attend(self, call: Call) -> Tensor:
        count, total = call.query.shape[1], self.total
        new = count - total
        if call.window is not None:
            exists = torch.cat([self.exists, torch.ones(new, dtype=torch.bool)])
            seen = causal(count, count).triu(1 - call.window) & exists
            seen |= torch.eye(count, dtype=torch.bool)
            return read_rows(call, slice(0, count), seen)[0]
        there = self.exists.nonzero()[:, 0]
        early = min(self.waits, new)
        first = torch.cat([there, torch.arange(total, total + early)])
        of_first = Call(
            call.module,
            call.layer,
            *(part[:, first] for part in (call.query, call.key, call.value)),
            call.scale,
            call.window,
            call.softcap,
            call.sinks,
        )
        mixed, probs = read_rows(of_first, slice(0, len(first)), causal(len(first), len(first)))
        out = mixed.new_zeros(mixed.shape[0], count, mixed.shape[2])
        out[:, first] = mixed
        rows, slack = _keeps_all(of_first, probs, first)
        if early == self.waits:
            rows, slack = self.retains(of_first, probs, first)
        stay, rest = first[rows], new - early
        self.retained.append(stay.tolist())
        self.slack = min(self.slack, slack)
        kept = torch.zeros(len(rows), 1, total + early, dtype=torch.bool)
        kept.scatter_(2, stay[:, None], True)
        seen = torch.cat(
            [kept.expand(-1, rest, -1), causal(rest, rest).expand(len(rows), -1, -1)], dim=2
        ).repeat_interleave(call.query.shape[0] // len(rows), 0)
        out[:, total + early :] = read_rows(call, slice(total + early, count), seen)[0]
        found = self.chooses(call.layer, probs[:, : len(there), : len(there)])
        if found is not None:
            self.exists = torch.zeros(total, dtype=torch.bool).index_fill_(0, found[0], True)
            self.slack = min(self.slack, found[1])
        return out


def _chooses_none(_layer: int, _probs: Tensor) -> None:
    return None


def _keeps_all(call: Call, _probs: Tensor, _positions: Tensor) -> tuple[Tensor, float]:
    heads, count = call.key.shape[:2]
    return torch.arange(count).expand(heads, -1), float("inf")


def _best(
    pooled: Tensor, unpooled: Tensor | None, window: int, most: int, last: int
) -> tuple[Tensor, float] | None:
    """The `most - window` best of the rows before the last ones, and these.

    pooled, unpooled: scores of the rows before the window. None if that is every row.
    """
    total = len(pooled) + window
    if total <= most or total <= most - window + last:
        return None
    before = slice(0, total - last)
    peaks = None if unpooled is None else unpooled[before]
    return top(pooled[before], most - window, last, peaks)


def _last(model: PreTrainedModel, window: int, first: int) -> int:
    """The last prompt tokens that run layers from `first` on whatever their score."""
    full = full_layers(model)
    slides = any(layer not in full for layer in range(first, text_config(model).num_hidden_layers))
    return max(window, reach(model)) if slides else window


def _filters(model: PreTrainedModel, total: int, gem: Filter) -> Chooses:
    last = _last(model, gem.window, 0)

    def choose(layer: int, probs: Tensor) -> tuple[Tensor, float] | None:
        if layer != gem.layer or probs.shape[1] <= gem.window:
            return None
        (scores,), (peaks,) = (saliency(probs, 1, gem.window, width) for width in (gem.kernel, 1))
        return _best(scores, peaks, gem.window, gem.most(total), last)

    return choose


def _chooses(model: PreTrainedModel, total: int, policy: Keep | Struct | Critical) -> Chooses:
    if isinstance(policy, Struct):
        return _by_centrality(model, total, policy)
    chooser, window = policy.tsp_layer, policy.window
    assert chooser is not None
    floor = getattr(policy, "tsp_floor", 0)
    reduction = getattr(policy, "tsp_reduction", "sum")
    most = max(int(total * policy.tsp_rate), window, floor)
    last = _last(model, window, chooser + 1)

    def choose(layer: int, probs: Tensor) -> tuple[Tensor, float] | None:
        if layer != chooser or probs.shape[1] <= window:
            return None
        (scores,), (peaks,) = (
            saliency(probs, 1, window, width, reduction) for width in (policy.kernel, 1)
        )
        return _best(scores, peaks, window, most, last)

    return choose


def _by_centrality(model: PreTrainedModel, total: int, struct: Struct) -> Chooses:
    central: list[Tensor] = []
    last = _last(model, struct.window, struct.pivot + 1)

    def choose(layer: int, probs: Tensor) -> tuple[Tensor, float] | None:
        if layer > struct.pivot or probs.shape[1] <= struct.window:
            return None
        central.append(structkv.local_saliency(probs, struct.window, struct.struct_reduction))
        if layer < struct.pivot:
            return None
        sums = reduce(lambda c, s: struct.decay * c + s, central)
        return _best(sums, None, struct.window, struct.most(total), last)

    return choose


def _with_generated(policy: After, total: int) -> Keep | Struct | Critical:
    """What is retained of a prompt and the generated tokens that it waits for, which all stay."""
    keep, more = policy.keep, policy.after
    assert isinstance(keep, (Keep, Struct, Critical))
    budget = keep.cap(total) + more
    return replace(keep, window=keep.window + more, kv_budget=budget)


def _retains(policy: Keep | Struct | Critical) -> Retains:
    if isinstance(policy, Critical):
        return lambda call, probs, positions: criticalkv.retain(
            probs, call.value, output_weight_of(call.module), int(positions[-1]) + 1, policy
        )
    if isinstance(policy, Keep):
        return lambda call, probs, positions: fastkv.retain(
            probs, call.key.shape[0], positions, int(positions[-1]) + 1, policy
        )
    if policy.block_size is not None:
        raise ValueError(f"{policy} keeps blocks, which no reference does where layers slide")

    def retain(call: Call, probs: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        heads, total = call.key.shape[0], int(positions[-1]) + 1
        each = [
            structkv.retain_rows(*by, len(positions), total, policy)
            for by in structkv.retained_by(probs, heads, policy)
        ]
        rows, slacks = zip(*each, strict=True)
        return torch.stack(rows).expand(heads, -1), min(slacks)

    return retain
