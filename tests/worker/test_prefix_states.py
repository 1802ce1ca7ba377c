"""Hidden states go through pages of the KV cache bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import inside

from vllm_kvx.cache.messages import StateBlocks
from vllm_kvx.cache.states import StateRows
from vllm_kvx.worker.prefill.prefix_states import PrefixStates
from vllm_kvx.worker.prefill.stash import Stash

PAGES, NUM_BLOCKS, HEADS, BLOCK, HEAD = 3, 14, 2, 16, 8
PROMPT = 150


def caches(dtype: torch.dtype, padded: bool) -> list[torch.Tensor]:
    """Of three layers; `padded`: with room for a sidecar behind each page, and heads innermost."""
    made = []
    for _ in range(PAGES):
        width = 2 * HEAD
        flat = torch.zeros(NUM_BLOCKS, HEADS * BLOCK * width + (64 if padded else 0), dtype=dtype)
        page = flat[:, : HEADS * BLOCK * width]
        if padded:
            made.append(page.view(NUM_BLOCKS, BLOCK, HEADS, width).transpose(1, 2))
        else:
            made.append(page.view(NUM_BLOCKS, HEADS, BLOCK, width))
    return made


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("cache_dtype", "state_dtype", "hidden"),
    [
        (torch.bfloat16, torch.bfloat16, 32),
        (torch.uint8, torch.bfloat16, 32),  # fp8 keys
        (torch.float32, torch.float32, 40),  # does not divide a page
        (torch.float32, torch.bfloat16, 24),
    ],
)
def test_there_and_back(
    cache_dtype: torch.dtype,
    state_dtype: torch.dtype,
    hidden: int,
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside.copy_states_of(monkeypatch, tokens=64)
    page_bytes = HEADS * BLOCK * 2 * HEAD * cache_dtype.itemsize
    per_page = page_bytes // (hidden * state_dtype.itemsize)
    rows = StateRows(per_page, PAGES, per_page * PAGES // BLOCK * BLOCK)
    assert 0 < rows.tokens <= PROMPT
    layers = caches(cache_dtype, padded)
    stash = Stash(1024, hidden, state_dtype, torch.device("cpu"))
    states = PrefixStates(stash, rows, [SimpleNamespace(kv_cache=cache) for cache in layers])
    stash.take("writes", PROMPT)
    torch.manual_seed(0)
    stash.states.normal_()
    count = PROMPT // rows.tokens
    wanted = stash.states[torch.from_numpy(stash.rows("writes", 0, count * rows.tokens))].clone()

    blocks = tuple(np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS))[:count].tolist())
    states.in_step = {"writes": StateBlocks(places=tuple(range(count)), write=blocks)}
    states.restore()
    stash.release("writes")  # On the host others may have the pages now; the step reads them still.
    states.save()
    others = [block for block in range(NUM_BLOCKS) if block not in blocks]
    assert not any(layer[others].any() for layer in layers), "only these blocks are written"

    stash.states.zero_()
    stash.take("other", 70)
    stash.take("reads", PROMPT)
    states.in_step = {"reads": StateBlocks(read=blocks)}
    states.restore()
    got = stash.states[torch.from_numpy(stash.rows("reads", 0, count * rows.tokens))]
    assert torch.equal(got, wanted)
    assert not stash.states[torch.from_numpy(stash.rows("other", 0, 70))].any()
    states.in_step = {}
    states.restore()
    before = [layer.clone() for layer in layers]
    states.save()
    assert all(map(torch.equal, before, layers)), "a step without states writes none"
