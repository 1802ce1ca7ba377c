"""A policy that a body names in the wrong place is a 400, on every route of vLLM that generates."""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from vllm_kvx.server.misplaced import STATUS
from vllm_kvx.server.route import KVPolicyEndpoint

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": "hello"}
GENERATE = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
TAKE_XARGS = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"model": "m", "messages": [CHAT["messages"]]},
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/invocations": COMPLETION,
}
TAKE_NONE = {
    "/v1/systemone": {"state": "s", "questions": {}},
    "/generative_scoring": {"model": "m"},
}
if find_spec("vllm.entrypoints.openai.decisions"):  # From 0.33 on.
    TAKE_NONE["/v1/decisions"] = {
        "model": "m",
        "input": "hello",
        "questions": [{"type": "predicate", "instructions": "is it so?"}],
    }
BODIES = {**TAKE_XARGS, **TAKE_NONE, "/inference/v1/generate": GENERATE}
# Of vLLM's routes, those that answer without a step of the engine.
GENERATE_NOTHING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/ping")
MANAGE = ("lora", "elastic", "scal", "profile", "render", "abort", "cancel", "fault")


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """vLLM's own routes with a policy server's addition, and no engine behind them."""
    app = FastAPI()
    args = Namespace(
        log_error_stack=False, enable_server_load_tracking=False, enable_scale_out=True
    )
    app.state.args = args
    app.state.server_load_metrics = 0
    register_api_routers(args, app, ("generate",))
    (endpoint,) = KVPolicyEndpoint.for_tasks(("generate",))
    endpoint.attach_router(app)
    init_exception_handler(app)
    return app


@pytest.fixture
def post(app: FastAPI) -> Iterator[Callable[..., httpx.Response]]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def ask(path: str, **kwargs: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, **kwargs)

    yield lambda path, **kwargs: asyncio.run(ask(path, **kwargs))


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


def test_in_sampling_params(post: Any) -> None:
    body = {**GENERATE, "sampling_params": {"kv_policy": "full"}}
    assert "'kv_policy' in 'sampling_params'" in refusal(post("/inference/v1/generate", json=body))


@pytest.mark.parametrize("path", BODIES)
def test_other_bodies_pass(post: Any, path: str) -> None:
    others = {"kv_transfer_params": {}, "policy": "p", "kv_cache_policy": "p", "metadata": {"a": 1}}
    right: dict[str, Any] = {"vllm_xargs": {"kv_policy": "full"}} if path in TAKE_XARGS else {}
    if path == "/inference/v1/generate":
        right = {"sampling_params": {"extra_args": {"kv_policy": "full"}}}
    many = {f"key{i}": i for i in range(200_000)} if path == "/v1/completions" else {}
    for more in ({}, others, {"user": "kv_policy"}, right, many):
        assert "is not read" not in post(path, json={**BODIES[path], **more}).text


@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_object_is_left_to_vllm(post: Any, path: str) -> None:
    json = {"Content-Type": "application/json"}
    for content in (b"[]", b'"kv_policy"', b"{", b"null", b"\xff", b""):
        response = post(path, content=content, headers=json)
        assert response.status_code in (400, 422) and "is not read" not in response.text
    response = post(path, content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code in (400, 415, 422)


def test_other_routes_take_the_body_of_those_that_generate(post: Any) -> None:
    body = {**CHAT, "vllm_xargs": {"kv_policy": "full"}}
    assert "is not read" not in post("/tokenize", json=body).text


def test_vllms_own_keys_resemble_none_of_ours(app: FastAPI) -> None:
    from vllm_kvx.settings import KEYS
    from vllm_kvx.spelling import misspelling

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
