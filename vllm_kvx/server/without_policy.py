"""An engine that was started without a policy refuses a request that names one.

It runs vLLM alone, which drops the key: the request would be answered in full, and its client would
believe that a policy ran. All else that requests say is vLLM's, as on any stock server.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from vllm.exceptions import VLLMValidationError

from vllm_kvx.config.spelling import POLICY_KEY
from vllm_kvx.server import misplaced
from vllm_kvx.server.bodies import check_bodies

_ADVICE = (
    "this server was started without --kv-policy, and answers every request in full. Leave it out, "
    "or start the server with --kv-policy"
)


class StockEndpoint:
    """vLLM's ``EndpointPlugin`` that looks at what such a server is asked; it adds no route.

    may_be_ours: whether any key of an object may name a policy; it is quick, and may be wrong.
    """

    name = "kvx_without_policy"
    required_tasks = None

    def __init__(self, may_be_ours: Callable[[Any], bool]) -> None:
        self.may_be_ours = may_be_ours

    def attach_router(self, app: FastAPI) -> None:
        """vLLM calls it while it builds the app."""
        check_bodies(app, self.check)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Called once the engine is up."""

    def check(self, request: Request, body: Any, raw: bytes) -> None:
        """Looks at a request and its parsed JSON body; `raw` is that as it came.

        A policy of null is as none: it is taken out of ``vllm_xargs``.

        Raises:
            VLLMValidationError: it names a policy, in whatever place.
        """
        for key, where in misplaced.beside_body(request.scope):
            raise _error(key, where)
        if twice := misplaced.given_twice(raw):
            error = misplaced.refusal_of_twice(twice)
            raise VLLMValidationError(str(error), parameter=twice)
        if not isinstance(body, dict):
            return
        objects = [values for name in misplaced.OBJECTS if (values := body.get(name))]
        if not any(map(self.may_be_ours, (body, *objects))) and not any(
            isinstance(values, dict) and isinstance(values.get(inner), dict)
            for values in objects
            for inner in misplaced.INNER
        ):
            return
        for key, where in misplaced.in_body(body, request.scope["path"]):
            raise _error(key, where)
        xargs = body.get(misplaced.XARGS)
        if isinstance(xargs, dict) and (named := misplaced.policy_key(xargs)):
            if not _is_none(xargs, named):
                raise _error(named, f"in {misplaced.XARGS!r}")
            del xargs[named]


def refuse_policy(extra_args: Mapping[str, Any]) -> None:
    """Looks at what a request has where policies are read, however it came.

    Raises:
        VLLMValidationError: it names a policy, or nearly so.
    """
    key = misplaced.policy_key(extra_args)
    if key is not None and not _is_none(extra_args, key):
        raise VLLMValidationError(
            f"{key!r} in extra_args (over HTTP, in {misplaced.XARGS}) is not read: this engine was "
            f"started without {POLICY_KEY} in additional_config, and answers every request in "
            "full. Leave it out, or start the engine with a policy",
            parameter=key,
        )


def _is_none(values: Mapping[str, Any], key: str) -> bool:
    """Whether `values` have a policy of null, which is as none given; a typo is always one."""
    return key == POLICY_KEY and values[key] is None


def _error(key: str, where: str) -> VLLMValidationError:
    error = misplaced.refusal(key, where, _ADVICE)
    return VLLMValidationError(str(error), parameter=error.key)
