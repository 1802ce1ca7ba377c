"""Refuses what an HTTP request to a server with a policy says amiss, before vLLM reads it.

What is in its right place is looked at again where vLLM admits a request (``request_check``), for
those that come another way. Here a client gets one line where vLLM's model of the request has one
for each type that a value might have been, and a policy of null is as none.
"""

from typing import Any

from fastapi import Request
from vllm.exceptions import VLLMValidationError

from vllm_kvx.config.spelling import POLICY_KEY
from vllm_kvx.server import misplaced
from vllm_kvx.server.media_check import check_media
from vllm_kvx.server.misplaced import WITH_SAMPLING_PARAMS, WITHOUT_POLICY, XARGS
from vllm_kvx.server.refusal_reasons import RefusedError, count_for
from vllm_kvx.server.request_keys import check_keys, check_policy_type, server_key

# Where the app's state has what the server says of its policy; see ``route``.
STATUS = "kv_policy"


def check_request_body(request: Request, body: Any, raw: bytes) -> None:
    """Checks a request and its parsed JSON body, and counts it if it is refused.

    Args:
        raw: the body as it came.

    Raises:
        VLLMValidationError: it names a policy, or nearly so, where no policy is read; a key that
            leads to a policy is there twice; a key in ``vllm_xargs`` looks like one of ours; the
            policy is no string; it has an image, and the server serves a model's text alone.
    """
    status = getattr(request.app.state, STATUS, None)
    try:
        path = misplaced.answering(request.scope["path"])
        for key, where in misplaced.beside_body(request.scope):
            raise misplaced.refusal(key, where, _advice(path))
        if twice := misplaced.given_twice(raw):
            raise misplaced.refusal_of_twice(twice)
        check_body(body, path)
        if status is not None and status.text_alone and isinstance(body, dict):
            check_media(body, status.text_alone)
    except RefusedError as error:
        if status is not None:
            count_for(status.model_name)(error.reason)
        raise VLLMValidationError(str(error), parameter=error.key) from None


def check_body(body: Any, path: str) -> None:
    """Checks a parsed JSON body that came to the route at `path`, and takes a policy of null out.

    Raises:
        RefusedError: as `check_request_body`.
    """
    if not isinstance(body, dict):
        return
    for key, where in misplaced.in_body(body, path):
        raise misplaced.refusal(key, where, _advice(path))
    if found := server_key(body):
        raise misplaced.refusal(found.key, "at the top level of the body", found.advice)
    xargs = body.get(XARGS)
    if isinstance(xargs, dict) and not path.endswith((*WITH_SAMPLING_PARAMS, *WITHOUT_POLICY)):
        check_keys(xargs)
        check_policy_type(xargs)
        if POLICY_KEY in xargs and xargs[POLICY_KEY] is None:
            del xargs[POLICY_KEY]  # vLLM's model of the body has no such value.


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
