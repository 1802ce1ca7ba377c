"""Attention of chosen tokens in layers that slide: each sees those chosen within its window.

A window is one of positions. Tokens that were not chosen do not exist in these layers, so that of a
window some tokens are there, one after the other among the rows of a prompt.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.chosen_rows import ChosenRows, attend_chosen

# More than positions there are.
_FAR = 1 << 32


@dataclass(frozen=True)
class Carried:
    """What rows of a pass see of the pass before, which ran earlier tokens of the same prompt.

    positions: (C,) int64. entries: by layer name, keys and values (C, G, D).
    """

    positions: Tensor
    entries: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class SlidingRows:
    """Rows of a pass: chosen tokens of P prompts, each prompt's together and in order.

    counts: (P,) int32 on the host, rows of each. positions: (N,) int64 on the device.
    before: of the first prompt, whose earlier tokens an earlier pass ran; None if it begins here.
    after: filled for the next pass, which goes on with the last prompt; None if that ends here.
    """

    def __init__(
        self, counts: np.ndarray, positions: Tensor, before: Carried | None, keeps: int
    ) -> None:
        """keeps: rows of the last prompt that the next pass sees at most; 0 if there is none."""
        self.counts, self.before = counts, before
        self._positions, device = positions, positions.device
        lengths = counts.astype(np.int64)
        if before is not None:
            self._positions = torch.cat([before.positions, positions])
            lengths[0] += len(before.positions)
        self._keeps = min(keeps, int(lengths[-1]))
        self.after: Carried | None = None
        if self._keeps:
            self.after = Carried(self._positions[-self._keeps :])
        starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        self._prompts = async_tensor_h2d(np.repeat(np.arange(len(counts)), lengths), device=device)
        self._starts = async_tensor_h2d(np.repeat(starts, lengths), device=device)
        columns = np.arange(lengths.max(), dtype=np.int32)
        tables = np.minimum(starts[:, None] + columns, total - 1).astype(np.int32)
        self._tables = async_tensor_h2d(tables, device=device)
        self._by_window: dict[int, ChosenRows] = {}

    def within(self, window: int) -> ChosenRows:
        """The rows with what each sees, as entries of its prompt, earlier ones included."""
        if window not in self._by_window:
            skipped = len(self._positions) - int(self.counts.sum())
            # Ascending over all prompts.
            at = self._prompts * _FAR + self._positions
            lowest = self._prompts * _FAR + (self._positions - window + 1).clamp(min=0)
            firsts = torch.searchsorted(at, lowest) - self._starts
            entries = torch.arange(len(at), device=at.device) - self._starts
            self._by_window[window] = ChosenRows(
                np.arange(len(self.counts)),
                self.counts,
                entries[skipped:],
                self._tables,
                firsts[skipped:].int(),
            )
        return self._by_window[window]

    def entries(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all that the rows see, (C + N, G, D), by the pass's own (N, G, D).

        Notes those that the next pass sees.
        """
        if self.before is not None:
            earlier = self.before.entries.pop(layer)
            key, value = (torch.cat(pair) for pair in zip(earlier, (key, value), strict=True))
        if self.after is not None:
            self.after.entries[layer] = (
                key[-self._keeps :].clone(),
                value[-self._keeps :].clone(),
            )
        return key, value


def attend_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: ChosenRows,
    out: Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Writes the attention of `rows`, as ``SlidingRows.within`` has them, to `out`.

    Args:
        query, out: (N, H, D), the model's dtype. key, value: (C + N, G, D), the same.
        scale, soft_cap, sinks: as ``attend_chosen`` takes them.
    """
    entries = PagedKV(key[:, :, None], value[:, :, None])
    attend_chosen(query, entries, rows, out, scale, soft_cap=soft_cap, sinks=sinks)
