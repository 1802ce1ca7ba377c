"""Drafts beside LoRA adapters, KV cache events, and positions in several rows (M-RoPE).

Answers are those of the dense references, whatever is drafted, and drafts of heads those of the
head's dense reference. As in ``test_state_drafts``, drafts of which any number is right take the
place of the drafter's own, which drafts beside them.
"""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.heads import KINDS, Head, build_head
from reference.wrappers import build
from support import inside
from support.adapters import Adapters, assert_merged
from support.configs import speculative
from support.drafts import Drafter, StateDrafts, some
from support.engine import running
from support.expected import FULL, Policy, Read, named
from support.heads import Models, assert_dense, drafted_by
from support.nightly import by_day
from support.parity import ask, assert_close, assert_parity, in_turn, room_for
from support.prompts import prompts_of
from support.text_models import text_of

from engine.test_kv_events import events, follow

POLICIES: list[Policy] = [FULL, Keep(kv_rate=0.3), Read(Retrieve(64))]
ROOM: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 5, "enable_prefix_caching": True}
LENGTHS = (97, 161, 65, 90, 150, 128)
COUNT, TOKENS = 3, 8
METHODS = ("eagle3", "eagle", "mtp", "ngram", "draft_model")


def drafted(method: str, draft: Path) -> dict[str, Any]:
    """Options of an engine whose drafter is `method`, and `draft` what drafts, if it is a model."""
    if method in KINDS:
        return drafted_by(draft, method, COUNT, **ROOM)
    drafter = {"method": method, "model": str(draft), "num_speculative_tokens": COUNT}
    config = speculative(COUNT) if method == "ngram" else drafter
    return {"speculative_config": config, "async_scheduling": False, **ROOM}


@pytest.mark.parametrize("method", by_day(METHODS, {0}))
def test_adapters_and_events(
    tiny: Callable[..., Path], tmp_path: Path, dense_ops: None, method: str
) -> None:
    """Each request has its adapter in all that it verifies, and events are what the cache holds.

    A step has several logits for each request, and each is its adapter's.
    """
    if method in KINDS:
        models = Models.of(tiny, tmp_path, method, layers=4)
    else:
        models = Models(tiny(layers=4), tiny(layers=4), tiny(layers=2))
    adapters = Adapters(models.model, tmp_path, 1)
    config = drafted(method, models.head) | events()
    config |= dict(enable_lora=True, max_loras=1, max_lora_rank=8)
    with running(models.served, "full", config=room_for(POLICIES), **config) as engine:
        inside.poison_free_blocks(engine)
        index = follow(engine, is_hybrid=True)
        watched = StateDrafts(engine) if method in KINDS else None
        drafter = Drafter.of(engine, some(3, COUNT), beside=method != "ngram")
        policies = [policy for policy in POLICIES for _ in adapters]
        each, names = list(islice(cycle(adapters), len(policies))), list(map(named, policies))
        prompts = prompts_of(LENGTHS, seed=5)
        answers = engine.generate(prompts, TOKENS, names, adapters=each)
        assert_merged(adapters, answers, policies, each)
        drafter.know(answers)
        again = engine.generate(prompts, TOKENS, names, adapters=each)
        assert_close(again, answers)
        assert sum(answer.cached > 0 for answer in again) > len(again) // 2
        assert max(drafter.accepted) == COUNT and index.held
        ids = engine.submit(prompts, TOKENS, names, each)
        engine.step(4)
        engine.throw_out()
        engine.finish()
        assert [engine.answered[i] for i in ids] == [answer.tokens for answer in answers]
        engine.assert_idle()
    if watched is not None:
        assert_dense(watched.found, models.dense(method))


@pytest.mark.skipif(
    find_spec("torchvision") is None,
    reason="torchvision is missing: `bash tests/run.sh` sets it up",
)
@pytest.mark.parametrize(
    ("method", "name"),
    by_day(
        [
            ("eagle3", "qwen3_vl"),
            ("eagle", "qwen3_vl"),
            ("ngram", "qwen3_vl"),
            ("draft_model", "qwen3_vl"),
            ("eagle3", "qwen2_5_vl"),
        ],
        {0},
    ),
)
def test_positions_in_several_rows(
    tiny: Callable[..., Path], tmp_path: Path, dense_ops: None, method: str, name: str
) -> None:
    """Those of a text are equal, and a drafter's own have one row."""
    model = build(tmp_path / "model", name)
    text, is_head = text_of(model, tmp_path / "text"), method in KINDS
    draft = build_head(tmp_path / "head", text, method) if is_head else tiny(layers=2)
    with running(model, "full", config=room_for(POLICIES), **drafted(method, draft)) as engine:
        assert engine.llm.llm_engine.vllm_config.model_config.uses_mrope
        inside.poison_free_blocks(engine)
        watched = StateDrafts(engine) if is_head else None
        drafter = Drafter.of(engine, some(3, COUNT), beside=method != "ngram")
        prompts, each = prompts_of(LENGTHS, seed=5), in_turn(POLICIES, len(LENGTHS))
        answers = ask(engine, prompts, each, max_tokens=TOKENS)
        assert_parity(model, answers, each, most=1)
        drafter.know(answers)
        again = ask(engine, prompts, each, max_tokens=TOKENS)
        assert_close(again, answers)
        assert any(answer.cached for answer in again) and max(drafter.accepted) == COUNT
        engine.assert_idle()
    if watched is not None:
        assert_dense(watched.found, Head.load(draft, text, method))
