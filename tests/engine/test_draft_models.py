"""Draft models under policies, against the dense references.

A draft model is another model in the same engine, with KV groups of its own. It reads the whole
text, whatever the policy left of it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.gemfilter import Filter
from reference.structkv import Struct
from support import inside
from support.engine import BLOCK, Engine, running
from support.expected import FULL, Policy, Read, Speed, named
from support.nightly import nightly
from support.parity import ask, assert_parity, assert_parity_preempted, in_turn, room_for
from support.prompts import prompts_of
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvx.cache.kv_cache_specs import DraftAttentionSpec, draft_specs
from vllm_kvx.policy.spec import parse_policy

FIER = Retrieve(64)
LENGTHS = (97, 128, 65, 90)
# The first of them agrees with a draft model of the same weights, and the others do in part.
BY_DAY: list[Policy] = [FULL, Keep(kv_rate=0.4), Read(FIER), Speed(4)]


def drafted_by(draft: Path, count: int, **others: Any) -> dict[str, Any]:
    """Options of an engine that runs what `draft` has drafted, `count` tokens a step."""
    drafter = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": count}
    return {"speculative_config": drafter, "async_scheduling": False, **others}


def assert_drafts(engine: Engine, model: Path, policies: Sequence[Policy], tokens: int) -> None:
    """Answers are the references', with prefix hits and preempted, and blocks come back."""
    inside.poison_free_blocks(engine)
    prompts, each = prompts_of(LENGTHS, seed=11), in_turn(policies, len(LENGTHS))
    longer = [[*prompt, 7, 8, 9] for prompt in prompts]
    answers = ask(engine, prompts, each, max_tokens=tokens)
    again = ask(engine, longer, each, max_tokens=4)
    assert any(answer.cached for answer in again)
    assert_parity(model, [*answers, *again], each * 2, most=1)
    ids = engine.submit(prompts, tokens, [named(policy) for policy in each])
    engine.step(4)
    engine.throw_out()
    engine.finish()
    assert [engine.answered[i] for i in ids] == [answer.tokens for answer in answers]
    engine.assert_idle()


def test_a_draft_of_the_same_weights(tiny: Callable[..., Path], dense_ops: None) -> None:
    model = tiny()
    options = drafted_by(model, 3, max_model_len=256, enable_prefix_caching=True)
    with running(model, "full", config=room_for(BY_DAY), **options) as engine:
        assert_drafts(engine, model, BY_DAY, tokens=8)
        counted = engine.stats()["policies"]
        drafted, accepted = (
            [counted[str(parse_policy(named(policy)))][key] for policy in BY_DAY]
            for key in ("tokens_drafted", "tokens_accepted")
        )
        assert 0 < accepted[0] <= drafted[0], "what full drafts is what it answers"
        assert 0 < sum(accepted[1:]) < sum(drafted[1:])
        (spec,) = {
            type(group.kv_cache_spec)
            for group in engine.scheduler.kv_cache_config.kv_cache_groups
            if all(name.startswith("draft_model.") for name in group.layer_names)
        }
        assert spec is DraftAttentionSpec


@nightly
@pytest.mark.parametrize("drafts", [1, 5])
def test_a_smaller_one(tiny: Callable[..., Path], dense_ops: None, drafts: int) -> None:
    """Its pages are half as large as the model's, and its blocks hold as many tokens."""
    model, draft = tiny(), tiny(layers=2, heads=2, kv_heads=1)
    policies: list[Policy] = [
        Read(FIER, Keep(kv_rate=0.6)),
        Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.3),
        Struct(3, 0.4, 0.3, block_size=BLOCK),
        Filter(3, rate=0.4, window=8),
    ]
    options = drafted_by(draft, drafts, max_model_len=256, enable_prefix_caching=True)
    with running(model, "full", config=room_for(policies), **options) as engine:
        assert_drafts(engine, model, policies, tokens=16)


@nightly
def test_a_pool_that_is_too_small(tiny: Callable[..., Path], dense_ops: None) -> None:
    model = tiny()
    small = dict(num_gpu_blocks_override=66, max_model_len=288, max_num_seqs=6)
    assert_parity_preempted(model, [Read(FIER), FULL], **drafted_by(model, 3, **small))


def test_what_no_draft_model_may_have() -> None:
    """Larger pages than the model's, or layers without full attention."""
    shape = dict(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    full = FullAttentionSpec(**shape)
    layer: Any = SimpleNamespace(get_kv_cache_spec=lambda config: full)
    draft_specs([layer], 2 * full.page_size_bytes)
    spec = layer.get_kv_cache_spec(None)
    assert spec.block_size == 32 and spec.page_size_bytes == 2 * full.page_size_bytes
    for theirs, most, why in (
        (full, full.page_size_bytes - 1, "take 16384 bytes"),
        (SlidingWindowSpec(**shape, sliding_window=64), full.page_size_bytes, "slide over"),
    ):
        layer.get_kv_cache_spec = lambda config, theirs=theirs: theirs
        draft_specs([layer], most)
        with pytest.raises(ValueError, match=why):
            layer.get_kv_cache_spec(None)
