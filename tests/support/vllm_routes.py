"""vLLM's routes that generate, with a body for each, and no engine behind them."""

import asyncio
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import httpx
from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

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


def routes(endpoint: Any) -> FastAPI:
    """vLLM's own routes with what `endpoint` adds, and no engine behind them."""
    app = FastAPI()
    args = Namespace(
        log_error_stack=False, enable_server_load_tracking=False, enable_scale_out=True
    )
    app.state.args = args
    app.state.server_load_metrics = 0
    register_api_routers(args, app, ("generate",))
    endpoint.attach_router(app)
    init_exception_handler(app)
    return app


def poster(app: FastAPI) -> Callable[..., httpx.Response]:
    """What posts to a route: ask(path, json=...)."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def ask(path: str, **kwargs: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, **kwargs)

    return lambda path, **kwargs: asyncio.run(ask(path, **kwargs))
