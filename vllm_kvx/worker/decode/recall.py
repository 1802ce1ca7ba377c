"""Recall: the share of exact attention that falls on what retrieval selects."""

import numpy as np
import torch
from torch import Tensor

from vllm_kvx.equations.softmax import capped
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.retrieve import Scratch
from vllm_kvx.ops.retrieval.rows import RetrievalRows


class RecallSampler:
    """Measures every n-th step that retrieves; such a step replays no CUDA graph.

    every: n; 0 measures none. mass: (rows,) float64 on the device, by the policies' rows in the
        counters, the shares added up over layers, rows and query heads. samples: (rows,) int64 on
        the host, how many shares that are.
    """

    def __init__(self, every: int, device: torch.device, num_policies: int) -> None:
        self.every = every
        self._countdown = every
        self.mass = torch.zeros(num_policies, dtype=torch.float64, device=device)
        self.samples = np.zeros(num_policies, dtype=np.int64)

    def reset(self) -> None:
        """Forgets all measured shares and begins to count steps anew."""
        self._countdown = self.every
        self.samples[:] = 0
        self.mass.zero_()

    @property
    def is_due(self) -> bool:
        """Whether the next step that retrieves is measured."""
        return self.every > 0 and self._countdown <= 1

    def takes_step(self, retrieves: bool) -> bool:
        """Whether to measure this step; called once a step."""
        if not self.every or not retrieves:
            return False
        if self._countdown > 1:
            self._countdown -= 1
            return False
        self._countdown = self.every
        return True

    def measure(
        self,
        query: Tensor,
        paged: PagedKV,
        block_table: Tensor,
        rows: RetrievalRows,
        scratch: Scratch,
        scale: float,
        policy_rows: np.ndarray,
        soft_cap: float | None = None,
    ) -> None:
        """Adds the share of each query head's exact attention that falls on the rows' selection.

        It is a share of what entries get: attention that goes to a sink counts on neither side.
        policy_rows: (R,) in the counters, of the batch's requests. soft_cap: of the logits.
        Reads back lengths from the device: for diagnosis, not for speed.
        """
        unit = scratch.unit
        lens, tokens, requests = (x.tolist() for x in (rows.lens, rows.tokens, rows.requests))
        counts = scratch.counts.tolist()
        for r, length in enumerate(lens):
            if not length:
                continue
            row = int(policy_rows[requests[r]])
            keys = paged.dense_keys(block_table[requests[r]], length).float()
            heads = query[tokens[r]].float().unflatten(0, (keys.shape[0], -1))
            for g, (q, k) in enumerate(zip(heads, keys, strict=True)):
                attention = capped(q @ k.T * scale, soft_cap).softmax(dim=-1)
                units = scratch.indices[r, g, : counts[r][g]].long()
                chosen = (units[:, None] * unit + torch.arange(unit, device=k.device)).flatten()
                mass = attention[:, chosen[chosen < length]].sum(dim=-1, dtype=torch.float64)
                self.mass[row] += mass.sum()
                self.samples[row] += len(mass)

    @property
    def recall(self) -> float | None:
        """Mean share so far; None before the first. Waits for the device."""
        samples = int(self.samples.sum())
        return self.mass.sum().item() / samples if samples else None

    def by_row(self) -> dict[int, tuple[float, int]]:
        """The mean share in [0, 1] and the samples' number, by policy row. Waits for the device."""
        measured = np.flatnonzero(self.samples).tolist()
        if not measured:
            return {}
        mass, samples = self.mass.tolist(), self.samples.tolist()
        return {row: (mass[row] / samples[row], samples[row]) for row in measured}
