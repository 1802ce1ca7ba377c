"""Models that also read images, compiled, under CUDA graphs. Skipped without a GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference import fastkv
from reference.fier import Retrieve
from reference.wrappers import WRAPPERS, build
from support.engine import running
from support.expected import FULL, Policy, Read, Speed
from support.gpu import EXACT
from support.inside import count_graph_replays, runs_compiled_ranges
from support.parity import ask, assert_parity, room_for
from support.prompts import prompts_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's code of it imports that"),
]

POLICIES: list[Policy] = [
    FULL,
    Speed(4),
    fastkv.Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    fastkv.Keep(kv_rate=0.2),
    Read(Retrieve(64)),
]


@pytest.mark.parametrize("name", WRAPPERS)
def test_parity_compiled(tmp_path: Path, name: str) -> None:
    """By the stock decoder's own compiled pieces, which read rows of positions as vLLM has them."""
    model = build(tmp_path / name, name, head_dim=64)
    prompts = prompts_of((97, 33, 200, 5, 161, 64, 130, 250, 48, 500))
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(prompts))]
    options = EXACT | {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 16}
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        assert runs_compiled_ranges(engine)
        counts = count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=16)
        assert counts["full"] > 0
        engine.assert_idle()
    assert_parity(model, answers, policies)
