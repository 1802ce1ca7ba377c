"""Where SPEED may cut: its layer-wise diagnostic (Eq. 6-7, Appendix B.2 and E), and divergence.

Plain torch. Shapes: L layers, H query heads, m generated tokens, N prompt tokens, d hidden
channels, V vocabulary. Everything is reduced in float64 and returned on the CPU.

Where the paper leaves room: attention is averaged over the heads before Eq. 7, which has no head's
index; a token's attention to itself counts as none of Eq. 6's three shares; correlation is
Pearson's. Curvature is that of Hénaff et al. (2021) and Hosseini and Fedorenko (2023): with
v_k = x_(k+1) - x_k between the hidden states of neighbouring tokens, the mean over k of
arccos(v_k . v_(k+1) / (|v_k| |v_(k+1)|)). Straightening of layer l is the curvature of layer 1's
output minus that of layer l's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Rows whose steps are computed at once: in float32 a long prompt's are larger than its states.
_SLICE = 4096


class Shares(NamedTuple):
    """Where one layer's generated tokens attend to, means over them; float64, () each.

    user: A^U of Eq. 6, on tokens of the user's prompt.
    first: A^BoS, on the first prompt token.
    earlier: A^(D<t), on generated tokens before the own one.
    entropy: H^U of Eq. 7 in nats, at most log |U|.
    """

    user: Tensor
    first: Tensor
    earlier: Tensor
    entropy: Tensor


def attention_shares(attention: Tensor, user: Tensor, prompt_len: int) -> Shares:
    """What generated tokens attend to in one layer (Eq. 6 and 7).

    attention: (H, m, N + m), softmax rows of the generated tokens, 0 at later ones.
    user: (u,) int64, indices of the user's prompt tokens, without the first token. prompt_len: N.
    """
    rows = attention.mean(dim=0, dtype=torch.float64)  # (m, N + m)
    # The last column that a row sees is its own.
    earlier = rows[:, prompt_len:].tril(-1).sum(dim=1)
    on_user = rows[:, user]  # (m, u)
    each = (on_user.sum(dim=1), rows[:, 0], earlier, conditional_entropy(on_user))
    return Shares(*torch.stack(each).mean(dim=1).cpu())


def conditional_entropy(attention: Tensor) -> Tensor:
    """H^U of Eq. 7 in nats, (m,), of attention (m, u) that need not sum to 1.

    A row without any attention counts as spread evenly: log u.
    """
    total = attention.sum(dim=1, keepdim=True)
    even = torch.full_like(attention, 1 / attention.shape[1])
    return torch.special.entr(torch.where(total > 0, attention / total, even)).sum(dim=1)


def turns(states: Tensor) -> Tensor:
    """Angles in radians between a trajectory's successive steps: (n, d) -> (n - 2,) float64.

    states: hidden states of neighbouring tokens, any float dtype. An angle at a step of length
    zero is nan.
    """
    parts = []
    for begin in range(0, len(states) - 2, _SLICE):
        steps = states[begin : begin + _SLICE + 2].float().diff(dim=0)
        steps = steps / steps.norm(dim=1, keepdim=True)
        cosines = (steps[:-1] * steps[1:]).sum(dim=1, dtype=torch.float64)
        parts.append(cosines.clamp(-1, 1).arccos().cpu())
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def straightening(curvature: Tensor) -> Tensor:
    """How much straighter each layer's trajectory is than layer 1's: (L,) -> (L,), 0 at the first.

    curvature: mean angle after each layer, the lowest one first.
    """
    return curvature[0] - curvature


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's correlation over the layers, (L,) each; nan where either is constant."""
    return float(torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1])


class Divergence(NamedTuple):
    """What changes of each predicted token, (m,) each.

    kl: KL(full || cut) in nats, float64.
    same: whether the most likely token is the same, bool.
    """

    kl: Tensor
    same: Tensor


def divergence(full: Tensor, cut: Tensor) -> Divergence:
    """How far a cutoff moves the predictions of m tokens.

    full, cut: logits (m, V), any float dtype, of the full-depth model and of the one under the
        cutoff. The result's (m,) tensors are on the CPU.
    """
    expected, actual = (logits.double().log_softmax(dim=-1) for logits in (full, cut))
    # A probability of zero in both is no difference.
    terms = expected.exp() * (expected - actual)
    kl = torch.where(expected.isneginf(), 0, terms).sum(dim=-1)
    return Divergence(kl.cpu(), (full.argmax(dim=-1) == cut.argmax(dim=-1)).cpu())
