"""Images and audio where text alone is served: a 400 that says so, on every route."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from support.vllm_routes import BODIES

from vllm_kvx.server.body_check import STATUS

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HAVE_MEDIA = [
    ("/v1/chat/completions", {"messages": [PICTURE]}, "image_url"),
    ("/v1/chat/completions", {"messages": [{"input_audio": {"data": "A"}}]}, "input_audio"),
    ("/v1/chat/completions/batch", {"messages": [PICTURE]}, "image_url"),
    ("/v1/responses", {"input": [{"type": "input_image", "image_url": "A"}]}, "input_image"),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
        "input_image",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"type": "text", "text": "", "uuid": "u", "image_url": {"url": "A"}}]},
        "image_url",
    ),
    ("/v1/messages", {"messages": [{"type": "image", "source": {}}]}, "image"),
    ("/v1/messages", {"messages": [{"type": "tool_result", "content": [PICTURE]}]}, "image_url"),
    ("/inference/v1/generate", {"content_parts": [PICTURE]}, "image_url"),
    ("/inference/v1/generate", {"features": {"mm_hashes": {}}}, "features"),
]


@pytest.mark.parametrize(("path", "parts", "named"), HAVE_MEDIA)
def test_media_where_text_alone_is_served(
    app: FastAPI, post: Any, monkeypatch: pytest.MonkeyPatch, path: str, parts: Any, named: str
) -> None:
    """In the place of vLLM's advice to allow them, on every route that takes them."""
    ((key, values),) = parts.items()
    if key in ("messages", "input"):
        messages = [{"role": "user", "content": [{"type": "text", "text": "what?"}, *values]}]
        values = [messages] if path.endswith("batch") else messages
    body = {**BODIES[path], key: values}
    status = SimpleNamespace(model_name="m", text_alone="drop what propagates")
    monkeypatch.setattr(app.state, STATUS, status, raising=False)
    response = post(path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert named in message and "serves text alone: drop what propagates" in message
    assert "serves text alone" not in post(path, json=BODIES[path]).text
    # Of a text model vLLM says so itself.
    status.text_alone = None
    assert "serves text alone" not in post(path, json=body).text


def test_messages_that_only_look_like_media() -> None:
    from vllm_kvx.server.media_check import check_media

    deep: Any = PICTURE
    for _ in range(5000):
        deep = {"content": [deep]}
    for messages in (
        [{"role": "assistant", "content": "hello", "audio": {"id": "a"}}],
        [{"role": "user", "content": [{"type": "text", "text": "image_url"}, {"image_url": None}]}],
        [{"role": "user", "content": ["image_url", 7, None]}, "image_url", None],
        {"content": 7},
        [deep],
    ):
        check_media({"messages": messages}, "why")
