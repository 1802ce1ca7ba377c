"""Attention of chosen tokens where layers slide, against a mask by position; and over passes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.ragged import make_sinks
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.chosen_rows import attend_chosen_kernel, attend_chosen_reference
from vllm_kvx.ops.prompt.sliding_rows import Carried, SlidingRows, attend_within

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 32, 0.3


class Prompts:
    """Chosen tokens of some prompts, more and fewer than a tile of rows or keys."""

    def __init__(self, counts: list[int], device: str, step: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.counts = counts
        self.positions = [
            torch.randint(1, step, (count,), generator=generator).cumsum(0).to(device)
            for count in counts
        ]
        shape = sum(counts), HEADS, DIM
        self.query = torch.randn(shape, generator=generator).to(device)
        self.key, self.value = (
            torch.randn(shape[0], KV_HEADS, DIM, generator=generator).to(device) for _ in range(2)
        )

    def masked(self, window: int, soft_cap: float | None, sinks: Tensor | None) -> Tensor:
        """(N, H, D): every row by a softmax over all rows, of which it sees some."""
        prompt = torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))
        prompt, at = prompt.to(self.query.device), torch.cat(self.positions)
        behind = at[:, None] - at[None]
        seen = (behind >= 0) & (behind < window) & (prompt[:, None] == prompt[None])
        shared = HEADS // KV_HEADS
        key, value = (
            x.repeat_interleave(shared, 1).transpose(0, 1) for x in (self.key, self.value)
        )
        scores = self.query.transpose(0, 1) @ key.transpose(1, 2) * SCALE
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, len(at), 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : len(at)]
        return (weights @ value).transpose(0, 1)

    def rows(self, begin: int, end: int, before: Carried | None, keeps: int) -> SlidingRows:
        """Rows [begin, end) of all; `before` is of the first prompt that has some of them."""
        starts = np.cumsum(self.counts) - self.counts
        ends = np.minimum(starts + self.counts, end)
        counts = ends - np.maximum(starts, begin)
        positions = torch.cat(self.positions)[begin:end]
        return SlidingRows(counts[counts > 0].astype(np.int32), positions, before, keeps)


@pytest.mark.parametrize("window", [7, 1000])
@pytest.mark.parametrize("logits", ["plain", "capped", "sinks"])
def test_each_row_sees_its_window(window: int, logits: str, device: str) -> None:
    prompts = Prompts([1, 90, 40, 2], device)
    soft_cap = 1.5 if logits == "capped" else None
    sinks = make_sinks(HEADS, device, torch.float32) if logits == "sinks" else None
    rows = prompts.rows(0, 133, None, 0).within(window)
    entries = PagedKV(prompts.key[:, :, None], prompts.value[:, :, None])
    expected = prompts.masked(window, soft_cap, sinks)
    for attend in (attend_chosen_reference, attend_chosen_kernel):
        ours = torch.full_like(prompts.query, torch.nan)
        attend(prompts.query, entries, rows, ours, SCALE, soft_cap=soft_cap, sinks=sinks)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("edges", [(0, 1, 2, 30, 60, 90, 91, 92, 133), (0, 5, 133)])
def test_a_prompt_in_several_passes(edges: tuple[int, ...], device: str) -> None:
    """Each pass sees what the one before kept for it, by layer."""
    prompts, window = Prompts([1, 90, 40, 2], device), 25
    ends = np.cumsum(prompts.counts).tolist()
    found, before = [], None
    for begin, end in pairwise(edges):
        part = slice(begin, end)
        carried = before if begin not in (0, *ends) else None
        rows = prompts.rows(begin, end, carried, 0 if end in ends else window - 1)
        for name in ("lower", "upper"):
            key, value = rows.entries(name, prompts.key[part], prompts.value[part])
            out = torch.empty_like(prompts.query[part])
            attend_within(prompts.query[part], key, value, rows.within(window), out, SCALE)
        found.append(out)
        before = rows.after
    expected = prompts.masked(window, None, None)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)
