"""Adapters compiled, under CUDA graphs, with vLLM's own LoRA kernels. Skipped without a GPU.

Those kernels know 16-bit types alone, so answers are compared with the float32 references of all
merged checkpoints: each must be its own adapter's, and far from all others.
"""

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.structkv import Struct
from support.adapters import Adapters
from support.engine import Answer, running
from support.expected import FULL, Policy, Read, Speed, expect, load, named
from support.gpu import COMPILED
from support.inside import count_graph_replays
from support.parity import assert_identical, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: list[Policy] = [
    FULL,
    Keep(sinks=4, recent=60),
    Keep(kv_rate=0.3),
    Read(Retrieve(64, dense_below=0)),
]
# Their rows leave the batch between layers, so each pass has a mapping of its own.
PROPAGATING: list[Policy] = [
    Speed(4, anchors=4, tail=2),
    Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.3),
    Struct(3, struct_rate=0.4, kv_rate=0.3),
]
LENGTHS = (97, 33, 200, 5, 161, 64, 130, 250, 48, 500, 300, 90)
LORA: dict[str, Any] = COMPILED | dict(
    dtype="bfloat16", block_size=32, max_model_len=1024, max_num_seqs=16, enable_prefix_caching=True
)
LORA |= dict(enable_lora=True, max_loras=2, max_lora_rank=8)


@pytest.fixture(scope="module")
def adapters(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tiny(head_dim=64, hidden=256), tmp_path_factory.mktemp("adapters"), 3)


@pytest.mark.parametrize("policy", [*POLICIES, *PROPAGATING], ids=named)
def test_each_answer_is_its_adapters(adapters: Adapters, policy: Policy) -> None:
    """In batches of three adapters and none: cold, as prefix hits, and while FULL graphs replay."""
    prompts = prompts_of(LENGTHS)
    each = list(islice(cycle(adapters), len(prompts)))
    room = room_for(PROPAGATING if policy in PROPAGATING else POLICIES)
    with running(adapters[None], "full", config=room, **LORA) as engine:
        counts = count_graph_replays(engine)
        names = [named(policy)] * len(prompts)
        answers = engine.generate(prompts, 12, names, adapters=each)
        assert not any(answer.cached for answer in answers) and counts["full"] > 0
        again = engine.generate(prompts, 12, names, adapters=each)
        assert any(answer.cached for answer in again)
        engine.assert_idle()
    models = {adapter: load(path) for adapter, path in adapters.items()}
    own, others = [], []
    for answer, adapter in zip([*answers, *again], each * 2, strict=True):
        far = {name: _distance(model, answer, policy) for name, model in models.items()}
        own.append(far.pop(adapter))
        others.append(min(far.values()))
    # A near-tie of scores in bfloat16 may keep or read another entry.
    is_near = [mine < 0.5 * theirs for mine, theirs in zip(own, others, strict=True)]
    assert sum(is_near) >= 0.9 * len(is_near), (own, others)
    assert sum(own) / len(own) < 0.2 * sum(others) / len(others), (own, others)


def test_full_is_stock_bit_for_bit(adapters: Adapters) -> None:
    """With vLLM's own kernels, and FULL graphs of decode steps."""
    prompts = prompts_of(LENGTHS, seed=1)
    each = list(islice(cycle(adapters), len(prompts)))
    graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}

    def answers(policy: str | None) -> list[Answer]:
        with running(adapters[None], policy, **LORA | graphs) as engine:
            names = [None if policy is None else "full"] * len(prompts)
            return engine.generate(prompts, 24, names, adapters=each)

    assert_identical(answers("snapkv:kv_rate=0.1"), answers(None))


def _distance(model: Any, answer: Answer, policy: Policy) -> float:
    """How far the answer's logprobs are from the reference's, on average of its tokens."""
    expected = expect(model, answer.prompt, answer.tokens, policy)
    return float((answer.logprobs - expected.logprobs).abs().mean())
