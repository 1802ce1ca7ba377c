"""Passes of one row for each of some requests, after a step's own: what all that draft share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from vllm_kvx.models.hooked import HookedModel
from vllm_kvx.models.passes import AttnMetadata, StepPlan
from vllm_kvx.worker.batch import PassBatch
from vllm_kvx.worker.decode.step import RetrievalPass
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.score_and_move import PassWork


def slots_of(positions: Tensor, tables: Sequence[Tensor], block_sizes: Sequence[int]) -> Tensor:
    """(G, P) int64 slots of (P,) int64 positions, one of each row of the block tables.

    tables: (P, B) int32 by KV group. block_sizes: tokens of a block, by KV group.
    """
    return torch.stack(
        [
            table.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size
            for table, size in zip(tables, block_sizes, strict=True)
        ]
    )


class RowPasses:
    """Runs the whole model on one row of each request, without CUDA graphs.

    All of it is queued on the device, and nothing read back.
    """

    def __init__(
        self,
        model: Any,
        hooked: HookedModel,
        hooks: LayerHooks,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """model: as vLLM's runner calls it; `hooked` is the same with its hooks."""
        self._model, self._hooked, self._hooks = model, hooked, hooks
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config

    def next_ids(self, hidden: Tensor) -> Tensor:
        """(P,) int32, the likeliest token after each of the states (P, H)."""
        ids: Tensor = self._model.compute_logits(hidden).argmax(-1).int()
        return ids

    def run(
        self,
        ids: Tensor,
        batch: PassBatch,
        metadata: AttnMetadata,
        work: PassWork | None = None,
        retrieval_pass: RetrievalPass | None = None,
    ) -> Tensor:
        """(P, H) final states of tokens (P,), whose entries take the slots of `batch`.

        work, retrieval_pass: beside the layers' attention.
        """
        self._hooked.begin_step(StepPlan(hooks=self._hooks.during(work, retrieval_pass)))
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=len(batch.requests),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=build_slot_mappings_by_layer(batch.slot_mappings, self._kv_cache_config),
        ):
            hidden: Tensor = self._model(
                input_ids=ids,
                positions=batch.positions,
                inputs_embeds=None,
                intermediate_tensors=None,
            )
        return hidden
