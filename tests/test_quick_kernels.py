"""What vLLM launches in every step: done at once in the CPU mode, and by its kernels."""

from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's stand-ins for pinned memory.
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.sample import gumbel, logprob

from vllm_kvx.compat.quick_interpreter import stock_interpreter
from vllm_kvx.compat.quick_kernels import whole_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")

KERNELS = (
    block_table._compute_slot_mappings_kernel,
    block_table._gather_block_tables_kernel,
    buffer_utils._apply_write_kernel,
    input_batch._prepare_prefill_inputs_kernel,
    input_batch._prepare_pos_seq_lens_kernel,
    input_batch._combine_sampled_and_draft_tokens_kernel,
    input_batch._get_num_sampled_and_rejected_kernel,
    input_batch._post_update_kernel,
    logprob._topk_log_softmax_kernel,
    logprob._ranks_kernel,
    gumbel._gumbel_sample_kernel,
)
# Rows of the batch: by request state, and the tokens of each.
REQUESTS, TOKENS = [3, 0, 5, 1], [40, 1, 7, 90]
MAX_REQUESTS, MAX_TOKENS = 6, 160


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tables(sizes: tuple[int, ...], enabled: list[bool] | None = None) -> Any:
    """Block tables of one group for each block size, in which every request has some blocks."""
    rng = np.random.default_rng(len(sizes))
    made: dict[str, Any] = {
        "block_sizes": list(sizes),
        "max_num_reqs": MAX_REQUESTS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_num_blocks_per_group": [400 // size + 12 for size in sizes],
        "device": torch.device("cpu"),
        "slot_mapping_enabled": enabled,
    }
    if "sliding_window_reach" in signature(block_table.BlockTables).parameters:
        made["sliding_window_reach"] = [(0, 40, 70)[number % 3] for number in range(len(sizes))]
    found = block_table.BlockTables(**made)
    for request in range(MAX_REQUESTS):
        for part in range(2):
            ids = tuple(rng.integers(1, 999, 4 + part).tolist() for _ in sizes)
            found.append_block_ids(request, ids, overwrite=part == 0)
    found.apply_staged_writes()
    found.append_block_ids(1, tuple([7, 8] for _ in sizes), overwrite=False)
    found.apply_staged_writes()
    return found


def batch_results(requests: list[int]) -> list[torch.Tensor]:
    """What a step's preparation writes."""
    rows = ints(*requests)
    starts = ints(*np.cumsum([0, *TOKENS]).tolist())
    computed = ints(20, 0, 3, 55, 17, 9)
    positions = torch.full((MAX_TOKENS,), -7)
    lens = torch.full((MAX_REQUESTS,), 99, dtype=torch.int32)
    input_batch.prepare_pos_seq_lens(ints(*REQUESTS), starts, computed, positions, lens)
    # The last chunk of a prompt, none, one that ends a token before its prompt, and the middle.
    ids, ahead = torch.full((MAX_TOKENS,), -3, dtype=torch.int32), torch.full((2, MAX_REQUESTS), 7)
    texts = torch.arange(MAX_REQUESTS * 400, dtype=torch.int32).view(MAX_REQUESTS, 400)
    texts, prompts = texts % 91, ints(0, 300, 0, 95, 0, 17)
    given = ids, ahead.int(), ints(*REQUESTS), starts, texts, prompts
    input_batch.prepare_prefill_inputs(*given, computed)
    found = [positions, lens, *given[:2]]
    for sizes, enabled in (((32,), None), ((16, 32, 64), [True, False, True])):
        made = tables(sizes, enabled)
        found += [each.gpu.clone() for each in made.block_tables]
        made.slot_mappings.fill_(5)
        made.compute_slot_mappings(rows, starts, positions % 128, MAX_TOKENS)
        found.append(made.slot_mappings)
        for each in made.input_block_tables:
            each.fill_(3)
        if min(requests) >= 0:
            reads = (
                {"num_computed_tokens": computed} if hasattr(made, "sliding_window_reach") else {}
            )
            made.gather_block_tables(rows, len(requests) + 1, **reads)
            found += made.input_block_tables
    return found


