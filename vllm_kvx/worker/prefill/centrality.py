"""Scores summed over layers, of prompts that are coming in, and the blocks that they rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvx.ops.prompt.blocks import top_blocks
from vllm_kvx.ops.prompt.select import select_kept
from vllm_kvx.policy.axes import ScoreSpec
from vllm_kvx.scores.table import SCORES


class Centrality:
    """The sums of running prompts, on the device, from their first layer to the one that uses them.

    metrics: by request, (3,) float64 of every layer so far: entropy, sparsity, variance; of prompts
        whose pivot is found online.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        # Blocks that stay, of prompts that came in with this step, until `take_blocks`.
        self._blocks: dict[str, dict[int, Tensor]] = {}
        self.metrics: dict[str, list[Tensor]] = {}

    def add(self, req_id: str, spec: ScoreSpec, now: Tensor) -> Tensor:
        """Adds a layer's scores (n,) float32 to the sum, by the spec's decay; the sum so far."""
        assert spec.decay is not None
        total = SCORES[spec.family].carry(self._sums.get(req_id), now, spec.decay)
        self._sums[req_id] = total
        return total

    def end(self, req_id: str) -> None:
        """Forgets the sum of a prompt's scores, which no later layer uses."""
        self._sums.pop(req_id, None)

    def rank_blocks(
        self,
        req_id: str,
        selected: Tensor | None,
        kept: Sequence[tuple[int, bool]],
        block_size: int,
        window: int,
    ) -> None:
        """Ranks a prompt's blocks by its sum.

        Args:
            selected: (m,) int32, the tokens that go on, ascending; None if all do.
            kept: by stage, the entries that stay, 0 where none go; and whether the stage holds
                every token, or those that go on.
            block_size: entries of a block. window: last tokens, whose blocks stay.
        """
        lower = self._sums[req_id]
        upper = lower if selected is None else lower.index_select(0, selected)
        self._blocks[req_id] = {
            stage: top_blocks(
                lower if holds_all else upper,
                num_blocks=-(-entries // block_size),
                block_size=block_size,
                window=window,
            )
            for stage, (entries, holds_all) in enumerate(kept)
            if entries
        }

    def take_blocks(self) -> dict[str, dict[int, Tensor]]:
        """Hands over which blocks stay, by request id and stage, and forgets them.

        Each is (k,) int64 on the device: places in the block table, ascending.
        """
        blocks, self._blocks = self._blocks, {}
        return blocks

    def choose(self, req_id: str, num_keys: int, window: int, count: int) -> Tensor:
        """The `count` most central tokens of a prompt, (count,) int64 ascending; ends its sum."""
        values = self._sums.pop(req_id)
        self.metrics.pop(req_id, None)

        def column(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((1,), value, dtype=dtype, device=values.device)

        zero = column(0, torch.int64)
        return select_kept(
            values[None],
            column(num_keys),
            column(window),
            column(count),
            torch.cat([zero, column(num_keys, torch.int64)]),
            torch.cat([zero, column(count, torch.int64)]),
            count,
        )[0].long()
