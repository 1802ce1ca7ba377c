"""A rank of a pipeline, all of whose layers run the same rows of a step.

Rows leave between two ranks, so that a rank runs whole: by the stock decoder, on fewer rows. From
rank to rank every row of a step is handed on, as in stock vLLM; nobody reads those that have left.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import override_forward_context
from vllm.sequence import IntermediateTensors

from vllm_kvx.models.decoder import without_graphs
from vllm_kvx.models.hooked import HookedModel
from vllm_kvx.models.passes import BatchRows, Pass

_HIDDEN = "hidden_states"


class RankModel(HookedModel):
    """Mixin over a vLLM model of which this worker has the layers of one rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the stock model puts out, for the T rows of the step's batch.

        That is the final (T, H) states, 0 of rows that have left, or what the next rank takes.
        """
        if self._plan.passes is None:
            return super().__call__(*args, **kwargs)
        passes = list(self.take_plan().passes or ())
        assert len(passes) <= 1, "all layers of a rank run the same rows"
        given: IntermediateTensors = kwargs["intermediate_tensors"]
        if passes:
            return self._run_rows(passes[0], given, kwargs["positions"])
        return torch.zeros_like(given[_HIDDEN]) if get_pp_group().is_last_rank else given

    def _run_rows(self, now: Pass, given: IntermediateTensors, positions: Tensor) -> Any:
        source = now.source
        assert isinstance(source, BatchRows) and source.rows is not None
        rows = source.rows
        states = {name: term.index_select(0, rows) for name, term in given.tensors.items()}
        with now.hooks, override_forward_context(without_graphs(now.slot_mapping)):
            out = super().__call__(
                input_ids=None,
                positions=positions.index_select(-1, rows),
                intermediate_tensors=IntermediateTensors(states),
                inputs_embeds=None,
            )
        if isinstance(out, IntermediateTensors):
            every = {
                name: term.index_copy(0, rows, out[name]) for name, term in given.tensors.items()
            }
            return IntermediateTensors(every)
        return out.new_zeros(positions.shape[-1], out.shape[1]).index_copy_(0, rows, out)
