"""A policy that a body names in the wrong place is a 400, on every route of vLLM that generates."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import vllm
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from support.vllm_routes import (
    BODIES,
    CHAT,
    COMPLETION,
    GENERATE,
    TAKE_NONE,
    TAKE_XARGS,
    poster,
    routes,
)

from vllm_kvx.plugin import may_be_ours
from vllm_kvx.server.answered import ANSWERING
from vllm_kvx.server.body_check import STATUS
from vllm_kvx.server.without_policy import StockEndpoint

# Of vLLM's routes, those that answer without a step of the engine.
GENERATE_NOTHING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/ping")
MANAGE = ("lora", "elastic", "scal", "profile", "render", "abort", "cancel", "fault")


@pytest.fixture(scope="module")
def post_stock() -> Callable[..., httpx.Response]:
    """To a server that was started without a policy."""
    return poster(routes(StockEndpoint(may_be_ours)))


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert "is not read" in message
    return message


def test_every_route_that_generates_is_known(app: FastAPI) -> None:
    posts = {r.path for r in app.routes if isinstance(r, APIRoute) and "POST" in r.methods}
    assert set(BODIES) <= posts
    rest = posts - set(BODIES) - set(GENERATE_NOTHING)
    assert not {path for path in rest if not any(word in path for word in MANAGE)}


@pytest.mark.parametrize("path", BODIES)
def test_at_the_top_level(post: Any, path: str) -> None:
    for key in ("kv_policy", "kv-policy", "KV_POLICY", "kvpolicy", "kv_polcy", "kvPolicy"):
        for value in ("full", None):
            message = refusal(post(path, json={**BODIES[path], key: value}))
            assert repr(key) in message and "top level" in message
            if path in TAKE_XARGS:
                assert 'send "vllm_xargs": {"kv_policy"' in message
            elif path in TAKE_NONE:
                assert f"{path} runs the server's policy" in message
            else:
                assert 'send "sampling_params": {"extra_args": {"kv_policy"' in message


@pytest.mark.parametrize("path", TAKE_XARGS)
@pytest.mark.parametrize("name", ["extra_body", "extra_args", "vllm-xargs"])
def test_in_what_clients_call_it(post: Any, path: str, name: str) -> None:
    for inner in ({"kv_policy": "full"}, {"vllm_xargs": {"kv_policy": "full"}}):
        message = refusal(post(path, json={**BODIES[path], name: inner}))
        assert f"'kv_policy' in {name!r}" in message


@pytest.mark.parametrize("path", ["/inference/v1/generate", *TAKE_NONE])
def test_where_no_xargs_are_read(post: Any, path: str) -> None:
    body = {**BODIES[path], "vllm_xargs": {"kv_policy": "full"}}
    assert "'kv_policy' in 'vllm_xargs' is not read" in refusal(post(path, json=body))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["metadata", "chat_template_kwargs", "sampling_params"])
def test_in_what_is_for_something_else(post: Any, path: str, name: str) -> None:
    for inner in ({"kv_policy": "full"}, {"kv-policy": "full"}, {"vllm_xargs": {"kv_policy": "a"}}):
        message = refusal(post(path, json={**BODIES[path], name: inner}))
        assert f"in {name!r} is not read" in message
    body = {**BODIES[path], "sampling_params": {"extra_args": {"kv_policy": "full"}}}
    assert ("is not read" in post(path, json=body).text) == (path != "/inference/v1/generate")


@pytest.mark.parametrize("path", BODIES)
def test_beside_the_body(post: Any, path: str) -> None:
    for query in (
        *({"kv_policy": "full"}, {"KV-Policy": "full"}, {"vllm_xargs[kv_policy]": "full"}),
        *({"vllm_xargs.kv_policy": "full"}, {"vllm_xargs": '{"kv_policy": "full"}'}),
    ):
        message = refusal(post(path, json=BODIES[path], params=query))
        assert "in the query is not read" in message
    for header in ("x-kv-policy", "KV-Policy"):
        message = refusal(post(path, json=BODIES[path], headers={header: "full"}))
        assert f"{header.lower()!r} among the headers is not read" in message
    others = {"policy": "a", "kv": "b", "user": "kv_policy", "timeout": "3"}
    response = post(path, json=BODIES[path], params=others, headers={"x-policy": "kv_policy"})
    assert "is not read" not in response.text


@pytest.mark.parametrize("path", TAKE_XARGS)
@pytest.mark.parametrize(
    ("xargs", "says"),
    [
        ({"policy": "full"}, "unknown key 'policy' in vllm_xargs; did you mean 'kv_policy'?"),
        ({"policy": None}, "did you mean 'kv_policy'?"),
        ({"kv_polcy": {"a": 1}}, "did you mean 'kv_policy'?"),
        ({"kv_rate": 0.2}, 'in the policy\'s name, such as "kv_policy": "snapkv:kv_rate=..."'),
        ({"kv_policy": "snapkv", "KV-Floor": 9}, '"kv_policy": "snapkv:kv_floor=...,kv_rate=..."'),
        ({"kv_layout": ["speed-4"]}, "kv_layout is set when the server starts"),
        ({"kv_pivot": 3}, 'policy\'s name, such as "kv_policy": "structkv:pivot=...,kv_rate=..."'),
        ({"kv_request_policies": None}, "kv_request_policies is set when the server starts"),
        ({"kv_cache_policy": 1}, "unknown key 'kv_cache_policy' in vllm_xargs: of keys with kv_"),
        ({"kv-other": 1, "kv_policy": None}, "unknown key 'kv-other'"),
        ({f"x{i}": i for i in range(100)} | {"kv_other": 1}, "unknown key 'kv_other'"),
        ({f"x{i}": i for i in range(100)} | {"policy": 1}, "unknown key 'policy'"),
        ({"kv_policy": {"name": "full"}}, "kv_policy must be a string such as 'speed-24' or"),
        ({"kv_policy": ["full"]}, "must be a string such as 'speed-24' or 'full', got ['full']"),
        ({"kv_policy": [{"a": 1}]}, "kv_policy must be a string such as 'speed-24' or 'full', got"),
        ({"kv_policy": True}, "got True"),
        ({"kv_policy": {"a" * 5000: 1}}, "... (5,007 characters)"),
    ],
)
def test_keys_that_a_request_has_not(post: Any, path: str, xargs: Any, says: str) -> None:
    response = post(path, json={**BODIES[path], "vllm_xargs": xargs})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and says in message, message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize("path", TAKE_XARGS)
def test_a_policy_of_null_is_none(post: Any, path: str) -> None:
    """vLLM's model of the body has no null there; the body gets as far as it does without."""
    without = post(path, json=BODIES[path])
    for xargs in ({"kv_policy": None}, {"kv_policy": None, "session_id": "a"}):
        response = post(path, json={**BODIES[path], "vllm_xargs": xargs})
        assert (response.status_code, response.text) == (without.status_code, without.text)
        assert "vllm_xargs" not in response.text
    if path not in ("/v1/chat/completions/batch", "/invocations"):  # They take what they know.
        others = post(path, json={**BODIES[path], "vllm_xargs": {"session_id": None}})
        assert others.status_code == 400, "theirs is vLLM's to refuse"


