"""Checks a request's policy in the API process, so that a bad one is a 400.

vLLM calls ``validate_params`` of every custom logits processor when a request comes in and turns
its ValueError into a 400. So the check is a logits processor that processes no logits. vLLM loads
the class by name in several processes, and one process may hold several engines: the name itself
carries the server's settings, and this module's ``__getattr__`` makes the class.
"""

import dataclasses
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from vllm_kvx.config.measured import Measured
from vllm_kvx.config.settings import NO_POLICY, POLICY_KEY, REQUESTS_KEY, KVSettings
from vllm_kvx.config.wording import worded
from vllm_kvx.policy.auto import refuse_auto
from vllm_kvx.policy.layout import Layout, RetrievalLayout, check_fits
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import check_served, parse_policy, servable
from vllm_kvx.policy.windows import Windows
from vllm_kvx.server.handed_over_check import check_handed_over
from vllm_kvx.server.refusal_reasons import OnRefusal, Reason, RefusedError, count_for, refusing
from vllm_kvx.server.request_keys import check_keys, check_policy_type

if TYPE_CHECKING:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

_PREFIX = "RequestCheck_"


class RequestCheck(LogitsProcessor):
    """A logits processor that checks ``kv_policy`` of a request and leaves logits alone."""

    settings: KVSettings
    model_name: str
    in_python: bool
    hands_over: bool

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Checks the policy that the request names, and what it asks for besides.

        Raises:
            PolicyError: a policy that does not parse, is not served or does not fit the server.
            ValueError: a policy that is no string, or one with which the request cannot be
                answered correctly.
        """
        with worded(cls.in_python):
            count = count_for(cls.model_name)
            check_request(cls.settings, sampling_params, count, cls.hands_over)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        return False  # Not one request of ours needs its logits processed.

    def apply(self, logits: "torch.Tensor", ctx: "LogitsContext") -> "torch.Tensor":
        return logits


def check_request(
    settings: KVSettings,
    sampling_params: "SamplingParams",
    on_refusal: OnRefusal,
    hands_over: bool = False,
) -> None:
    """See ``RequestCheck.validate_params``; `on_refusal` is told the reason first.

    hands_over: whether the server has a KV connector.

    Raises:
        PolicyError, ValueError: as there.
    """
    extra = sampling_params.extra_args or {}
    try:
        check_keys(extra)
        check_policy_type(extra)
    except RefusedError as error:
        on_refusal(error.reason)
        raise
    name = extra.get(POLICY_KEY)
    policy = settings.policy if name is None else check_policy(settings, name, on_refusal)
    if hands_over:
        with refusing(Reason.HANDED_OVER, on_refusal):
            check_handed_over(policy, sampling_params)
    with refusing(Reason.LOGPROB_TOKEN_IDS, on_refusal):
        _check_logprobs(settings, sampling_params)
    if policy.propagate is None:
        return
    for parameter in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if getattr(sampling_params, parameter) is not None:
            on_refusal(Reason.PROMPT_LOGPROBS)
            instead = "ask without it"
            if settings.allows(KVPolicy()):
                instead = f"""send vllm_xargs={{"{POLICY_KEY}": "full"}} too, or {instead}"""
            raise ValueError(
                f"{parameter} (in completions also echo with logprobs) needs every prompt token "
                f"at full depth, and KV policy {policy} skips some: {instead}"
            )


def _check_logprobs(settings: KVSettings, sampling_params: "SamplingParams") -> None:
    """vLLM's rejection sampler has the likeliest tokens' logprobs, and leaves named ones out."""
    if settings.stock or not settings.layout.drafts:
        return
    if getattr(sampling_params, "logprob_token_ids", None) is not None:
        raise ValueError(
            "logprob_token_ids: this server drafts tokens, and vLLM leaves these out where it "
            "verifies drafts: ask for logprobs, or start the server without --speculative-config"
        )


def check_policy(
    settings: KVSettings, name: str, on_refusal: OnRefusal = lambda reason: None
) -> KVPolicy:
    """The policy `name` on this server.

    Raises:
        PolicyError: it is none, or the server cannot or may not run it.
    """
    with refusing(Reason.MALFORMED, on_refusal):
        refuse_auto(name, f"this server's policy is {settings.policy}: leave {POLICY_KEY} out")
        policy = settings.parse(name)
        # A server's own ones may be named as it tells them.
        if policy not in settings.policies:
            check_served(name)
    with refusing(Reason.NOT_ALLOWED, on_refusal):
        _check_allowed(settings, policy)
    _check_fits(settings, policy, on_refusal)
    return policy


def _check_allowed(settings: KVSettings, policy: KVPolicy) -> None:
    if settings.allows(policy):
        return
    if settings.request_policies == NO_POLICY:
        raise PolicyError(
            f"{policy}: this server runs every request under {settings.policy}, and its operator "
            f"lets requests choose no other ({REQUESTS_KEY}={NO_POLICY}): leave {POLICY_KEY} out"
        )
    raise PolicyError(
        f"{policy}: this server's operator lets requests name {settings.names_allowed()} "
        f"({REQUESTS_KEY}={settings.request_policies})"
    )


def _check_fits(settings: KVSettings, policy: KVPolicy, on_refusal: OnRefusal) -> None:
    if policy.is_full:
        return
    with refusing(Reason.NOT_SERVED, on_refusal):
        policy.check_composition()
    with refusing(Reason.NOT_FOR_MODEL, on_refusal):
        policy.check_model(settings.num_layers)
    with refusing(Reason.NO_ROOM, on_refusal):
        _check_room(settings, policy)


@lru_cache(maxsize=1024)
def _check_room(settings: KVSettings, policy: KVPolicy) -> None:
    if settings.stock:
        name = servable(policy)
        raise PolicyError(
            f"{policy} does not fit this server, which runs full alone: start it with "
            f"--kv-policy {name}, or make room with --kv-policy full --kv-layout {name}"
        )
    check_fits(policy, settings.layout, settings.num_layers)


def class_path(
    settings: KVSettings, model_name: str, in_python: bool = False, hands_over: bool = False
) -> str:
    """The path by which vLLM finds the check of requests to a server with `settings`.

    model_name: the served one, which refusals are counted for.
    in_python: whether requests come from Python, whose words messages then use.
    hands_over: whether the server has a KV connector.
    """
    facts = {
        "policy": str(settings.policy),
        "policies": [str(policy) for policy in settings.policies],
        "request_policies": settings.request_policies,
        "layout": dataclasses.asdict(settings.layout),
        "measured": settings.measured.as_config(),
        "num_layers": settings.num_layers,
        "stock": settings.stock,
        "model_name": model_name,
        "in_python": in_python,
        "hands_over": hands_over,
    }
    return f"{__name__}:{_PREFIX}{json.dumps(facts).encode().hex()}"


def __getattr__(name: str) -> type[RequestCheck]:
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class_of(name)


@lru_cache(maxsize=64)
def _class_of(name: str) -> type[RequestCheck]:
    facts = json.loads(bytes.fromhex(name.removeprefix(_PREFIX)))
    settings = KVSettings(
        policy=parse_policy(facts["policy"]),
        policies=tuple(map(parse_policy, facts["policies"])),
        request_policies=facts["request_policies"],
        layout=_layout(facts["layout"]),
        num_layers=facts["num_layers"],
        debug=False,
        stock=facts["stock"],
        measured=Measured.of(facts["measured"]),
    )
    own = {"settings": settings, "__module__": __name__}
    own |= {name: facts[name] for name in ("model_name", "in_python", "hands_over")}
    return type(name, (RequestCheck,), own)


def _layout(fields: dict[str, Any]) -> Layout:
    """JSON has lists where a layout has tuples, and objects for what is in it."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    if values["sidecar"] is not None:
        values["sidecar"] = RetrievalLayout(**values["sidecar"])
    if values["windows"] is not None:
        layers, reach = values["windows"].values()
        values["windows"] = Windows(tuple(layers), reach)
    return Layout(**values)
