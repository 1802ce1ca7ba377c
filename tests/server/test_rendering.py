"""Routes that render a request for the engine refuse its policy as those that answer it do."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY
from support.vllm_routes import TAKE_XARGS
from vllm.exceptions import VLLMValidationError

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.server.answered import HEADER
from vllm_kvx.server.body_check import STATUS, check_request_body

MODEL = "rendering"
RENDERING = tuple(
    f"/v1/{route}/render" for route in ("chat/completions", "completions", "responses", "messages")
)
ANSWERED_BY = {path: path.removesuffix("/render") for path in RENDERING}


@pytest.fixture(autouse=True)
def status(app: FastAPI) -> Iterator[None]:
    """Of a server of eight layers with a policy."""
    settings = KVSettings.of({"kv_policy": "speed-4"}, 8)
    given = SimpleNamespace(model_name=MODEL, settings=settings, text_alone=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.state, STATUS, given, raising=False)
        yield


def refused(reason: str) -> float:
    labels = {"model_name": MODEL, "reason": reason}
    return REGISTRY.get_sample_value("vllm_kvx:requests_refused_total", labels) or 0.0


def test_every_route_that_renders_is_known(app: FastAPI) -> None:
    posts = {route.path for route in app.routes if isinstance(route, APIRoute)}
    assert {path for path in posts if path.endswith("/render")} == set(RENDERING)
    assert set(ANSWERED_BY.values()) <= set(TAKE_XARGS)


@pytest.mark.parametrize("path", RENDERING)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-policy", "malformed"),
        ("speed-four", "malformed"),
        ("", "malformed"),
        ("speed-9", "not_for_model"),
        ("fier-64", "no_room"),
        (["full"], "not_a_string"),
    ],
)
def test_a_policy_that_the_server_does_not_run(
    post: Any, path: str, name: Any, reason: str
) -> None:
    body = {**TAKE_XARGS[ANSWERED_BY[path]], "vllm_xargs": {"kv_policy": name}}
    before = refused(reason)
    rendered, answered = post(path, json=body), post(ANSWERED_BY[path], json=body)
    assert rendered.status_code == 400, rendered.text
    assert rendered.json() == answered.json()
    assert refused(reason) == before + 2


@pytest.mark.parametrize("path", RENDERING)
def test_one_that_it_runs(post: Any, path: str) -> None:
    """It goes on to vLLM; a request that is rendered is not answered, and says no policy."""
    body = TAKE_XARGS[ANSWERED_BY[path]]
    without = post(path, json=body)
    for name in ("full", "speed-4", "speed-4:anchors=4", None):
        response = post(path, json={**body, "vllm_xargs": {"kv_policy": name}})
        assert (response.status_code, response.text) == (without.status_code, without.text)
        assert HEADER not in response.headers


def test_one_that_reads_no_policy() -> None:
    """Cohere's route, which vLLM has where Cohere's package is installed."""
    body = {"vllm_xargs": {"kv_policy": "full"}}
    for path in ("/cohere/v2/chat", "/cohere/v2/chat/render"):
        scope = {"path": path, "headers": [], "query_string": b""}
        request: Any = SimpleNamespace(app=SimpleNamespace(state=None), scope=scope)
        with pytest.raises(VLLMValidationError, match="takes no other, so leave it out"):
            check_request_body(request, dict(body), b"{}")
