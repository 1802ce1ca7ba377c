"""An fp8 KV cache that two layers skip, compiled and under CUDA graphs. Skipped without a GPU."""

import json

import pytest
import torch
from support.engine import running
from support.gpu import COMPILED
from support.inside import cache_dtypes, count_graph_replays
from support.models import LOOKUP
from support.parity import assert_identical
from support.prompts import lookups, shares_again

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SKIPPED = ["0", "1"]
OVER_FP8 = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "kv_cache_dtype_skip_layers": SKIPPED,
    "max_num_seqs": 64,
    **(COMPILED | {"block_size": 32, "max_num_batched_tokens": 2048}),
}
POLICIES = [
    "full",
    "snapkv:kv_floor=0",
    "snapkv:kv_floor=0,kv_rate=0.2,after=2",
    "criticalkv:kv_floor=0,kv_rate=0.2",
    "fier-128:dense_below=0",
    "snapkv:kv_floor=0,kv_rate=0.5+fier-64:dense_below=0",
]


def test_checkpoint_answers() -> None:
    """By the attention backend that vLLM chooses, again after a prefix hit."""
    questions = lookups(100, values=3)
    options = OVER_FP8 | {"enable_prefix_caching": True}
    with running(LOOKUP, POLICIES[0], config={"kv_layout": POLICIES}, **options) as engine:
        counts = count_graph_replays(engine)
        dtypes = cache_dtypes(engine)
        skip = [str(layer) for layer, dtype in enumerate(dtypes) if dtype == torch.bfloat16]
        score, cached = shares_again(engine, POLICIES, *questions)
        engine.assert_idle()
    print(json.dumps({"accuracy": score, "replays": dict(counts), "cached": cached}))
    assert skip == SKIPPED and cached and counts["full"]
    # All were 1.0 on an H200.
    assert min(score.values()) >= 0.9, score


def test_full_is_stock() -> None:
    """Bit for bit, on a server that retains and retrieves."""
    prompts, _, _ = lookups(24, values=3)
    options = OVER_FP8 | {"enforce_eager": True}
    with running(LOOKUP, None, **options) as engine:
        stock = engine.generate(prompts, max_tokens=6)
    with running(LOOKUP, "full", config={"kv_layout": POLICIES}, **options) as engine:
        ours = engine.generate(prompts, max_tokens=6)
        engine.assert_idle()
    assert_identical(ours, stock)
