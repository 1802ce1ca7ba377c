"""Prompts with images, compiled, under CUDA graphs. Skipped without a GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.wrappers import WRAPPERS, add_processor, build
from support.engine import running
from support.expected import FULL, Policy, Read
from support.gpu import EXACT
from support.inside import count_graph_replays
from support.parity import room_for
from support.pictures import Shown, ask, assert_parity_shown

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's code of it imports that"),
]

POLICIES: list[Policy] = [Keep(kv_rate=0.2), Read(Retrieve(64)), FULL]
# Of the reference's choices: its encoder's outputs differ from vLLM's by 1e-5.
NEAR_TIE = 1e-4


@pytest.mark.parametrize("name", WRAPPERS)
def test_parity_compiled(tmp_path: Path, name: str) -> None:
    """In chunks, beside texts; a step of decodes replays a FULL graph, whatever the prompt showed."""
    model = add_processor(build(tmp_path / name, name, head_dim=64), name)
    shown = [
        Shown.of(name, 20, (7, 9, 0), 60, seed=1),
        Shown.of(name, 30, (3, 5, 2), 70, (9, 8, 3), 20, seed=3),
        Shown.of(name, 90, (7, 9, 5), 12, seed=5),
        Shown.of(name, 140, seed=6),
        Shown.of(name, 64, (8, 8, 8), 40, seed=8),
        Shown.of(name, 5, (10, 10, 4), 200, seed=4),
    ]
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(shown))]
    options = EXACT | {
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 2},
    }
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        counts = count_graph_replays(engine)
        answers = ask(engine, shown, policies, 12)
        assert counts["full"] > 0
        engine.assert_idle()
    assert_parity_shown(model, shown, answers, policies, near_tie=NEAR_TIE)
