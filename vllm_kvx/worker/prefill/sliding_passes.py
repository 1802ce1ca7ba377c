"""What layers that slide need in passes over chosen tokens: slots, and which tokens a row sees.

The tokens keep their positions. Of a prompt only the last ones are stored in these layers, where
vLLM's own manager has blocks for their positions: later tokens see no others. What tokens of the
same choice see of one another is at hand in the pass, or in the one before.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_kvx.models.passes import AttnMetadata
from vllm_kvx.ops.prompt.sliding_rows import Carried, SlidingRows
from vllm_kvx.worker.batch import to_device
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.packing import Piece


class PassesOfWindows:
    """The passes over the tokens that one layer chose, in order."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks
        self._carried: Carried | None = None

    def add(
        self,
        pieces: Sequence[Piece],
        positions: Tensor,
        block_tables: Sequence[Tensor],
        block_sizes: Sequence[int],
        metadata: AttnMetadata,
        slots: dict[str, Tensor],
    ) -> None:
        """Puts the next pass's attention metadata and slots in place, for its layers that slide.

        Args:
            pieces: of the pass, N rows at positions (N,) int64.
            block_tables: (R, B) int32 of the step's batch, block_sizes: tokens, by KV group.
            metadata, slots: of the pass, by layer name.
        """
        groups = self._hooks.sliding_groups()
        if not groups:
            return
        counts = np.array([piece.end - piece.begin for piece in pieces], dtype=np.int32)
        last, reach = pieces[-1], max(hook.window for hook in self._hooks.windows) - 1
        before = self._carried if pieces[0].begin else None
        rows = SlidingRows(counts, positions, before, 0 if last.is_last else reach)
        self._carried = rows.after
        places, ends = (
            to_device(np.repeat(each, counts), positions.device)
            for each in (
                [piece.chunk.batch_index for piece in pieces],
                [piece.chunk.state.settles_at for piece in pieces],
            )
        )
        by_name = {hook.layer.layer_name: hook.window for hook in self._hooks.windows}
        for group, names in groups.items():
            size, here = block_sizes[group], [name for name in names if name in slots]
            if here:
                block = block_tables[group][places, positions // size].long()
                slot = block * size + positions % size
                # Those that the next token sees. Of others vLLM may have freed the blocks.
                window = by_name[here[0]]
                slot = torch.where(positions > ends - window, slot, PAD_SLOT_ID)
                slots.update(dict.fromkeys(here, slot))
                metadata.update(dict.fromkeys(here, rows))
