"""Dense reference for retention that waits for generated tokens: they score the prompt's keys too.

Nothing of the prompt goes before `after` generated tokens are in, and none of these ever does. The
first generated tokens are run behind the prompt in one pass, which sees all that a layer has.
Tokens of the prompt that go on into layers above are chosen without them, as FastKV or StructKV
choose.
"""

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv, fastkv, structkv
from .criticalkv import Critical
from .fastkv import Context, Keep, KeptResult, block, decode, load, saliency, top
from .masked import embed, layers_of, log_softmax, output_weight
from .pyramidkv import Pyramid
from .structkv import Struct, local_saliency


@dataclass(frozen=True)
class After:
    """`keep`, whose rates are of the prompt alone, once `after` generated tokens are in.

    propagates: chooses the tokens that go on, and retains all, where `keep` does not choose them.
    """

    keep: Keep | Critical | Pyramid | Struct
    after: int
    propagates: Keep | Struct | None = None

    def caps(self, layers: int, prompt_len: int) -> list[int]:
        """The most rows of the prompt that a KV head retains, by layer."""
        if isinstance(self.keep, Pyramid):
            return self.keep.caps(layers, prompt_len)
        return [self.keep.cap(prompt_len)] * layers


@torch.no_grad()
def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], policy: After
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    # The last token is answered and never run.
    first, rest = generated[: policy.after], generated[policy.after : -1]
    first = first[: len(generated) - 1]
    tokens, total = [*prompt, *first], len(prompt)
    context = Context([], len(tokens), [], list(range(total)), float("inf"))
    positions = torch.arange(len(tokens))
    hidden = embed(model, tokens)
    layers: Any = layers_of(model)
    central: list[Tensor] = []
    chooses = policy.keep if policy.propagates is None else policy.propagates
    for index, cap in enumerate(policy.caps(len(layers), total)):
        layer = layers[index]
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        rows, slack = positions.new_tensor(range(len(positions))).expand(len(key), -1), float("inf")
        if len(first) == policy.after:
            weight = output_weight(layer)
            rows, slack = retain(policy, cap, probs, value, weight, total + policy.after)
        context.slack = min(context.slack, slack)
        context.retained.append(positions[rows].tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))
        if len(context.propagated) < total:
            continue
        # No query of a generated token among them, and no key.
        chosen, slack = choose(chooses, index, probs[:, :total, :total], central)
        if index < len(layers) - 1 and len(chosen) < total:
            context.slack = min(context.slack, slack)
            context.propagated = chosen.tolist()
            stay = torch.cat([chosen, torch.arange(total, len(tokens))])
            hidden, positions = hidden[stay], positions[stay]
    found = [log_softmax(model, hidden[len(hidden) - len(first) - 1 :])]
    if rest:
        found.append(decode(model, context, rest))
    return context.result(list(generated), found)


def retain(
    policy: After, cap: int, probs: Tensor, value: Tensor, weight: Tensor, total: int
) -> tuple[Tensor, float]:
    """Rows that each KV head keeps of those that a layer has, and the slack of the choice.

    probs (H, n, n) and value (G, n, D), the last rows being those of `after` generated tokens.
    """
    keep, more = policy.keep, policy.after
    window, budget = keep.window + more, cap + more
    if isinstance(keep, Struct):
        by_all = replace(keep, window=window, kv_budget=budget)
        if keep.score == "critical":
            each = structkv.critical_rows(probs, value, weight, total, by_all)
        else:
            saliencies = structkv.retained_by(probs, len(value), by_all)
            each = [structkv.retain_rows(*by, probs.shape[1], total, by_all) for by in saliencies]
        each = each if len(each) > 1 else each * len(value)
        return torch.stack([rows for rows, _ in each]), min(slack for _, slack in each)
    by: dict[str, int] = {"window": window, "kv_budget": budget, "kernel": keep.kernel}
    if isinstance(keep, Critical) or getattr(keep, "score", "") == "critical":
        return criticalkv.retain(probs, value, weight, total, Critical(**by))
    return fastkv.retain(probs, len(value), torch.arange(probs.shape[1]), total, Keep(**by))


def choose(
    policy: Keep | Critical | Pyramid | Struct, index: int, probs: Tensor, central: list[Tensor]
) -> tuple[Tensor, float]:
    """The prompt tokens that go on after a layer, and the slack of the choice; all if all do.

    probs (H, N, N): of the prompt alone. central: what centrality adds up of the layers below, to
    which this one's is added.
    """
    total, window = probs.shape[1], policy.window
    everything = torch.arange(total), float("inf")
    if isinstance(policy, Struct):
        central.append(local_saliency(probs, window, policy.struct_reduction))
        most = policy.most(total)
        if index != policy.pivot or total <= most:
            return everything
        sums = reduce(lambda c, s: policy.decay * c + s, central)  # Eq. 3
        return top(sums, most - window, window)
    if getattr(policy, "tsp_layer", None) != index:
        return everything
    assert not isinstance(policy, Pyramid)
    most = max(int(total * policy.tsp_rate), window, getattr(policy, "tsp_floor", 0))
    if total <= most:
        return everything
    reduction = getattr(policy, "tsp_reduction", "sum")
    (scores,), (unpooled,) = (
        saliency(probs, 1, window, width, reduction) for width in (policy.kernel, 1)
    )
    return top(scores, most - window, window, unpooled)
