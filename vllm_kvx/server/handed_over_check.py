"""What a request may not ask for whose prompt one server computes and another goes on with.

Under a policy that retains or propagates, what is handed over is what was kept of the prompt,
together with the first token, which that cannot give again.
"""

from typing import TYPE_CHECKING

from vllm_kvx.config.handed_over import (
    FETCHES,
    HOLDS,
    KEY,
    TRANSFER,
    HandedOver,
    sampling_of,
    transfer_of,
)
from vllm_kvx.config.quoting import quoted
from vllm_kvx.policy.policy import KVPolicy

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def check_handed_over(policy: KVPolicy, sampling_params: "SamplingParams") -> None:
    """Checks a request with ``kv_transfer_params``; others pass.

    Raises:
        ValueError: it could not be answered as one server would.
    """
    params = transfer_of(sampling_params.extra_args)
    if not (params.get(HOLDS) or params.get(FETCHES)):
        return
    leaves_part = not policy.keeps_prompts
    if params.get(FETCHES):
        told = HandedOver.of(params)
        _check_policies(policy, told)
        if told is not None:
            _check_first_token(told, sampling_params)
    elif leaves_part and sampling_params.max_tokens != 1:
        raise ValueError(
            f"max_tokens={sampling_params.max_tokens} with {HOLDS}: under {policy} a server that "
            "prefills hands a prompt over with one token, and no more: ask it with max_tokens=1"
        )
    if leaves_part:
        _check_features(policy, sampling_params)


def _check_policies(policy: KVPolicy, told: HandedOver | None) -> None:
    if told is None:
        if not policy.keeps_prompts:
            raise ValueError(
                f"the server that prefilled handed over a whole prompt, which {policy} cannot go "
                "on from: start it with the same KV policy, and ask it under the same; or ask this "
                f"server alone, without {TRANSFER}"
            )
    elif told.policy != str(policy):
        raise ValueError(
            f"the prompt was computed under {quoted(told.policy)}, and what is left of it cannot "
            f"be used under {policy}: ask both servers under one KV policy"
        )


def _check_first_token(told: HandedOver, sampling_params: "SamplingParams") -> None:
    own = sampling_of(sampling_params)
    for name, value in own.items():
        if told.sampling.get(name) != value:
            raise ValueError(
                f"{name}: the server that prefilled drew the first token with "
                f"{quoted(told.sampling.get(name))}, and this request has {quoted(value)}: send "
                "both servers the same sampling parameters"
            )
    if (sampling_params.logprobs is None) != (not told.logprobs):
        raise ValueError(
            f"logprobs: {KEY} in {TRANSFER} does not have those of the first token: pass the "
            f"{TRANSFER} of the server that prefilled on as they are"
        )
    ends = told.token in sampling_params.all_stop_token_ids
    if ends and not sampling_params.ignore_eos and sampling_params.min_tokens > 1:
        raise ValueError(
            "min_tokens: the server that prefilled was not told of it, and drew a token that ends "
            "the answer: leave it out, or ask this server alone"
        )


def _check_features(policy: KVPolicy, sampling_params: "SamplingParams") -> None:
    alone = f"ask one server alone, without {TRANSFER}"
    instead = f"leave it out, or {alone}"
    if sampling_params.n != 1:
        raise ValueError(f"n={sampling_params.n}: one first token is handed over: {instead}")
    if getattr(sampling_params, "logprob_token_ids", None) is not None:
        raise ValueError(f"logprob_token_ids: those of the first token stay behind: {instead}")
    if policy.num_generated:
        raise ValueError(
            f"{policy} waits for generated tokens, and a prompt is handed over before there are "
            f"any: leave after= out, or {alone}"
        )
