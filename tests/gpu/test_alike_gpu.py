"""FlashAttention's plan of a batch, built once for the KV groups of a stage. Needs a GPU."""

import pytest
import torch
from support.engine import Answer, running
from support.gpu import COMPILED
from support.inside import count_graph_replays, plan_for_every_group
from support.models import LOOKUP
from support.prompts import prompts_of
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Without torch.compile, two compilations of which may differ in bits.
OPTIONS = COMPILED | {
    "block_size": 32,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.mark.parametrize("policy", ["speed-6", "speed-5", "speed-6+fier-64:dense_below=0"])
def test_one_plan_gives_what_each_of_its_own_gives(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in FULL graphs and in steps with prompts; mixed requests."""
    prompts = prompts_of((5, 33, 130, 700, 1500, 17, 64, 250))
    policies = ["full" if i % 3 == 2 else None for i in range(len(prompts))]
    shared = []
    update = FlashAttentionMetadataBuilder.update_block_table

    def counted(*args: object) -> object:
        shared.append(args)
        return update(*args)

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "update_block_table", counted)

    def answers() -> list[Answer]:
        with running(LOOKUP, policy, dtype="bfloat16", **OPTIONS) as engine:
            counts = count_graph_replays(engine)
            found = engine.generate(prompts, max_tokens=24, policies=policies)
            engine.assert_idle()
        assert counts["full"] > 12, counts
        return found

    once = answers()
    assert shared
    shared.clear()
    plan_for_every_group(monkeypatch)
    each = answers()
    assert not shared
    for one, other in zip(once, each, strict=True):
        assert one.tokens == other.tokens and torch.equal(one.logprobs, other.logprobs)
