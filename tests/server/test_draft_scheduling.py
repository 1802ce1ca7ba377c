"""Asynchronous scheduling beside drafts: which policies have it, and what others are told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import write_config
from support.engine import schedule_ahead
from support.refused import changed, drafted_by, lines_of

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.server.draft_checks import WITH_DRAFTS
from vllm_kvx.server.draft_scheduling import schedule_in_time
from vllm_kvx.server.start_refusal import reasons
from vllm_kvx.server.validate import ASYNC_SCHEDULER

WAITS = "after=4 waits for a number of generated tokens"
AFTER = "snapkv:kv_rate=0.1,after=4"


@pytest.mark.parametrize("drafter", [None, {"method": "eagle3"}])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("names", [["full"], ["full", "fier-64"], ["auto"]])
def test_it_is_off_unless_asked_for(drafter: Any, asked: bool | None, names: list[str]) -> None:
    """A server of `full` alone is as vLLM has it."""
    config = {"kv_policy": names[0], "kv_layout": names[1:]}
    args = SimpleNamespace(
        additional_config=config, speculative_config=drafter, async_scheduling=asked
    )
    schedule_in_time(args)
    goes_off = drafter and asked is None and names != ["full"]
    assert args.async_scheduling is (False if goes_off else asked)


def test_rows(stock) -> None:
    ahead = changed(stock, "scheduler_config.async_scheduling", True)
    refused = [WITH_DRAFTS[0].reason]
    assert reasons(WITH_DRAFTS, changed(ahead, "speculative_config", drafted_by("ngram"))) == (
        refused
    )
    for method in ("draft_model", "eagle", "eagle3", "mtp"):
        beside = changed(ahead, "speculative_config", drafted_by(method))
        assert not reasons(WITH_DRAFTS, beside), method
    beside = changed(ahead, "speculative_config", drafted_by("eagle3"))
    over_int8 = changed(beside, "cache_config.cache_dtype", "int8_per_token_head")
    by_rows = changed(beside, "model_config.uses_mrope", True)
    assert reasons(WITH_DRAFTS, over_int8) == reasons(WITH_DRAFTS, by_rows) == refused


@pytest.fixture
def eagle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of an engine whose tokens an EAGLE-3 head drafts, and which plans ahead."""
    schedule_ahead(monkeypatch, True)
    head = tmp_path / "head"
    head.mkdir()
    model = write_config(head, num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])
    return {"speculative_config": {"method": "eagle3", "model": model, "num_speculative_tokens": 3}}


@pytest.mark.parametrize("policy", [AFTER, f"{AFTER}+fier-64"])
def test_a_server_and_its_requests(make_config, eagle, policy: str) -> None:
    """A request is refused what the server is refused at start, and so is a server with room."""
    (found,) = lines_of(make_config, policy, **eagle)
    assert WAITS in found and "set --no-async-scheduling, or leave out after=" in found
    room = {"additional_config": {"kv_layout": [policy]}}
    assert lines_of(make_config, "full", **room, **eagle) == [found]
    room = {"additional_config": {"kv_layout": ["fier-64"]}}
    config = make_config("snapkv:kv_rate=0.1", dtype="float32", **room, **eagle)
    assert config.scheduler_config.scheduler_cls == ASYNC_SCHEDULER
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None and settings.layout.drafts_ahead
    with pytest.raises(PolicyError, match="leave out after="):
        check_fits(settings.parse(policy), settings.layout, settings.num_layers)
    check_fits(settings.parse("snapkv:kv_rate=0.5+fier-64"), settings.layout, settings.num_layers)
