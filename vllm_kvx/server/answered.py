"""Says under which policy a request was answered: over HTTP, and in the access log.

A request's policy is known once its body is read and stays what it is: a server answers under it or
refuses the request. So the header can be sent before the first byte of a stream. What is said is
the policy's own name, with the layers that words such as ``auto`` stand for here.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.anthropic.protocol import (
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
    AnthropicUsage,
)
from vllm.entrypoints.openai.responses.protocol import ResponseUsage
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.exceptions import VLLMValidationError

from vllm_kvx.compat.wrapping import wrap_once
from vllm_kvx.config.spelling import POLICY_KEY
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.server.body_check import STATUS
from vllm_kvx.server.misplaced import WITH_SAMPLING_PARAMS, WITHOUT_POLICY, XARGS, answering
from vllm_kvx.server.refusal_reasons import count_for
from vllm_kvx.server.request_check import check_policy

HEADER = "x-kv-policy"
# Routes with a JSON body that have the model answer, and those that do not. A test knows all.
ANSWERING = (
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses"),
    *("/v1/messages", "/invocations", *WITH_SAMPLING_PARAMS, *WITHOUT_POLICY),
)
# Under this key a request's scope has a list, which gets the policy's name.
_SAID = "kvx_policy"
# What usage says, of the request that this task answers.
_policy: ContextVar[str | None] = ContextVar("kv_policy", default=None)
_DEFAULT_FORMAT = '%(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s'


def say_policies(app: FastAPI) -> None:
    """Has answers of `app` say their policy: in a header, in their usage and in the access log."""
    app.add_middleware(PolicyHeader)
    say_in_usage()
    access = logging.getLogger("uvicorn.access")
    if not any(isinstance(each, PolicyInLog) for each in access.filters):
        access.addFilter(PolicyInLog())


def say_in_usage() -> None:
    """Has the usage of answers say the policy that is noted in the task that makes it."""
    _give_anthropics_usage_room()
    for usage in (UsageInfo, ResponseUsage, AnthropicUsage):
        wrap_once(usage, "__init__", _with_policy)


def note_name(policy: str) -> None:
    """Notes the policy of the one request that this task answers, as a line of a batch file is."""
    _policy.set(policy)


def _give_anthropics_usage_room() -> None:
    """Lets it have further fields, as vLLM's other models of usage do, and its holders write them.

    A model's writer is made with its class, and has its inner models' in it.
    """
    if AnthropicUsage.model_config.get("extra") == "allow":
        return
    AnthropicUsage.model_config["extra"] = "allow"
    for model in (AnthropicUsage, AnthropicMessagesResponse, AnthropicStreamEvent):
        model.model_rebuild(force=True)


def note_policy(request: Request, body: Any) -> None:
    """Notes the policy of a request whose keys are checked, if this server answers it.

    One that it renders names the policy for whoever answers: it is looked at all the same.

    Raises:
        VLLMValidationError: the server cannot or may not run it. vLLM would say so in the stream
            that a client asked for, after a status of 200.
    """
    status = getattr(request.app.state, STATUS, None)
    path = request.scope["path"]
    answers = answering(path)
    if status is None or not answers.endswith(ANSWERING):
        return
    name = _asked(body, answers)
    policy = status.settings.policy
    if name is not None:
        try:
            policy = check_policy(status.settings, name, count_for(status.model_name))
        except PolicyError as error:
            raise VLLMValidationError(str(error), parameter=POLICY_KEY) from None
    if answers != path:
        return
    _policy.set(str(policy))
    request.scope.get(_SAID, []).append(str(policy))


def _asked(body: Any, path: str) -> str | None:
    """The policy that a body names, where one is read."""
    if not isinstance(body, dict) or path.endswith(WITHOUT_POLICY):
        return None
    if path.endswith(WITH_SAMPLING_PARAMS):
        params = body.get("sampling_params")
        values = params.get("extra_args") if isinstance(params, dict) else None
    else:
        values = body.get(XARGS)
    name = values.get(POLICY_KEY) if isinstance(values, dict) else None
    return name if isinstance(name, str) else None


class PolicyHeader:
    """ASGI middleware that adds the header to every answer that is no error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said: list[str] = []
        scope[_SAID] = said
        # uvicorn starts a pipelined request in the context of the one before it.
        _policy.set(None)

        async def say(message: Message) -> None:
            if said and message["type"] == "http.response.start":
                is_error = message["status"] >= 400
                if not is_error:
                    header = (HEADER.encode(), said[0].encode())
                    message["headers"] = [*message.get("headers", ()), header]
                # For the access log, which uvicorn writes when it is sent this.
                _policy.set(None if is_error else said[0])
            await send(message)

        await self._app(scope, receive, say)


def _with_policy(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a usage, which is made in the task that answers the request."""

    def __init__(self: Any, **data: Any) -> None:
        original(self, **data)
        if (policy := _policy.get()) is not None:
            self.kv_policy = policy

    return __init__


class PolicyInLog(logging.Filter):
    """Gives records of uvicorn's access log `kv_policy`, "-" without one, and room for it.

    uvicorn's default format gets it at its end; another one, of the operator's, may name it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.kv_policy = _policy.get() or "-"
        for handler in logging.getLogger(record.name).handlers:
            style = getattr(handler.formatter, "_style", None)
            if getattr(style, "_fmt", None) == _DEFAULT_FORMAT:
                style._fmt = f"{_DEFAULT_FORMAT} kv_policy=%(kv_policy)s"  # type: ignore[union-attr]
        return True
