"""Runs passes of one row for each of some requests: by CUDA graphs where the server has them."""

from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from vllm_kvx.models.passes import StepPlan
from vllm_kvx.worker.decode.draft_pass import draft_pass
from vllm_kvx.worker.decode.step import RetrievalPass
from vllm_kvx.worker.draft_rows import DraftRows, RowPass
from vllm_kvx.worker.row_graphs import DraftGraphs, row_graphs_of


class RowPasses:
    """Runs the whole model on one row of each request.

    All of it is queued on the device, and nothing read back.
    """

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's GPUModelRunner, whose KV cache is there."""
        self._model, self._config = runner.model, runner.vllm_config
        self._kv_cache_config = runner.kv_cache_config
        self._hooked, self._hooks = runner.model_state.hooked, runner.model_state.hooks
        self._graphs = row_graphs_of(runner)

    @property
    def may_overwrite_states(self) -> bool:
        """Whether a pass may take the memory of the states that the step's own pass put out.

        These lie in vLLM's graph pool where that pass replayed graphs of pieces. Passes here have a
        pool of their own, unless sleep is to take that of all graphs.
        """
        return bool(self._graphs) and bool(self._config.use_cumem_cudagraph_pool)

    def next_ids(self, hidden: Tensor) -> Tensor:
        """(P,) int32, the likeliest token after each of the states (P, H)."""
        ids: Tensor = self._model.compute_logits(hidden).argmax(-1).int()
        return ids

    def draft(self, ids: Tensor, rows: DraftRows) -> Tensor:
        """(P, K) int32, the likeliest tokens after (P,) `ids`, one after the other.

        They hold until tokens are drafted again.
        """
        for graphs in self._graphs:
            if isinstance(graphs, DraftGraphs):
                drafted = graphs.draft(ids, rows)
                if drafted is not None:
                    return drafted
        found = []
        for number in range(rows.count):
            ids = self.next_ids(self._run_eagerly(ids, rows.row_pass(number)))
            found.append(ids)
        return torch.stack(found, dim=1)

    def run(self, ids: Tensor, now: RowPass) -> Tensor:
        """(P, H) final states of tokens (P,), which hold until the next pass runs."""
        for graphs in self._graphs:
            hidden = graphs.run(ids, now)
            if hidden is not None:
                return hidden
        return self._run_eagerly(ids, now)

    def _run_eagerly(self, ids: Tensor, now: RowPass) -> Tensor:
        batch, reads, retrieval = now.batch, now.reads, self._hooks.retrieval
        retrieves: RetrievalPass | None = None
        metadata = now.attn.of_decodes(batch, now.lens, now.bounds)
        if reads is not None:
            assert retrieval is not None
            retrieval.sidecars.plan_drafts(reads.requests, reads.least, reads.most)
            retrieves = draft_pass(retrieval, reads, now.lens, batch.block_tables)
        self._hooked.begin_step(StepPlan(hooks=self._hooks.during(now.work, retrieves)))
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=now.num_rows,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=build_slot_mappings_by_layer(batch.slot_mappings, self._kv_cache_config),
        ):
            hidden: Tensor = self._model(
                input_ids=ids,
                positions=batch.positions,
                inputs_embeds=None,
                intermediate_tensors=None,
            )
        if reads is not None:
            assert retrieval is not None
            retrieval.sidecars.forget()
        return hidden
