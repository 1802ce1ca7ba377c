"""Dense reference for retention that waits for generated tokens, beside retrieval.

Generated tokens read what retrieval chooses of all that is stored, also those that retention waits
for. Their queries then score the keys together with the window's. A query's weights are those over
all keys that it may see: what it read of them says nothing of the others.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from . import after
from .after import After
from .fastkv import Context, block, load
from .fier import Choice, ReadResult, Retrieve, Store, fill_holes
from .masked import attention, causal, embed, layers_of, log_softmax, output_weight


@torch.no_grad()
def score(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    retrieve: Retrieve,
    policy: After,
) -> ReadResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    store, row = _prefill(model, prompt, policy)
    rows, choices = [row], list[list[list[Choice]]]()
    for token in generated[:-1]:
        rows.append(store.step(model, token, retrieve))
        if len(store.choices) == policy.after and store.weights:
            choices = store.choices
            store = _retained(model, store, policy)
    return replace(store.result(list(generated), rows), choices=[*choices, *store.choices])


def _prefill(
    model: PreTrainedModel, prompt: list[int], policy: After
) -> tuple["_Scored", torch.Tensor]:
    """The entries of all tokens that a layer runs, and the log-softmax (1, V) of the last one."""
    total = len(prompt)
    positions, hidden = torch.arange(total), embed(model, prompt)
    context = Context([], total, [], list(range(total)), float("inf"))
    store, central = _Scored(context, [], [], [], []), list[Tensor]()
    chooses = policy.keep if policy.propagates is None else policy.propagates
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        store.slots.append([positions.tolist()] * len(key))
        store.keys.append(key)
        store.values.append(value)
        store.weights.append([probs])
        if len(positions) < total:
            continue
        chosen, slack = after.choose(chooses, index, probs, central)
        if index < len(layers) - 1 and len(chosen) < total:
            context.slack = min(context.slack, slack)
            context.propagated = chosen.tolist()
            hidden, positions = hidden[chosen], chosen
    return store, log_softmax(model, hidden[-1:])


class _Scored(Store):
    """Entries, with the attention weights of all tokens; none once retention has chosen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By layer, weights (H, n, t) of rows that follow each other, over all t keys up to theirs.
        self.weights: list[list[Tensor]] = []

    def sees(self, index: int, query: Tensor, scale: float) -> None:
        if self.weights:
            keys, values = self.keys[index], self.values[index]
            seen = causal(1, keys.shape[1])
            self.weights[index].append(attention(query, keys, values, scale, seen)[1])


def _retained(model: PreTrainedModel, store: "_Scored", policy: After) -> "_Scored":
    """What stays, in the slots that it takes."""
    total, layers = store.context.length, layers_of(model)
    length = total + policy.after
    context = Context([], length, [], store.context.propagated, store.context.slack)
    found = _Scored(context, [], [], [], [])
    for index, cap in enumerate(policy.caps(len(layers), total)):
        keys, values = store.keys[index], store.values[index]
        probs = [pad(each, (0, keys.shape[1] - each.shape[2])) for each in store.weights[index]]
        weight = output_weight(layers[index])
        rows, slack = after.retain(policy, cap, torch.cat(probs, dim=1), values, weight, length)
        context.slack = min(context.slack, slack)
        # All heads have the same entries until then, in the order of their positions.
        slots = [fill_holes(head, list(range(keys.shape[1]))) for head in rows.tolist()]
        computed = [*store.slots[index][0], *range(total, length)]
        context.retained.append([[computed[row] for row in head] for head in rows.tolist()])
        found.slots.append([[computed[row] for row in head] for head in slots])
        for stored, by_layer in ((keys, found.keys), (values, found.values)):
            by_layer.append(torch.stack([x[s] for x, s in zip(stored, slots, strict=True)]))
    return found