def sampling_results(vocab: int) -> list[torch.Tensor]:
    """Greedy choices, logprobs and ranks, with ties and masked tokens."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[0, ::7] = logits[0].max()
    logits[1, 5:] = float("-inf")
    rows, at = ints(*REQUESTS), torch.arange(4)
    temperatures, seeds = torch.zeros(MAX_REQUESTS), torch.arange(MAX_REQUESTS)
    chosen = gumbel.gumbel_sample(logits, rows, temperatures, seeds, at, True, False)
    masked = torch.full_like(chosen, vocab - 1)
    found = [chosen]
    for tokens in (chosen, masked):
        scores = logprob.compute_topk_scores(logits, 3, tokens)
        found += [scores.logprobs, scores.logprob_token_ids, scores.selected_token_ranks]
    return found


def counted_results() -> list[torch.Tensor]:
    """How many tokens stay of what was drafted, where one prompt is not in yet."""
    args = ints(2, 1, 3, 1), ints(41, 1, 7, 40), ints(0, 3, 4, 8, 9), ints(*REQUESTS)
    return list(input_batch.get_num_sampled_and_rejected(*args, ints(1, 90, 2, 30, 4, 5)))


def taken_in(requests: list[int], *, with_counts: bool) -> list[torch.Tensor]:
    """What a step reads of sampled and drafted tokens, and what it leaves of them."""
    generator = torch.Generator().manual_seed(5)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(0, 50, shape, generator=generator)

    ids, last, drafts = tokens(20).int(), tokens(MAX_REQUESTS, 1), tokens(MAX_REQUESTS, 3)
    # Requests by state: 3 is decoding with drafts, 0 alone, 5 has a prompt, and 1 its last chunk.
    starts, edges = ints(0, 4, 5, 12, 20), ints(0, 4, 5, 6, 8)
    lens, prompts = ints(44, 31, 7, 22), ints(30, 21, 9, 40, 9, 12)
    args = ids, ints(*REQUESTS), last, starts, lens, prompts, drafts, edges, 8
    found = [input_batch.combine_sampled_and_draft_tokens(*args), ids]
    computed, totals = ints(30, 14, 3, 40, 17, 0), ints(31, 21, 4, 41, 18, 12)
    everything, sampled = tokens(MAX_REQUESTS, 64).int(), tokens(4, 4)
    counts = tokens(MAX_REQUESTS, 50).int() if with_counts else None
    how_many, rejected = ints(3, 1, 0, 1), ints(1, 0, 0, 1)
    left = starts if with_counts else None
    given = ints(*requests), computed, last, counts, sampled, how_many, rejected, left
    input_batch.post_update(*given, everything, totals)
    return [*found, computed, last, everything, totals, *([counts] if counts is not None else [])]


def other_types() -> list[torch.Tensor]:
    """Writes that are staged for one tensor, some of a type that numpy has not."""
    found = []
    for dtype in (torch.int32, torch.float32, torch.int64):
        made = buffer_utils.StagedWriteTensor((4, 30), dtype=dtype, device=torch.device("cpu"))
        made.stage_write(2, 3, [1, 2, 3])
        made.stage_write(0, 0, [])
        made.stage_write(2, 5, [9] * 20)
        made.apply_write()
        found.append(made.gpu)
    return found


def assert_same(quick: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    for each, other in zip(quick, stock, strict=True):
        assert each.dtype == other.dtype
        assert torch.equal(
            each.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        )


def all_results() -> list[torch.Tensor]:
    sampled = [*sampling_results(300), *sampling_results(2500)]
    dummy = batch_results([3, -1, 5, 1])
    taken = [*taken_in(REQUESTS, with_counts=True), *taken_in([3, -1, 5, 1], with_counts=False)]
    return [*batch_results(REQUESTS), *dummy, *sampled, *counted_results(), *taken, *other_types()]


def test_results_are_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    with stock_interpreter():
        stock = all_results()
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: pytest.fail("interpreted"))
    assert_same(all_results(), stock)


def test_what_is_left_to_the_interpreter() -> None:
    """Sampling with a temperature, logits of bfloat16, and what is beyond a row of blocks."""

    def results() -> list[torch.Tensor]:
        logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
        rows, at = ints(*REQUESTS), torch.arange(4)
        warm, seeds = torch.full((MAX_REQUESTS,), 0.7), torch.arange(MAX_REQUESTS)
        found = [gumbel.gumbel_sample(logits, rows, warm, seeds, at, True, False)]
        found.append(logprob.compute_token_logprobs(logits.bfloat16(), at[:, None]))
        made = tables((32,))
        starts = ints(0, 1, 2, 3, 4)
        made.compute_slot_mappings(rows, starts, torch.tensor([1, 2, 3, 32 * 24]), MAX_TOKENS)
        return [*found, made.slot_mappings[:, :3].clone(), made.slot_mappings[:, 4:].clone()]

    quick = results()
    with stock_interpreter():
        assert_same(quick, results())


def test_a_batch_of_nothing_changes_nothing() -> None:
    made, none = tables((16, 32)), torch.empty(0, dtype=torch.int32)
    made.slot_mappings.fill_(5)
    made.compute_slot_mappings(none, ints(0), none.long(), MAX_TOKENS)
    assert (made.slot_mappings == -1).all(), "all of it is padding"
    made.input_block_tables[0].fill_(3)
    input_batch.prepare_pos_seq_lens(
        none, ints(0), none, none.long(), made.input_block_tables[0][0]
    )
    assert (made.input_block_tables[0][0] == 0).all()
    assert (made.input_block_tables[0][1:] == 3).all()


def test_kernels_of_this_vllm_are_known() -> None:
    assert all(whole_of(kernel.fn) is not None for kernel in KERNELS)
    assert whole_of(buffer_utils._load_ptr.fn) is None


def test_a_kernel_with_other_parameters_is_interpreted() -> None:
    def _ranks_kernel(output_ptr: Any, logits_ptr: Any, further: int) -> None:
        raise NotImplementedError

    _ranks_kernel.__module__ = logprob.__name__
    assert whole_of(_ranks_kernel) is None
    stock = SimpleNamespace(__module__=logprob.__name__, __name__="_another_kernel")
    assert whole_of(stock) is None
