"""How far answers over a cache of 8-bit integers are from dense references, which round as it does.

A number between two integers may be rounded either way by sums in another order, which moves
logprobs: so nearly all are near, and not all.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from reference.masked import layers_of, storing
from reference.pictures import picture, seeing
from torch import Tensor

from support.engine import Answer
from support.expected import Policy, expect, load, named
from support.int8 import rounded
from support.pictures import Shown


def rounding(*exact: int) -> Callable[[int, int, Tensor], Tensor]:
    """What layers store; see ``reference.masked.storing``. exact: layers that skip the cache."""
    return lambda layer, _, entries: entries if layer in exact else rounded(entries)


# What is stored as it is, in all layers.
AS_IT_IS = rounding(*range(99))


def away(
    model: Path,
    answers: Sequence[Answer],
    policies: Sequence[Policy],
    store: Any,
    shown: Mapping[int, Shown] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """By policy, how far logprobs are from its reference's, as far as choices are certain.

    store: what the reference's layers store. shown: the prompts with images, by the answers'
        places.
    """
    loaded, found = load(model), dict[str, list[Tensor]]()
    for i, (answer, policy) in enumerate(zip(answers, policies, strict=True)):
        pictured = None
        if i in shown:
            layers, pixels = layers_of(loaded), shown[i].pixels()
            pictured = picture(loaded, layers, model, answer.prompt, pixels)
        with storing(store), seeing(pictured):
            expected = expect(loaded, answer.prompt, answer.tokens, policy)
        differs = (answer.logprobs - expected.logprobs).abs()
        found.setdefault(named(policy), []).append(differs[: max(expected.clear, 1)])
    return {name: torch.cat(each) for name, each in found.items()}
