"""Refuses a request whose body names a policy where nobody reads it.

vLLM drops keys of a body that it does not know, so such a request would be answered under the
server's policy, with a 200. The check joins the dependency that vLLM's routes with a JSON body
have in common, and looks at the body that FastAPI has parsed by then: reading costs nothing.
"""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError

from vllm_kvx.server.refused import Reason, count_for
from vllm_kvx.settings import POLICY_KEY
from vllm_kvx.spelling import misspelling

XARGS = "vllm_xargs"
# Where the app's state has what the server says of its policy; see ``route``.
STATUS = "kv_policy"
# Routes that take the engine's own parameters, and that take no keys for the engine at all.
WITH_SAMPLING_PARAMS = ("/inference/v1/generate",)
# /v1/decisions is new in vLLM 0.33.
WITHOUT_POLICY = ("/cohere/v2/chat", "/v1/systemone", "/generative_scoring", "/v1/decisions")
# What clients and vLLM's Python API call it: objects that a body has by mistake.
_CONTAINERS = ("extra_body", "extra_args", "vllm-xargs", "vllm_args", "xargs")


def refuse_misplaced(app: FastAPI) -> None:
    """Has every route of `app` that validates a JSON body look for misplaced policies too."""
    app.dependency_overrides[validate_json_request] = _validate_json_request


async def _validate_json_request(raw_request: Request) -> None:
    await validate_json_request(raw_request)
    try:
        body = await raw_request.json()
    except ValueError:  # The route says so in its own words.
        return
    try:
        check_body(body, raw_request.scope["path"])
    except VLLMValidationError:
        if (status := getattr(raw_request.app.state, STATUS, None)) is not None:
            count_for(status.model_name)(Reason.MISPLACED)
        raise


def check_body(body: Any, path: str) -> None:
    """Checks a parsed JSON body that came to the route at `path`.

    Raises:
        VLLMValidationError: it names a policy, or nearly so, where no policy is read.
    """
    if not isinstance(body, dict):
        return
    found = next(_misplaced(body, path), None)
    if found is not None:
        key, where = found
        raise VLLMValidationError(f"{key!r} {where} is not read: {_advice(path)}", parameter=key)


def _misplaced(body: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Keys that name a policy where `path` reads none, and where in `body` they are."""
    if key := _policy_key(body):
        yield key, "at the top level of the body"
    containers = list(_CONTAINERS)
    if path.endswith(WITH_SAMPLING_PARAMS):
        containers += [XARGS, "sampling_params"]
    elif path.endswith(WITHOUT_POLICY):
        containers += [XARGS]
    for name in containers:
        inner = body.get(name)
        for values in (inner, inner.get(XARGS) if isinstance(inner, dict) else None):
            if isinstance(values, dict) and (key := _policy_key(values)):
                yield key, f"in {name!r}"


def _policy_key(values: dict[str, Any]) -> str | None:
    if POLICY_KEY in values:
        return POLICY_KEY
    found = misspelling(values, (POLICY_KEY,))
    return found.key if found else None


def _advice(path: str) -> str:
    if path.endswith(WITHOUT_POLICY):
        return f"{path} runs the server's policy and takes no other, so leave it out"
    wanted = f"""{{"{POLICY_KEY}": "..."}}"""
    if path.endswith(WITH_SAMPLING_PARAMS):
        return f"""send "sampling_params": {{"extra_args": {wanted}}}"""
    return (
        f"""send "{XARGS}": {wanted}; with OpenAI's Python client, """
        f"""extra_body={{"{XARGS}": {wanted}}}"""
    )
