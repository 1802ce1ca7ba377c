"""Which requests with a KV connector's parameters may hand a prompt over, or go on with one."""

import json
from typing import Any

import pytest
from support.request_checks import MODEL, settings_of, validator
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.logits_processor import (
    build_custom_logits_processors_params_validator,
)

from vllm_kvx.config.handed_over import sampling_of
from vllm_kvx.server.request_check import class_path

KEPT, WAITS = "snapkv:kv_rate=0.2", "snapkv:kv_rate=0.2,window=4,after=2"
CHOICE = StructuredOutputsParams(choice=["a", "b"])
DRAFTS = "snapkv:kv_rate=0.2,window=4,lookahead=4"
TOLD = {
    "policy": KEPT,
    "token": 7,
    "sampling": sampling_of(SamplingParams()),
    "adapter": None,
    "logprob_ids": [],
    "logprobs": [],
    "rank": 0,
}


def handed(policy: str, transfer: dict[str, Any], **kwargs: Any) -> None:
    """Asks a server with a KV connector."""
    room = "full", KEPT, DRAFTS, "knorm:kv_rate=0.2", "speed-4"
    path = class_path(settings_of(*room), MODEL, hands_over=True)
    extra_args = {"kv_policy": policy, "kv_transfer_params": transfer}
    check = build_custom_logits_processors_params_validator([path])
    check(SamplingParams(extra_args=extra_args, **kwargs))


def test_prompts_that_are_handed_over_pass() -> None:
    handed(KEPT, {"do_remote_decode": True}, max_tokens=1)
    handed(DRAFTS, {"do_remote_decode": True}, max_tokens=1)
    handed("full", {"do_remote_decode": True}, max_tokens=5, n=2)
    handed("full", {"do_remote_prefill": True}, n=2)
    handed(KEPT, {"do_remote_prefill": True, "kvx": TOLD}, max_tokens=1)
    handed(KEPT, {"do_remote_prefill": True, "kvx": TOLD}, max_tokens=9, min_tokens=3)
    handed(KEPT, {"do_remote_prefill": False})
    told = TOLD | {"sampling": sampling_of(SamplingParams(logprobs=1, logit_bias={3: 1.0}))}
    told = json.loads(json.dumps(told | {"logprob_ids": [7, 9], "logprobs": [-1.5, -0.5]}))
    fetches = {"do_remote_prefill": True, "kvx": told}
    handed(KEPT, fetches, logprobs=1, logit_bias={3: 1.0})
    told = TOLD | {"sampling": sampling_of(SamplingParams(structured_outputs=CHOICE))}
    fetches = {"do_remote_prefill": True, "kvx": json.loads(json.dumps(told))}
    asked = StructuredOutputsParams(choice=["a", "b"])
    asked._backend = "xgrammar"  # What vLLM notes there is of one server.
    handed(KEPT, fetches, structured_outputs=asked)
    # Without a connector vLLM passes over all of it.
    extra_args = {"kv_policy": KEPT, "kv_transfer_params": {"do_remote_prefill": True}}
    validator("full", KEPT)(SamplingParams(extra_args=extra_args))


@pytest.mark.parametrize(
    ("policy", "changes", "asked", "says"),
    [
        (KEPT, None, {}, "handed over a whole prompt"),
        (KEPT, {"policy": "snapkv:kv_rate=0.3"}, {}, "ask both servers under one KV policy"),
        ("full", {}, {}, "ask both servers under one KV policy"),
        ("knorm:kv_rate=0.2", {}, {}, "ask both servers under one KV policy"),
        (DRAFTS, {}, {}, "ask both servers under one KV policy"),
        (KEPT, {"token": "7"}, {}, "pass its kv_transfer_params on as they are"),
        (KEPT, {"sampling": None}, {}, "pass its kv_transfer_params on as they are"),
        (KEPT, {"logprobs": [1.0]}, {}, "pass its kv_transfer_params on as they are"),
        (KEPT, {}, {"temperature": 0.5}, "temperature: .*the same sampling parameters"),
        (KEPT, {}, {"logprobs": 1}, "logprobs: .*the same sampling parameters"),
        (KEPT, {}, {"n": 2}, "n=2: one first token"),
        (KEPT, {}, {"stop_token_ids": [7], "min_tokens": 2, "max_tokens": 9}, "min_tokens: "),
        (KEPT, {}, {"logprob_token_ids": [3]}, "logprob_token_ids"),
        (KEPT, {}, {"structured_outputs": CHOICE}, "structured_outputs: .*the same sampling"),
        ("speed-4", None, {}, "handed over a whole prompt"),
        ("speed-4", {"policy": "speed-4:tail=2"}, {}, "ask both servers under one KV policy"),
        (WAITS, {"policy": WAITS}, {}, "leave after= out"),
    ],
)
def test_what_cannot_be_gone_on_with(
    policy: str, changes: dict[str, Any] | None, asked: dict[str, Any], says: str
) -> None:
    transfer: dict[str, Any] = {"do_remote_prefill": True}
    if changes is not None:
        transfer["kvx"] = TOLD | changes
    with pytest.raises(VLLMValidationError, match=says):
        handed(policy, transfer, **asked)


@pytest.mark.parametrize(
    ("asked", "says"), [({"max_tokens": 2}, "with max_tokens=1"), ({"n": 2}, "n=2")]
)
@pytest.mark.parametrize("policy", [KEPT, "speed-4"])
def test_a_prompt_is_handed_over_with_one_token(
    policy: str, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(VLLMValidationError, match=says):
        handed(policy, {"do_remote_decode": True}, **{"max_tokens": 1} | asked)
