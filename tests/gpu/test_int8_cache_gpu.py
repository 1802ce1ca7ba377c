"""A cache of 8-bit integers with scales, compiled and under CUDA graphs. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.fier import Retrieve
from support.engine import running
from support.expected import FULL, Read, named
from support.gpu import COMPILED
from support.inside import cache_dtypes, count_graph_replays
from support.int8 import NAME
from support.int8_answers import AS_IT_IS, away, rounding
from support.models import LOOKUP
from support.parity import ask, in_turn, room_for
from support.prompts import EDGES, lookups, prompts_of, shares_again

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES = ["full", "fier-128:dense_below=0", "fier-64:dense_below=0"]
PAGES = {"block_size": 32, "kv_cache_dtype": NAME}


@pytest.mark.parametrize("skipped", [(), ("0", "1")], ids=["all", "skipping"])
def test_checkpoint_answers(skipped: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks that FlashAttention reads in slices, and again after a prefix hit."""
    from vllm_kvx.worker.int8_cache import pieces

    monkeypatch.setattr(pieces, "SLICE", 256)
    questions = lookups(100, values=3)
    options = COMPILED | PAGES | {"max_num_batched_tokens": 600, "max_num_seqs": 64}
    options |= {"dtype": "bfloat16", "enable_prefix_caching": True}
    if skipped:
        options["kv_cache_dtype_skip_layers"] = list(skipped)
    with running(LOOKUP, POLICIES[0], config={"kv_layout": POLICIES}, **options) as engine:
        counts, dtypes = count_graph_replays(engine), cache_dtypes(engine)
        score, cached = shares_again(engine, POLICIES, *questions)
        engine.assert_idle()
    print(json.dumps({"accuracy": score, "replays": dict(counts), "cached": cached}))
    assert dtypes == [torch.bfloat16] * len(skipped) + [torch.int8] * (8 - len(skipped))
    assert cached and counts["full"]
    assert min(score.values()) >= 0.9, score


def test_parity_compiled(tiny: Callable[..., Path]) -> None:
    """In float32, where vLLM's kernel reads prompts, too. A number may be rounded either way."""
    model = tiny(head_dim=64, hidden=128)
    policies = [FULL, Read(Retrieve(64))]
    prompts = prompts_of((*EDGES, 300, 700))
    each = in_turn(policies, len(prompts))
    config = room_for(policies)
    options = COMPILED | PAGES | {"dtype": "float32", "max_num_seqs": 32}
    with running(model, named(policies[0]), config=config, **options) as engine:
        answers = ask(engine, prompts, each, max_tokens=8)
        engine.assert_idle()
    near, far = (away(model, answers, each, store) for store in (rounding(), AS_IT_IS))
    for name, differs in near.items():
        # On a CPU less than a tenth: a key that is rounded the other way moves all that follows.
        for part in (0.5, 0.8):
            assert differs.quantile(part) < far[name].quantile(part) / 4, (name, differs)