@pytest.mark.parametrize("path", BODIES)
def test_a_server_without_a_policy_says_so(post_stock: Any, path: str) -> None:
    inside = {"kv_policy": "full"}
    asked: list[dict[str, Any]] = [
        {"json": {**BODIES[path], **more}}
        for more in (
            *(inside, {"kv-policy": "full"}, {"vllm_xargs": inside}, {"metadata": inside}),
            *({"vllm_xargs": {"kv_polcy": "full"}}, {"extra_body": {"vllm_xargs": inside}}),
            *({"vllm_xargs": {"kv_policy": {"a": 1}}}, {"chat_template_kwargs": inside}),
        )
    ]
    asked += [{"json": BODIES[path], "params": inside}]
    asked += [{"json": BODIES[path], "headers": {"x-kv-policy": "full"}}]
    for each in asked:
        message = refusal(post_stock(path, **each))
        assert "this server was started without --kv-policy, and answers" in message
    if path not in TAKE_XARGS:
        return
    without = post_stock(path, json=BODIES[path])
    for none in ({"kv_policy": None}, {}):
        response = post_stock(path, json={**BODIES[path], "vllm_xargs": none})
        assert (response.status_code, response.text) == (without.status_code, without.text)


@pytest.mark.parametrize("path", BODIES)
def test_a_server_without_a_policy_leaves_all_else_to_vllm(post_stock: Any, path: str) -> None:
    theirs = {"policy": "lru", "kv_rate": 1, "kv_layout": 2, "kv_other": "a", "kv_cache_policy": 3}
    for more in (
        *({"vllm_xargs": theirs}, theirs, {"kv_transfer_params": {"a": 1}}, {"metadata": theirs}),
        {"user": "kv_policy", "messages": [{"role": "user", "content": '{"kv_policy": "full"}'}]},
    ):
        assert "is not read" not in post_stock(path, json={**BODIES[path], **more}).text
    headers = {"Content-Type": "application/json"}
    for content in (b"[]", b'"kv_policy"', b"{", b"null", b"\xff", b""):
        response = post_stock(path, content=content, headers=headers)
        assert response.status_code in (400, 422) and "is not read" not in response.text


