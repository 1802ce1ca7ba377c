"""A request's block tables once its prompt is in: cut short, and re-linked where blocks stay or go.

The scheduler frees the blocks (``cache/managers``); here only the worker's tables change, never the
cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_kvx.cache.messages import PrivateBlocks
from vllm_kvx.cache.pool_capacity import VLLMS_OWN
from vllm_kvx.policy.storage import Storage


def show_by_slots(tables: BlockTables, groups: Sequence[int]) -> None:
    """Has vLLM gather all blocks of these KV groups, those of stages.

    From 0.33 on it leaves out what the window of a token's position has passed. Where layers slide
    above a cut, slots follow stored entries, and these blocks may be the first ones.
    """
    reach: list[int] | None = getattr(tables, "_sliding_window_reach", None)
    if reach is None:
        return
    for group in groups:
        reach[group] = 0
    on_device: Any = tables.sliding_window_reach  # type: ignore[attr-defined]
    on_device.copy_(torch.tensor(reach, dtype=torch.int32))


def cut_tables(
    tables: BlockTables, req_index: int, storages: Sequence[Storage], group_stages: Sequence[int]
) -> int:
    """Cuts a request's block tables, on the host, to the blocks of the entries that stay.

    New blocks come behind these from the next step on.

    storages: by KV stage, of layers with full attention. group_stages: the stage of each KV group,
        ``VLLMS_OWN`` of those to leave alone, as are stages of layers that slide. Returns how many
        blocks go.
    """
    num_blocks, freed = tables.num_blocks.np, 0
    for group, stage in enumerate(group_stages):
        if stage == VLLMS_OWN or stage >= len(storages):
            continue
        kept = -(-storages[stage].kept // tables.block_sizes[group])
        freed += int(num_blocks[group, req_index]) - kept
        num_blocks[group, req_index] = kept
    return freed


def relink(
    tables: BlockTables,
    chosen: dict[str, dict[int, Tensor]],
    req_index: dict[str, int],
    group_stages: Sequence[int],
) -> dict[str, dict[int, np.ndarray]]:
    """Moves the blocks that stay to the front of their tables, after the forward pass.

    chosen: by request id and stage, (k,) int64 places in the table, ascending.
    Returns the same for the scheduler, which frees the others: host arrays whose copies may be
    under way.
    """
    for req_id, by_stage in chosen.items():
        row = req_index[req_id]
        for group, stage in enumerate(group_stages):
            if stage in by_stage:
                kept = by_stage[stage]
                table = tables.block_tables[group].gpu
                table[row, : len(kept)] = table[row].index_select(0, kept)
    return {
        req_id: {stage: async_copy_to_np(kept) for stage, kept in by_stage.items()}
        for req_id, by_stage in chosen.items()
    }


def take_private(
    tables: BlockTables,
    private: Mapping[str, Sequence[PrivateBlocks | None]],
    req_index: dict[str, int],
) -> None:
    """Puts the new blocks that hold what prompts keep into the tables, after the forward pass.

    private: by request id, a list by KV group; None where a group keeps its blocks.
    """
    for req_id, by_group in private.items():
        for group, moved in enumerate(by_group):
            if moved is None:
                continue
            table = tables.block_tables[group].gpu
            places, blocks = (
                async_tensor_h2d(np.array(ints, dtype=kind), device=table.device)
                for ints, kind in ((moved.places, np.int64), (moved.blocks, np.int32))
            )
            table[req_index[req_id], places] = blocks
