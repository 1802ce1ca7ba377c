"""A real ``vllm serve`` that retains and retrieves, and a chat with an image."""

import base64
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.wrappers import add_processor, build
from support.engine import Answer
from support.expected import Policy, Read, named
from support.nightly import nightly
from support.pictures import Shown, assert_parity_shown, pixels

from benchmarks.common.server import cpu_environment, serving

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="serves with vLLM's CPU build"),
    pytest.mark.skipif(
        find_spec("torchvision") is None,
        reason="torchvision is missing: `bash tests/run.sh` sets it up",
    ),
]

IMAGE = (6, 7, 0)
POLICIES: list[Policy] = [Keep(kv_rate=0.2), Read(Retrieve(64))]


@nightly
def test_a_chat_with_an_image(tmp_path: Path) -> None:
    """Under the policy of the server and under a named one; and an image that cannot be read."""
    model = add_processor(build(tmp_path / "model", "qwen2_5_vl", layers=4), "qwen2_5_vl")
    flags = [
        *(str(model), "--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
        *("--kv-policy", named(POLICIES[0]), "--kv-layout", named(POLICIES[1])),
        *("--max-model-len", "512", "--block-size", "32"),
    ]
    with serving(flags, tmp_path / "server.log", cpu_environment()) as url:
        http = httpx.Client(base_url=url, timeout=300)
        replies = [ask(http, data_url(), policy) for policy in (None, named(POLICIES[1]))]
        broken = ask(http, "data:image/png;base64,AAAA", None)
        status = http.get("/v1/kv_policy").json()
    assert status["text_alone"] is None
    assert broken.status_code == 400
    shown = Shown([], (IMAGE,))
    answers = [answer_of(reply) for reply in replies]
    assert_parity_shown(model, [shown] * 2, answers, POLICIES)


def data_url() -> str:
    file = io.BytesIO()
    pixels(*IMAGE).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(http: httpx.Client, url: str, policy: str | None) -> httpx.Response:
    words = " ".join(f"w{3 + i * 7 % 400}" for i in range(90))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 5,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    if policy is not None:
        body["vllm_xargs"] = {"kv_policy": policy}
    return http.post("/v1/chat/completions", json=body)


def answer_of(reply: httpx.Response) -> Answer:
    assert reply.status_code == 200, reply.text
    body = reply.json()
    (choice,) = body["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    return Answer(body["prompt_token_ids"], choice["token_ids"], torch.tensor(logprobs), 0)