@pytest.mark.parametrize("path", BODIES)
def test_given_twice(post: Any, post_stock: Any, path: str) -> None:
    """JSON readers keep the last of equal keys: what the first asks for would be ignored."""
    twice = (
        ('"vllm_xargs": {"kv_policy": "full"}, "vllm_xargs": {"session_id": "a"}', "vllm_xargs"),
        ('"vllm_xargs": {"kv_policy": "speed-4", "kv_policy": "full"}', "kv_policy"),
        ('"vllm_xargs": {"kv_policy": "full", "kv_policy": null}', "kv_policy"),
        ('"kv_policy": "full", "kv_policy": "full"', "kv_policy"),
        ('"vllm_xargs": {"kv\\u005fpolicy": "full", "kv_policy": "full"}', "kv_policy"),
        (
            '"sampling_params": {"extra_args": {"kv_policy": "full"}, "extra_args": {}}',
            "extra_args",
        ),
    )
    headers = {"Content-Type": "application/json"}
    begin = json.dumps({**BODIES[path], "sampling_params": {}})[:-1].encode()
    for text, key in twice:
        for ask in (post, post_stock):
            content = begin + f", {text}}}".encode()
            if key == "extra_args":
                content = content.replace(b'"sampling_params": {}, ', b"")
            message = refusal(ask(path, content=content, headers=headers))
            assert f"the first {key!r} of two in one object" in message
    # Of keys that lead to no policy the last one counts, as vLLM has it.
    others = b'{"user": "a", "user": "b", "metadata": {"extra_args": {}, "extra_args": {}}}'
    quoted = json.dumps({"user": '"kv_policy" "kv_policy" "vllm_xargs": "vllm_xargs":'}).encode()
    for content in (others, quoted):
        for ask in (post, post_stock):
            assert "of two" not in ask(path, content=content, headers=headers).text


def test_every_route_that_generates_says_its_policy(app: FastAPI) -> None:
    posts = {r.path for r in app.routes if isinstance(r, APIRoute) and "POST" in r.methods}
    assert {path for path in posts if path.endswith(ANSWERING)} == posts & set(BODIES)


def test_every_route_is_looked_at_without_an_override(app: FastAPI) -> None:
    """FastAPI analyses all dependencies of a route anew for each request, if any is overridden."""
    assert not app.dependency_overrides


def test_vllms_own_keys_pass(post: Any) -> None:
    """What vLLM reads of ``extra_args`` itself, found in its source."""
    from vllm_kvx.server.request_keys import VLLM_KEYS

    assert vllm.__file__ is not None
    read = set()
    for file in Path(vllm.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if "extra_args" in text:
            read |= set(re.findall(r"""extra_args(?:\.get\(|\[)\s*["'](kv_\w+)["']""", text))
    assert {"kv_transfer_params"} <= read <= VLLM_KEYS
    for key in VLLM_KEYS:
        body = {**COMPLETION, "vllm_xargs": {key: "a"}}
        assert key not in post("/v1/completions", json=body).text


@pytest.mark.parametrize("path", BODIES)
def test_a_servers_keys_at_the_top_level(post: Any, path: str) -> None:
    for key, says in (("kv_rate", "stand in the policy's name"), ("kv_layout", "server starts")):
        message = refusal(post(path, json={**BODIES[path], key: 1}))
        assert f"{key!r} at the top level of the body is not read" in message and says in message


def test_in_sampling_params(post: Any) -> None:
    body = {**GENERATE, "sampling_params": {"kv_policy": "full"}}
    assert "'kv_policy' in 'sampling_params'" in refusal(post("/inference/v1/generate", json=body))


@pytest.mark.parametrize("path", BODIES)
def test_other_bodies_pass(post: Any, path: str) -> None:
    others = {"kv_transfer_params": {}, "policy": "p", "kv_cache_policy": "p", "kv_other": 1}
    others["metadata"] = {"a": "1", "policy": "p", "kv_rate": "0.2", "kv_layout": "x"}
    right: dict[str, Any] = {"vllm_xargs": {"kv_policy": "full"}} if path in TAKE_XARGS else {}
    if path == "/inference/v1/generate":
        right = {"sampling_params": {"extra_args": {"kv_policy": "full"}}}
    many = {f"key{i}": i for i in range(200_000)} if path == "/v1/completions" else {}
    for more in ({}, others, {"user": "kv_policy"}, right, many):
        assert "is not read" not in post(path, json={**BODIES[path], **more}).text


@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_object_is_left_to_vllm(post: Any, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"[]", b'"kv_policy"', b"{", b"null", b"\xff", b""):
        response = post(path, content=content, headers=headers)
        assert response.status_code in (400, 422) and "is not read" not in response.text
    response = post(path, content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code in (400, 415, 422)


def test_other_routes_take_the_body_of_those_that_generate(post: Any) -> None:
    body = {**CHAT, "vllm_xargs": {"kv_policy": "full"}}
    assert "is not read" not in post("/tokenize", json=body).text


def test_vllms_own_keys_resemble_none_of_ours(app: FastAPI) -> None:
    from vllm_kvx.config.settings import KEYS
    from vllm_kvx.config.spelling import misspelling

    for route in app.routes:
        model = getattr(getattr(route, "body_field", None), "field_info", None)
        fields = getattr(getattr(model, "annotation", None), "model_fields", {})
        assert all(misspelling([name], KEYS) is None for name in fields)


def test_it_is_counted(app: FastAPI, post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.state, STATUS, SimpleNamespace(model_name="misplaced"), raising=False)
    for path, body in BODIES.items():
        refusal(post(path, json={**body, "kv_policy": "full"}))
    labels = {"model_name": "misplaced", "reason": "misplaced"}
    counted = REGISTRY.get_sample_value("vllm_kvx:requests_refused_total", labels)
    assert counted == len(BODIES)
