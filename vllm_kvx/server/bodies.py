"""Where a server looks at the JSON bodies that it gets, before vLLM's models of requests do.

vLLM's routes with a JSON body have one dependency in common, which FastAPI calls once it has parsed
the body and before it makes a request of it. The check joins that dependency, so that it sees the
body as the client sent it and may change it; reading it again costs nothing.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

# Given the request, its body, and that as it came; raises VLLMValidationError where it refuses.
BodyCheck = Callable[[Request, Any, bytes], None]


def check_bodies(app: FastAPI, check: BodyCheck) -> None:
    """Has `check` called for every request to a route of `app` that validates a JSON body."""

    async def validate(raw_request: Request) -> None:
        await validate_json_request(raw_request)
        try:
            body = await raw_request.json()
        except ValueError:  # The route says so in its own words.
            return
        check(raw_request, body, await raw_request.body())

    dependants = [
        dependant
        for route in app.routes
        for dependant in getattr(getattr(route, "dependant", None), "dependencies", ())
        if dependant.call is validate_json_request
    ]
    for dependant in dependants:
        dependant.call = validate
    if not dependants:
        # Does the same where FastAPI keeps them elsewhere. With an override it analyses every
        # dependency anew for each request, which takes some 60 us.
        app.dependency_overrides[validate_json_request] = validate
