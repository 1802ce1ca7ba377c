"""What of a prompt that another server has computed is used, and what is told of one."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from vllm_kvx.cache.handed_over import HandedOverPrompts, tell
from vllm_kvx.cache.request_kv import RequestKV
from vllm_kvx.config.handed_over import KEY, HandedOver, sampling_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of

KEPT, BLOCK, VOCAB, EOS = parse_policy("snapkv:kv_rate=0.25,kv_floor=0"), 16, 100, 7


def request_of(transfer: dict[str, Any], length: int = 128, **asked: Any) -> Request:
    params = SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": transfer}, **asked)
    params.update_from_generation_config({}, EOS)
    return Request("a", list(range(length)), params, None)


def is_used(changes: dict[str, Any], **asked: Any) -> bool:
    """Whether a prompt of 128 tokens is gone on with, 32 of which another server has kept."""
    told = {"policy": str(KEPT), "token": EOS, "sampling": {}, "adapter": None}
    told |= {"logprob_ids": [], "logprobs": [], "rank": 0} | changes
    found = {"remote_block_ids": [[4, 5]], "remote_num_tokens": 128, KEY: told}
    request = request_of({"do_remote_prefill": True, **found}, **asked)
    kv = RequestKV(storage_of(KEPT, 128, 0, BLOCK, 8), KEPT)
    manager: Any = SimpleNamespace(requests={"a": kv}, kv_cache_group_id=0, block_size=BLOCK)
    prompts = HandedOverPrompts([manager], VOCAB)
    used = prompts.add_request(request, KEPT)
    assert used is kv.is_compact is prompts.is_coming(request) is bool(request.num_output_tokens)
    # In its place the prompt is computed here, all of it.
    assert prompts.may_load(request, KEPT) is used
    return used


def test_what_another_server_has_kept_is_used() -> None:
    assert is_used({})
    assert is_used({"logprob_ids": [3, VOCAB - 1], "logprobs": [-1.0, None], "rank": VOCAB})


@pytest.mark.parametrize(
    "changes",
    [
        {"token": VOCAB},
        {"token": 1 << 40},
        {"logprob_ids": [-1], "logprobs": [-1.0]},
        {"logprob_ids": [1 << 40], "logprobs": [-1.0]},
        {"rank": 1 << 40},
        {"policy": "knorm:kv_rate=0.25"},
        {"adapter": "b"},
    ],
)
def test_what_does_not_suit_the_model_or_the_request_is_not(changes: dict[str, Any]) -> None:
    """Clients can write anything; ids that a model does not have would end the engine."""
    assert not is_used(changes)


def test_a_first_token_that_min_tokens_rules_out_is_drawn_anew() -> None:
    assert is_used({"token": 8}, min_tokens=2)
    for min_tokens in (1, 2):
        assert not is_used({}, min_tokens=min_tokens)
        assert not is_used({}, min_tokens=min_tokens, ignore_eos=True)
        assert not is_used({"token": 8}, min_tokens=min_tokens, stop_token_ids=[8])


@pytest.mark.parametrize(
    "name",
    ["speed-4", "selfonly-4", "fastkv:tsp_layer=3,tsp_floor=0,kv_rate=1", "gemfilter:layer=3"],
)
@pytest.mark.parametrize("more", [0, 1])
def test_as_many_blocks_come_as_each_stage_keeps(name: str, more: int) -> None:
    """Under policies that propagate, in layers above too: blocks of 16, of a prompt of 2,000."""
    policy, length = parse_policy(name), 2000
    kvs = [RequestKV(storage_of(policy, length, start, BLOCK, 8), policy) for start in (0, 4)]
    managers: Any = [
        SimpleNamespace(requests={"a": kv}, kv_cache_group_id=group, block_size=BLOCK)
        for group, kv in enumerate(kvs)
    ]
    counts = [-(-kv.storage.stored_len(length) // BLOCK) for kv in kvs]
    assert counts[1] < length // BLOCK
    told = {"policy": str(policy), "token": 8, "sampling": {}, "adapter": None}
    told |= {"logprob_ids": [], "logprobs": [], "rank": 0}
    transfer = {"do_remote_prefill": True, "remote_num_tokens": length, KEY: told}
    transfer["remote_block_ids"] = [[0] * counts[0], [0] * (counts[1] + more)]
    request, prompts = request_of(transfer, length), HandedOverPrompts(managers, VOCAB)
    assert prompts.add_request(request, policy) is (more == 0)
    assert prompts.may_load(request, policy) is (more == 0)


def test_a_whole_prompt_comes_without_its_last_state() -> None:
    """Under `swiftkv` layers above hold all tokens, and the last one is computed anew."""
    policy = parse_policy("swiftkv-4")
    kv = RequestKV(storage_of(policy, 128, 4, BLOCK, 8), policy)
    manager: Any = SimpleNamespace(requests={"a": kv}, kv_cache_group_id=0, block_size=BLOCK)
    told = {"policy": str(policy), "token": 8, "sampling": {}, "adapter": None}
    told |= {"logprob_ids": [], "logprobs": [], "rank": 0}
    prompts = HandedOverPrompts([manager], VOCAB)
    others = {"policy": "swiftkv-5"}, {"adapter": "b"}
    for its, loads in ((told, True), *((told | other, False) for other in others)):
        request = request_of({"do_remote_prefill": True, KEY: its})
        assert not prompts.add_request(request, policy)
        assert prompts.may_load(request, policy) is loads


@pytest.mark.parametrize(("asked", "columns"), [(None, 0), (0, 1), (2, 3), (-1, 5)])
def test_as_many_logprobs_are_told_as_were_asked_for(asked: int | None, columns: int) -> None:
    """Whatever others in the step asked for, whose columns are empty here; as JSON."""
    request = request_of({"do_remote_decode": True}, logprobs=asked)
    request.append_output_token_ids(3)
    ids, logprobs = np.array([[3, 5, 6, 0, 0]]), np.array([[-0.5, -1, -np.inf, -np.inf, -np.inf]])
    output = EngineCoreOutput(
        request_id="a",
        new_token_ids=[3],
        new_logprobs=LogprobsLists(ids, logprobs, np.array([1])),
        kv_transfer_params={"do_remote_prefill": True},
    )
    tell([output], {"a": request}, lambda _: KEPT)
    params = json.loads(json.dumps(output.kv_transfer_params, allow_nan=False))
    told = HandedOver.of(params)
    assert told is not None and told.token == 3
    assert told.sampling == sampling_of(request.sampling_params)  # type: ignore[arg-type]
    assert told.logprob_ids == tuple(ids[0, :columns])
    assert told.logprobs == tuple(logprobs[0, :columns])
    assert told.rank == bool(columns)
