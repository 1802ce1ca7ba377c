"""How far attention over 8-bit entries is from attention over 16 bits; for ``int8_cache``.

Plain torch in float32, one layer's query against keys of several kinds. What is compared is the
rounding of the entries alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.retrieval_layer import DEVICE, GROUP, Heads
from vllm_kvx.equations.retrieval import quantize_keys, reduce_heads, token_scores
from vllm_kvx.ops.int8.numbers import quantized, undone

# Standard deviation of the logits: attention to everything, and to few entries.
SPREADS = (1.0, 4.0)
KINDS = ("random", "heavy-tailed", "outlier channels", "biased channels")
_OUTLIERS, _FACTOR = 4, 20.0


def entries(kind: str, *size: int) -> Tensor:
    """(..., D) float32, rounded to bfloat16: what a cache of 16 bits holds.

    heavy-tailed: Student's t of two degrees. outlier channels: four of a head's are 20 times as
    large. biased channels: to four is added 20, the same for all tokens, which a softmax does not
    see: as models whose keys have a bias.
    """
    x = torch.randn(size, device=DEVICE)
    if kind == "heavy-tailed":
        squares = torch.randn(2, *size, device=DEVICE).square().sum(dim=0)
        x /= (squares / 2).sqrt()
    if kind == "outlier channels":
        x[..., :_OUTLIERS] *= _FACTOR
    if kind == "biased channels":
        x[..., :_OUTLIERS] += _FACTOR
    return x.bfloat16().float()


def rounded(x: Tensor, scales: torch.dtype) -> Tensor:
    """Through 8-bit integers with a scale of this type for each token and head."""
    return undone(*quantized(x, scales))


def rounded_to_fp8(x: Tensor) -> Tensor:
    """The same with e4m3, as vLLM's `fp8_per_token_head`."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = (x.abs().amax(dim=-1, keepdim=True) / most).clamp(min=1e-6)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "int8, fp32 scales": partial(rounded, scales=torch.float32),
    "int8, bf16 scales": partial(rounded, scales=torch.bfloat16),
    "fp8, fp32 scales": rounded_to_fp8,
}


def logits_of(query: Tensor, keys: Tensor) -> Tensor:
    """query (H, D), keys (G, N, D) -> (G, H / G, N)."""
    grouped = query.unflatten(0, (len(keys), -1))
    return grouped @ keys.mT * query.shape[-1] ** -0.5


def selected(query: Tensor, keys: Tensor, budget: int) -> Tensor:
    """(G, budget): what FIER chooses by 1-bit keys of these keys; N is a multiple of the group."""
    scores = token_scores(query, *quantize_keys(keys, GROUP))
    return reduce_heads(scores, len(keys), "max", 1.0).topk(budget, dim=-1).indices


def lines(shape: Heads, length: int, budget: int) -> Iterator[dict[str, Any]]:
    """A line for each kind of keys, spread of logits, what is read, and rounding; random values.

    cosine, least_cosine: over query heads. most: the largest error of a channel; of_most: over the
    largest channel of the output. chosen_again: share of the entries that FIER chooses by the exact
    keys and by rounded ones.
    """
    for kind in KINDS:
        size = shape.kv_heads, length, shape.head_dim
        keys, values = entries(kind, *size), entries("random", *size)
        asked = torch.randn(shape.heads, shape.head_dim, device=DEVICE)
        for spread in SPREADS:
            query = asked * (spread / logits_of(asked, keys).std())
            exact = logits_of(query, keys)
            best = exact.amax(dim=1).topk(budget, dim=-1).indices
            chosen = selected(query, keys, budget)
            for name, through in ROUNDED.items():
                other_keys, other_values = through(keys), through(values)
                other = logits_of(query, other_keys)
                again = selected(query, other_keys, budget)
                shared = [len(set(a) & set(b)) for a, b in pairs(chosen, again)]
                for read, of in (("all", None), (str(budget), best)):
                    right = _attend(exact, values, of)
                    found = _attend(other, other_values, of)
                    cosine = torch.cosine_similarity(right, found, dim=-1)
                    most = float((found - right).abs().max())
                    yield {
                        "keys": kind,
                        "spread": spread,
                        "entries": length,
                        "read": read,
                        "rounding": name,
                        "cosine": round(float(cosine.mean()), 7),
                        "least_cosine": round(float(cosine.min()), 7),
                        "most": most,
                        "of_most": round(most / float(right.abs().max()), 5),
                        "chosen_again": round(sum(shared) / again.numel(), 4),
                    }


def pairs(one: Tensor, other: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    return zip(one.tolist(), other.tolist(), strict=True)


def _attend(logits: Tensor, values: Tensor, of: Tensor | None) -> Tensor:
    """(G, H / G, D), over the entries `of` (G, n), or all."""
    if of is not None:
        logits = logits.gather(2, of[:, None].expand(-1, logits.shape[1], -1))
        values = values.gather(1, of[..., None].expand(-1, -1, values.shape[2]))
    return logits.softmax(dim=-1) @ values
