"""Finds what a request says of a policy where nobody reads it.

vLLM drops keys of a body that it does not know, and the query. So such a request would be answered
under the server's policy, or in full on a server without one, with a 200.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from vllm_kvx.config.quoting import quoted
from vllm_kvx.config.spelling import POLICY_KEY, misspelling
from vllm_kvx.server.refusal_reasons import Reason, RefusedError

XARGS = "vllm_xargs"
# Routes that take the engine's own parameters, and that take no keys for the engine at all.
WITH_SAMPLING_PARAMS = ("/inference/v1/generate",)
# /v1/decisions is new in vLLM 0.33.
WITHOUT_POLICY = ("/cohere/v2/chat", "/v1/systemone", "/generative_scoring", "/v1/decisions")
# What clients and vLLM's Python API call it: objects that a body has by mistake.
_CONTAINERS = ("extra_body", "extra_args", "vllm-xargs", "vllm_args", "xargs")
# Objects that bodies have for something else.
_OF_OTHERS = ("metadata", "chat_template_kwargs", "sampling_params")
OBJECTS = (XARGS, *_CONTAINERS, *_OF_OTHERS)
# Objects in these that name it in turn.
INNER = (XARGS, "extra_args")
# What leads to a policy in a body: of such keys there may be one in an object.
_LEADING = (POLICY_KEY, XARGS, "sampling_params", "extra_args")
# By its name in an answer; nobody reads it of a request.
_HEADERS = (b"x-kv-policy", b"x-kv_policy", b"kv-policy", b"kv_policy")


def answering(path: str) -> str:
    """The route that answers a body, or would, where `path` renders the request of it."""
    return path.removesuffix("/render")


def in_body(body: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Keys that name a policy, or nearly so, where `path` reads none, and where they are."""
    if key := policy_key(body):
        yield key, "at the top level of the body"
    takes_params = path.endswith(WITH_SAMPLING_PARAMS)
    skipped = () if path.endswith((*WITH_SAMPLING_PARAMS, *WITHOUT_POLICY)) else (XARGS,)
    for name in OBJECTS:
        values = body.get(name)
        if name in skipped or not isinstance(values, dict):
            continue
        if key := policy_key(values):
            yield key, f"in {name!r}"
        for inner in INNER:
            if takes_params and (name, inner) == ("sampling_params", "extra_args"):
                continue
            if isinstance(values.get(inner), dict) and (key := policy_key(values[inner])):
                yield key, f"in {name!r}"


def beside_body(scope: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same of an HTTP request's query and headers; `scope` is ASGI's."""
    if scope["query_string"]:
        names: dict[str, None] = {}
        for key, value in parse_qsl(scope["query_string"].decode("latin-1"), True):
            # Some clients write objects so: vllm_xargs[kv_policy]=full, or as JSON.
            text = f"{key} {value}" if key == XARGS else key
            names |= dict.fromkeys(re.findall(r"[\w-]+", text))
        if found := policy_key(names):
            yield found, "in the query"
    for header, _ in scope["headers"]:
        if header in _HEADERS:
            yield header.decode(), "among the headers"


def given_twice(raw: bytes) -> str | None:
    """A key that leads to a policy and that an object of a JSON body has twice; None without one.

    Who reads JSON keeps the last, and with it perhaps another policy, or none.

    Args:
        raw: the body, which is JSON.
    """
    is_plain = b"\\u" not in raw and b"\0" not in raw  # No letter is escaped, and it is UTF-8.
    if is_plain and (
        _quoted(POLICY_KEY) not in raw or all(raw.count(_quoted(key)) < 2 for key in _LEADING)
    ):
        return None
    found: list[str] = []
    named: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        named.extend(key for key in keys if key == POLICY_KEY)
        found.extend(key for key in _LEADING if keys.count(key) > 1)
        return dict(pairs)

    json.loads(raw, object_pairs_hook=look)
    return found[0] if found and named else None


def _quoted(key: str) -> bytes:
    return f'"{key}"'.encode()


def policy_key(values: Mapping[str, Any]) -> str | None:
    """The key of `values` that is the policy's, or resembles it."""
    if POLICY_KEY in values:
        return POLICY_KEY
    found = misspelling(values, (POLICY_KEY,))
    return found.key if found else None


def refusal_of_twice(key: str) -> RefusedError:
    """The error for a key that `given_twice` has found."""
    message = f"the first {quoted(key)} of two in one object is not read: send one"
    return RefusedError(Reason.MISPLACED, key, message)


def refusal(key: str, where: str, advice: str, reason: Reason = Reason.MISPLACED) -> RefusedError:
    """The error that says so, and what to do."""
    return RefusedError(reason, key, f"{quoted(key)} {where} is not read: {advice}")
