"""One step of the worker, planned on the host: rows, lengths, prompts and retrieval."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_kvx.cache.pool_capacity import VLLMS_OWN
from vllm_kvx.policy.storage import IntArray, stored_lens
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import RetrievalStep, still_unknown
from vllm_kvx.worker.prefill.chunks import PromptChunk
from vllm_kvx.worker.requests import Requests
from vllm_kvx.worker.rows import ProjectedRows, SegmentRows, plan_rows


@dataclass
class Step:
    """A real batch between ``preprocess_state`` and ``prepare_attn``.

    Attributes:
        batch: the batch itself, which dummy batches are not.
        requests: (R,) request-state indices.
        begins, counts: (R,) int64 first position and tokens of each request.
        rows: that every segment of the decoder runs; None runs all.
        stored_lens: (S, R) stored lengths in all KV stages, this step's tokens included.
        chunks: prompts in the step that are scored, selected from or compacted.
        gaps: (S, R) starts and sizes of the gaps in force.
        projected: rows whose entries are projected into layers above; None if there are none.
        retrieval: on a server that retrieves.
        is_decode: every request is past its prompt and runs new tokens only, drafted ones among
            them, whose rows run every segment.
    """

    batch: InputBatch
    requests: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    rows: list[SegmentRows | None]
    stored_lens: IntArray
    chunks: list[PromptChunk]
    gaps: tuple[IntArray, IntArray]
    projected: ProjectedRows | None = None
    retrieval: RetrievalStep | None = None
    is_decode: bool = False

    @property
    def ends(self) -> np.ndarray:
        return self.begins + self.counts

    @property
    def online(self) -> list[PromptChunk]:
        """The chunks that find their pivot online, which run in passes of their own."""
        return [chunk for chunk in self.chunks if chunk.state.is_online]


def ends_of(batch: InputBatch) -> np.ndarray:
    """(R,) int64 tokens of each request that are computed once the step is."""
    begins = batch.num_computed_tokens_np.astype(np.int64)
    return begins + batch.num_scheduled_tokens[: batch.num_reqs]


def needs_python(
    requests: Requests,
    retrieval: Retrieval | None,
    keeps: bool,
    indices: np.ndarray,
    begins: np.ndarray,
    counts: np.ndarray,
) -> bool:
    """Whether a step does more than a CUDA graph of decodes replays.

    keeps: whether graphs keep the queries of tokens that retention waits for.
    indices: (R,) request states. begins, counts: (R,) computed tokens, and those in the step.
    """
    if requests.has_prompt(indices, begins) and not (
        keeps and requests.only_wait(indices, begins, counts)
    ):
        return True
    if retrieval is None:
        return False
    prompt_lens = requests.prompt_lens[indices]

    def stored_lens() -> IntArray:
        return requests.stored_lens(indices, begins.astype(np.int64) + counts)

    return retrieval.needs_python(indices, begins, counts, prompt_lens, stored_lens)


def plan_step(
    batch: InputBatch,
    requests: Requests,
    retrieval: Retrieval | None,
    moves_out: Container[str] = (),
) -> Step:
    """The plan of a real batch. moves_out: ids of prompts that move to new blocks in this step."""
    indices = batch.idx_mapping_np
    begins = batch.num_computed_tokens_np.astype(np.int64)
    counts = batch.num_scheduled_tokens[: batch.num_reqs].astype(np.int64)
    starts, sizes = requests.gaps(indices)
    ends = begins + counts
    is_single = batch.num_tokens == batch.num_reqs
    is_decode = not batch.has_prefill and (is_single or not requests.has_growing_gaps)
    # Retention may wait for generated tokens.
    if is_decode and not requests.has_prompt(indices, begins):
        # Past its prompt a request is past its gaps, and its rows run every segment.
        rows: list[SegmentRows | None] = [None] * len(requests.row_starts)
        gaps = starts, sizes
        step = Step(batch, indices, begins, counts, rows, ends - sizes, [], gaps, is_decode=True)
        if retrieval is not None:
            step.retrieval = _plan_retrieval(retrieval, step, requests, moves_out)
        return step
    chunks = requests.chunks(indices, begins, ends)
    row_starts, row_sizes = requests.row_gaps(indices)
    online = [chunk.batch_index for chunk in chunks if chunk.state.is_online]
    if online:  # They run on their own, so the passes of all others leave them out.
        row_starts[:, online], row_sizes[:, online] = 0, requests.prompt_lens[indices[online]]
    step = Step(
        batch,
        indices,
        begins,
        counts,
        plan_rows(begins, counts, row_starts, row_sizes, requests.projects[:, indices]),
        stored_lens(ends, starts, sizes),
        chunks,
        (starts, sizes),
        requests.projected(indices, begins, ends),
    )
    if retrieval is not None:
        step.retrieval = _plan_retrieval(retrieval, step, requests, moves_out)
    return step


def _plan_retrieval(
    retrieval: Retrieval, step: Step, requests: Requests, moves_out: Container[str]
) -> RetrievalStep:
    is_fresh, unknown = retrieval.sidecars.is_fresh(step.requests), retrieval.unknown[step.requests]
    if retrieval.drafts_ahead:
        unknown = still_unknown(unknown, step.begins, requests.prompt_lens[step.requests])
    if step.is_decode and not is_fresh.any():
        retrieval.sidecars.plan_decodes(step.requests, step.stored_lens, step.counts + unknown)
        return _planned(retrieval, step, requests, None, unknown)
    before = stored_lens(step.begins, *step.gaps) - unknown
    after = step.stored_lens.copy()
    moved = np.zeros(after.shape, dtype=bool)
    published, read = np.zeros_like(after), np.zeros_like(after)
    for chunk in step.chunks:
        if not chunk.is_last:
            continue
        state, i = chunk.state, chunk.batch_index
        # Whole blocks take their sidecars along when they are re-linked.
        after[:, i] = [s.rows if state.by_block else s.kept for s in state.storages]
        moved[:, i] = [state.is_moved(stage) for stage in range(len(state.storages))]
        if step.counts[i] > 1 and step.ends[i] > requests.prompt_lens[step.requests[i]]:
            # Generated tokens that come in again read what is stored before retention.
            read[:, i] = step.stored_lens[:, i]
        if state.req_id in moves_out:
            # The stages that everybody's prompt runs whole.
            published[:, i] = [
                s.rows - state.drafted if s.compacts and s.prefill.size == 0 else 0
                for s in state.storages
            ]
    has_gap = step.gaps[1] > 0
    retrieval.sidecars.plan(step.requests, before, after, moved, published, read, has_gap)
    return _planned(retrieval, step, requests, is_fresh, unknown)


def _planned(
    retrieval: Retrieval,
    step: Step,
    requests: Requests,
    is_fresh: np.ndarray | None,
    unknown: IntArray,
) -> RetrievalStep:
    return retrieval.plan(
        step.requests,
        step.begins,
        step.counts,
        requests.prompt_lens[step.requests],
        step.stored_lens,
        is_fresh,
        unknown,
        step.batch.num_draft_tokens_per_req,
    )


def of_stage(batch: InputBatch, stage: int, stored_lens: Tensor, step: Step | None) -> InputBatch:
    """`batch` with the stored lengths of a KV stage, (R,) int32 at a fixed address.

    step: None for a dummy batch, which stores all.
    """
    num_reqs = batch.num_reqs_after_padding
    # In every step: `dataclasses.replace` takes as long as all else here.
    changed = object.__new__(InputBatch)
    changed.__dict__.update(batch.__dict__, seq_lens=stored_lens[:num_reqs])
    if step is None:
        stored_lens[:num_reqs].copy_(batch.seq_lens[:num_reqs])
    else:
        bounds = np.zeros(num_reqs, dtype=np.int32)
        bounds[: batch.num_reqs] = step.stored_lens[stage]
        changed.seq_lens_cpu_upper_bound = torch.from_numpy(bounds)
    return changed


def check_blocks(
    step: Step,
    group_stages: Sequence[int],
    tables: BlockTables,
    num_full: int,
    num_ahead: int = 0,
) -> None:
    """Compares the blocks the scheduler gave with what the stored lengths need.

    num_full: stages with full attention, the first ones; of the others, where entries take the
    slots of others, it may be more than they need. num_ahead: tokens that may be drafted for a
    request in a step, and behind it: it keeps the blocks of rejected ones, for those to come.

    Raises:
        RuntimeError: the two sides disagree (debug switch ``kv_debug``).
    """
    storages = {chunk.batch_index: chunk.state.storages for chunk in step.chunks if chunk.is_last}
    for group, stage in enumerate(group_stages):
        if stage == VLLMS_OWN:
            continue
        lens = step.stored_lens[stage].copy()
        for index, by_stage in storages.items() if stage < num_full else ():
            lens[index] = by_stage[stage].rows
        held, size = tables.num_blocks.np[group, step.requests], tables.block_sizes[group]
        needed = -(-lens // size)
        if (held < needed).any() or (
            stage < num_full and (held > -(-(lens + num_ahead) // size)).any()
        ):
            raise RuntimeError(
                f"KV group {group}: scheduler gave {held.tolist()} blocks, "
                f"stored lengths need {needed.tolist()}"
            )
