"""Where StructKV's pivot lies: how attention changes from layer to layer (Eq. 4-9 of its paper).

Plain torch. Shapes: L layers, H query heads, w window queries, n keys; the window is the last w of
the n tokens. Everything is reduced in float64, so that the choice does not depend on the order of
sums.

Where the paper leaves room: Eq. 5 and 6 are per window row and then averaged, as Eq. 4 is; a row's
variance is the population's over the keys that it may see; differences start at layer 1, and one
whose range over the layers is zero counts 0; of equal scores the lowest layer wins; the pivot is a
layer, so never above the last one.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kvx.policy.axes import Weights

# Share of the keys whose mass is the sparsity, Eq. 5.
TOP_SHARE = 0.1


class Metrics(NamedTuple):
    """What tells broad from focused attention; float64 on the CPU.

    () each for one layer, (L,) for the layers of a model from 0 on.

    entropy: in nats, Eq. 4.
    sparsity: attention mass of the tenth of the keys that get most, in [0, 1], Eq. 5.
    variance: of the attention that the visible keys get, Eq. 6.
    """

    entropy: Tensor
    sparsity: Tensor
    variance: Tensor


def attention_metrics(attention: Tensor) -> Metrics:
    """One layer's metrics, means over heads and window rows (Eq. 4-6).

    attention: (H, w, n), softmax rows of the window, 0 at keys that a row may not see.
    """
    heads, window, num_keys = attention.shape
    top = max(1, int(TOP_SHARE * num_keys))
    visible = torch.arange(num_keys - window + 1, num_keys + 1, device=attention.device)
    hidden = torch.arange(num_keys, device=attention.device) >= visible[:, None]
    total = torch.zeros(3, dtype=torch.float64, device=attention.device)
    # By head: in float64 all of them are large at long prompts.
    for rows in attention:
        rows = rows.double()  # (w, n)
        deviation = (rows - rows.sum(dim=1, keepdim=True) / visible[:, None]).masked_fill(hidden, 0)
        each = (
            torch.special.entr(rows).sum(dim=1),  # 0 log 0 = 0
            rows.topk(top, dim=1).values.sum(dim=1),
            deviation.square().sum(dim=1) / visible,
        )
        total += torch.stack(each).mean(dim=1)
    return Metrics(*(total / heads).cpu())


def by_layer(layers: Iterable[Metrics]) -> Metrics:
    """The metrics of single layers, () each, in one, (L,) each."""
    return Metrics(*(torch.stack(values) for values in zip(*layers, strict=True)))


def mean_metrics(prompts: Iterable[Metrics]) -> Metrics:
    """The mean over prompts, each (L,); differences are taken after it."""
    return Metrics(*(torch.stack(values).mean(dim=0) for values in zip(*prompts, strict=True)))


def transition_scores(
    entropy: Tensor, sparsity: Tensor, variance: Tensor, weights: Weights
) -> Tensor:
    """T of Eq. 8 for each layer: (L,) each -> (L,) float64 on the CPU; nan at layer 0."""
    total = torch.zeros(len(entropy), dtype=torch.float64)
    total[0] = torch.nan
    for weight, metric in zip(weights, (-entropy, sparsity, variance), strict=True):
        total[1:] += weight * _normalised(metric.double().cpu().diff())
    return total


def pivot_within(scores: Tensor, first: int, last: int) -> int:
    """The layer of first..last whose layer below has the highest transition score, of (L,).

    The paper's Eq. 9 is `min(argmax + 1, L - 1)`, over all layers. There the differences between
    the lowest layers dominate: the pivot is then often one of these, from which hardly an answer
    survives.
    """
    # Layer 0 has no score, and no layer below.
    below = scores[max(first, 2) - 1 : last].tolist()
    return max(first, 2) + below.index(max(below)) if below else last


def transition_is_behind(
    entropy: Tensor, sparsity: Tensor, variance: Tensor, weights: Weights
) -> bool:
    """Whether the largest transition of layers 0..l, (l + 1,) each, lies below layer l.

    It looks at no later layer, so a pass can ask it after each one; never true before layer 2,
    the first with two differences.
    """
    layer = len(entropy) - 1
    if layer < 2:
        return False
    scores = transition_scores(entropy, sparsity, variance, weights).tolist()
    # Of equal scores the lowest layer's counts; layer 0 has none.
    return scores.index(max(scores[1:]), 1) < layer


def online_pivot(
    entropy: Tensor,
    sparsity: Tensor,
    variance: Tensor,
    weights: Weights,
    min_layer: int,
    max_layer: int,
) -> int:
    """The pivot that one causal pass finds: a rule of ours, the paper gives none.

    After each layer from `min_layer` on, the differences of the layers run so far are normalised
    among themselves; the first layer for which `transition_is_behind` is the pivot, and
    `max_layer` if there is none below it.

    Raises:
        ValueError: not 0 <= min_layer <= max_layer < L.
    """
    if not 0 <= min_layer <= max_layer < len(entropy):
        raise ValueError(
            f"min_layer {min_layer} and max_layer {max_layer} are not layers of 0 .. "
            f"{len(entropy) - 1} in this order"
        )
    for layer in range(min_layer, max_layer):
        seen = slice(layer + 1)
        if transition_is_behind(entropy[seen], sparsity[seen], variance[seen], weights):
            return layer
    return max_layer


def _normalised(steps: Tensor) -> Tensor:
    """Eq. 7: (n,) scaled to [0, 1]; zeros where all are equal."""
    if len(steps) == 0 or steps.min() == steps.max():
        return torch.zeros_like(steps)
    return (steps - steps.min()) / (steps.max() - steps.min())
