"""Dense reference for `full` and SPEED-K: a transformers model, one visibility per layer.

Below the cutoff every token sees every token at or before it. From the cutoff on, only full-depth
tokens exist: the anchors (first prompt tokens), the tail (last prompt tokens) and whatever was
generated. Positions are never renumbered.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)

from . import masked


@dataclass(frozen=True)
class Result:
    """S output tokens and the distribution that each was drawn from."""

    tokens: list[int]
    logprobs: Tensor  # (S, V) float32, log-softmax over the whole vocabulary

    @property
    def chosen_logprob(self) -> Tensor:
        """(S,) float32: logprob of each token in `tokens`."""
        return self.logprobs.gather(1, torch.tensor(self.tokens).view(-1, 1)).squeeze(1)

    @property
    def argmax(self) -> list[int]:
        """The greedy token of each step."""
        return self.logprobs.argmax(dim=1).tolist()

    @property
    def margin(self) -> Tensor:
        """(S,) float32: top-1 minus top-2 logprob; a tiny one is a tie that rounding may flip."""
        top = self.logprobs.topk(2, dim=1).values
        return top[:, 0] - top[:, 1]

    @property
    def regret(self) -> Tensor:
        """(S,) float32: top-1 logprob minus that of the token in `tokens`; 0 where it is greedy."""
        return self.logprobs.max(dim=1).values - self.chosen_logprob


def load(model: str | Path | PreTrainedModel) -> PreTrainedModel:
    """The float32 CPU model with eager attention; a loaded one is passed through."""
    if isinstance(model, PreTrainedModel):
        return model
    config = AutoConfig.from_pretrained(model)
    wraps = config.get_text_config() is not config
    kind = AutoModelForImageTextToText if wraps else AutoModelForCausalLM
    loaded = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval()


def generate(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    *,
    cutoff: int | None,
    anchors: int = 1,
    tail: int = 1,
    max_tokens: int,
    ignore_eos: bool = True,
    prompt_len: int | None = None,
    dense: bool = False,
) -> Result:
    """At least one greedy token under SPEED with `cutoff`; None is full attention.

    `prompt_len` less than len(prompt) says that the rest of `prompt` was generated already, so
    that those tokens are full-depth. `dense` recomputes the whole sequence at every step; without
    it, keys and values are kept and each step computes one row.
    """
    model = load(model)
    eos = model.config.eos_token_id
    stop = set() if ignore_eos or eos is None else {eos} if isinstance(eos, int) else set(eos)
    visible = full_depth(len(prompt) if prompt_len is None else prompt_len, anchors, tail)
    sequence, rows = list(prompt), []
    cache = None if dense else DynamicCache()
    while len(rows) < max_tokens and not (rows and sequence[-1] in stop):
        rows.append(forward(model, sequence, cutoff, visible, last=1, cache=cache))
        sequence.append(int(rows[-1].argmax()))
    return Result(sequence[len(prompt) :], torch.cat(rows))


def score(
    model: str | Path | PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    *,
    cutoff: int | None,
    anchors: int = 1,
    tail: int = 1,
) -> Result:
    """The distributions that `generated` was drawn from, given these tokens, in one dense pass."""
    visible = full_depth(len(prompt), anchors, tail)
    rows = forward(load(model), prompt + generated[:-1], cutoff, visible, last=len(generated))
    return Result(list(generated), rows)


def full_depth(prompt_len: int, anchors: int, tail: int) -> Tensor:
    """(prompt_len,) bool: the prompt tokens that exist in every layer."""
    if anchors < 0 or tail < 1:
        raise ValueError(f"anchors={anchors} must be at least 0 and tail={tail} at least 1")
    position = torch.arange(prompt_len)
    return (position < anchors) | (position >= prompt_len - tail)


@torch.no_grad()
def forward(
    model: PreTrainedModel,
    sequence: list[int],
    cutoff: int | None,
    visible: Tensor,
    *,
    last: int,
    cache: DynamicCache | None = None,
) -> Tensor:
    """(last, V) float32 log-softmax of the last rows. With a cache, only rows not in it are run.

    `visible` is (prompt_len,) bool; what follows the prompt is visible in every layer.
    """
    count = len(masked.layers_of(model))
    if cutoff is not None and not 0 <= cutoff <= count:
        raise ValueError(f"cutoff={cutoff} is not within the {count} layers")
    start = cache.get_seq_length() if cache is not None else 0
    total = len(sequence)
    generated = torch.ones(total - len(visible), dtype=torch.bool)
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    # Hidden rows are computed too, reading themselves so that no row is empty; nobody reads them.
    sparse = causal & torch.cat([visible, generated]) | torch.eye(total, dtype=torch.bool)
    lower, upper = causal[start:], sparse[start:]
    return masked.forward(
        model,
        sequence[start:],
        lambda layer: lower if cutoff is None or layer < cutoff else upper,
        start=start,
        last=last,
        cache=cache,
    )
