"""Attention over sequences that stand behind each other without padding, for transformers' models.

A model that is loaded with `attn_implementation=NAME` runs rows (1, T, hidden) of several sequences
if its layers are given `segments`; without them it attends as with SDPA. On a GPU this is torch's
FlashAttention for sequences of any length, elsewhere SDPA, a sequence at a time.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvx_packed"


@dataclass(frozen=True)
class Segments:
    """The sequences that lie one behind the other in T rows.

    ends: (B + 1,) int32, rows before each sequence, and last T.
    lengths: rows of each, at least 1.
    """

    ends: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> "Segments":
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(ends, tuple(lengths))


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Causal attention of every sequence to itself.

    query: (T, heads, D); key, value: (T, KV heads, D), of bfloat16 or float16 on a GPU.

    Returns (T, heads, D).
    """
    if query.is_cuda and _has_flash(query.shape[-1]):
        return _flash(query, key, value, segments, scale)
    return attend_reference(query, key, value, segments, scale)


def attend_reference(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> Tensor:
    """`attend` by SDPA, a sequence at a time; of any dtype."""
    found = []
    # Heads first, of each sequence a batch of one.
    of_all = (each.transpose(0, 1)[None].split(segments.lengths, 2) for each in (query, key, value))
    for q, k, v in zip(*of_all, strict=True):
        found.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        )
    return torch.cat(found, dim=2)[0].transpose(0, 1)


@cache
def _has_flash(dim: int) -> bool:
    """Whether FlashAttention runs heads of this size on this process's GPU, an Ampere or later."""
    recent = torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
    return recent and dim % 8 == 0 and dim <= 256


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    group = query.shape[1] // key.shape[1]
    if _takes_groups():
        options["enable_gqa"] = True
    elif group > 1:
        # torch 2.11 asks for as many heads of keys as of queries.
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    longest = max(segments.lengths)
    # It is causal where nothing to the right is in the window.
    output = varlen_attn(
        query, key, value, segments.ends, segments.ends, longest, longest,
        scale=scale, window_size=(-1, 0), **options,
    )  # fmt: skip
    # With more outputs only where they are asked for.
    assert isinstance(output, Tensor)
    return output


@cache
def _takes_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; query (1, heads, T, D), key and value (1, KV heads, T, D).

    A configuration's attention_dropout is left out, as tuning leaves out its own.
    """
    if segments is None:
        options["scaling"] = scaling
        found = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found[0], None
    # Rotary embeddings of another dtype than the model's projections widen queries and keys.
    query, key, value = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, segments, scale)[None], None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
