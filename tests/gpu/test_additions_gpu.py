"""PyramidKV, Knorm, CriticalKV, GemFilter, StructKV over SnapKV, compiled and in CUDA graphs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.criticalkv import Critical
from reference.gemfilter import Filter
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from reference.structsnap import StructSnap
from support import inside
from support.engine import running
from support.expected import FULL, Policy, named
from support.gpu import EXACT, NEAR_TIE
from support.parity import assert_parity
from support.prompts import VOCAB, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: list[Policy] = [
    *(Pyramid(), Filter(3), StructSnap(3), Norm(), Critical(), FULL),
    Struct(3, struct_rate=0.5, kv_rate=0.2, score="critical"),
]


def test_parity_compiled(tiny: Callable[..., Path]) -> None:
    """Chunks, a mixed batch, and decode steps that replay FULL graphs."""
    model = tiny(head_dim=64, hidden=128)
    lengths = (33, 64, 65, 97, 129, 191, 300, 401)
    policies = [POLICIES[i % len(POLICIES)] for i in range(3 * len(lengths))]
    # Keys of one token have one norm in the first layer: Knorm wants prompts without repeats.
    generator = torch.Generator().manual_seed(5)
    prompts = [
        (3 + torch.randperm(VOCAB - 3, generator=generator))[: lengths[i % len(lengths)]].tolist()
        for i in range(len(policies))
    ]
    config = {"kv_layout": [named(policy) for policy in POLICIES]}
    with running(model, named(POLICIES[0]), max_num_seqs=32, config=config, **EXACT) as engine:
        counts = inside.count_graph_replays(engine)
        answers = engine.generate(prompts, 24, [named(policy) for policy in policies])
        before = dict(counts)
        long = prompts_of((900, 700, 1200), seed=3)
        decode = engine.generate(long, 33, [named(policy) for policy in POLICIES[:3]])
        engine.assert_idle()
    near = assert_parity(
        model, [*answers, *decode], [*policies, *POLICIES[:3]], most=4, near_tie=NEAR_TIE
    )
    full, steps = counts["full"] - before["full"], counts["steps"] - before["steps"]
    print(json.dumps({"near ties": near, "full": full, "steps": steps}))
    assert full >= 31 and full >= steps - 40, (full, steps)
