"""The model as its own drafter: it reads what a policy retrieves, and the next step verifies.

Passes of one row for each request follow a step whose tokens are sampled, greedily. They read the
request's own entries and no others, those that `policy` retrieves in the layers where it does, and
write the drafted tokens' entries into slots that the scheduler has reserved behind the request's
own. These entries count for nobody: the step that verifies computes the same positions in all
layers again, by the request's own policy. So answers are that policy's, whatever is drafted.

How many tokens stayed is known on the device alone. The host goes by bounds, of which the greater
one makes room, and the groups of the index are written that may be full by either.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_kvx.config.drafts import Drafts
from vllm_kvx.worker.batch import to_device
from vllm_kvx.worker.draft_rows import Bounds, DraftRows
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.row_passes import RowPasses

logger = init_logger("vllm.kvx.worker")


class SelfDrafter(BaseSpeculator):
    """In the place of the speculator that vLLM's runner has made for `ngram`.

    drafts_anyway: whatever is cached; so until the server is ready, which warms its kernels up.
    drafted: ids of the requests of the last step for which tokens were drafted.
    least_bytes: of keys and values, below which a step's requests get no drafts.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, runner: Any, drafts: Drafts) -> None:
        """runner: vLLM's GPUModelRunner, whose model is loaded."""
        state = runner.model_state
        assert drafts.policy.retrieve is not None and state.retrieval is not None
        self._runner, self._state = runner, state
        self._budget = drafts.policy.retrieve.budget_units
        weights = _most_of_ranks(sum(weight.nbytes for weight in runner.model.parameters()))
        self.least_bytes = drafts.cache_to_weights * weights
        self._token_bytes = _token_bytes(state.hooks)
        logger.info(
            "The model drafts for itself, reading by %s, in steps whose requests hold %d tokens.",
            drafts.policy,
            -int(-self.least_bytes // self._token_bytes),
        )
        self.drafts_anyway = True
        self.drafted: frozenset[str] = frozenset()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Nothing: graphs of passes come with those of the model (``row_graphs``)."""

    def capture(self) -> None:
        """Nothing, as ``init_cudagraph_manager``."""

    def propose(
        self,
        input_batch: InputBatch,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(R, K) int64 drafts of the requests of a step; 0 where there are none.

        num_speculative_tokens: no more than K; the columns behind are the caller's.
        """
        states, attn = self._runner.req_states, self._state.attention
        most: int = self._runner.num_speculative_steps
        count = most if num_speculative_tokens is None else num_speculative_tokens
        drafts = torch.zeros(
            input_batch.num_reqs, most, dtype=torch.int64, device=self._runner.device
        )
        self.drafted = frozenset()
        if dummy_run or attn is None or not count:
            return drafts
        assert attn.batch is input_batch
        requests = input_batch.idx_mapping_np
        begins = input_batch.num_computed_tokens_np.astype(np.int64)
        ends = begins + input_batch.num_scheduled_tokens[: input_batch.num_reqs]
        rows = np.flatnonzero(ends >= states.prefill_len.np[requests])
        if not len(rows) or not self._pays(ends[rows]):
            return drafts
        self.drafted = frozenset(input_batch.req_ids[row] for row in rows.tolist())
        given = input_batch.num_draft_tokens_per_req
        verified = ends if given is None else ends - given
        places = to_device(rows, drafts.device)
        indices = input_batch.idx_mapping.index_select(0, places).long()
        bounds = Bounds(
            verified[rows],
            ends[rows],
            states.num_computed_tokens.gpu.index_select(0, indices).long(),
        )
        tables = tuple(table.index_select(0, places) for table in attn.block_tables)
        ids = states.last_sampled_tokens.index_select(0, indices)[:, 0].int()
        drafted = RowPasses(self._runner).draft(
            ids,
            DraftRows(
                attn,
                rows,
                requests[rows],
                tables,
                self._state.block_tables.block_sizes,
                bounds,
                count,
                self._runner.max_model_len,
                self._budget,
            ),
        )
        drafts[places, :count] = drafted.long()
        return drafts

    def _pays(self, lens: np.ndarray) -> bool:
        """Whether drafts save time in a step whose requests hold (P,) so many entries."""
        if self.drafts_anyway:
            return True
        return float(lens.sum()) * self._token_bytes >= self.least_bytes

    def those_drafted(self, tokens: DraftTokenIds) -> DraftTokenIds:
        """`tokens`, what the scheduler is told of a step, without what was not drafted."""
        ids = zip(tokens.req_ids, tokens.draft_token_ids, strict=True)
        kept = [each if request in self.drafted else [] for request, each in ids]
        return DraftTokenIds(tokens.req_ids, kept)


def _most_of_ranks(count: int) -> int:
    """The largest of the ranks' counts: they have to agree on which steps draft.

    Of experts one rank may have more than another.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return count
    most = torch.tensor(count)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return int(most)


def _token_bytes(hooks: LayerHooks) -> int:
    """Bytes of one token's keys and values on this rank."""
    return sum(hook.entry_bytes * hook.layer.impl.num_kv_heads for hook in hooks.layers)
