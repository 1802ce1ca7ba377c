"""What `evaluate --base-url` takes from a server, before it asks anything."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.engine import Prompt, Refused
from vllm_kvx.tools.evaluate.groups import read_policies
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.server import RunningServer

STATUS: dict[str, Any] = {"num_layers": 8, "layout": {}, "model_key": "k"}


def server(
    monkeypatch: pytest.MonkeyPatch, names: list[str], refusal: int = 200, **status: Any
) -> tuple[RunningServer, list[str]]:
    """The server, and what was asked of it; prompts of nine tokens get the status `refusal`."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/v1/kv_policy":
            return httpx.Response(200, json=STATUS | status)
        if refusal != 200 and len(json.loads(request.content)["prompt"]) == 9:
            return httpx.Response(refusal, json={"error": {"message": "no room"}})
        said = {"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}
        return httpx.Response(200, json=said)

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    return RunningServer("http://server/v1", read_policies(names, 8), 1, "k"), asked


def test_a_server_says_what_its_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = server(monkeypatch, ["fier-64"], kv_cache_dtype="fp8_e4m3")
    assert str(found.resolved(Row("fier-64"))) == "fier-64:dense_below=0@fp8"
    assert str(found.resolved(Row("full"))) == "full@fp8"
    assert asked.count("/v1/completions") == 2
    # One of before it was told.
    found, _ = server(monkeypatch, ["fier-64"])
    assert str(found.resolved(Row("full"))) == "full"


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_of_a_server_one_cache_is_asked(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    with pytest.raises(ToolError, match=r"fier-64@fp8: a server has one KV cache, for full too"):
        server(monkeypatch, ["fier-64@fp8"], kv_cache_dtype=dtype)
    server(monkeypatch, ["fier-64@bfloat16"], kv_cache_dtype="auto")


class Told:
    """What a server's answers say of how far they are."""

    def __init__(self) -> None:
        self.begun: list[tuple[Row, int]] = []
        self.read: list[int] = []
        self.finished: list[Prompt] = []

    def begin(self, row: Row, count: int) -> None:
        self.begun.append((row, count))

    def step(self, read: Sequence[int], written: int) -> None:
        self.read += read

    def finish(self, prompt: Prompt, tokens: int) -> None:
        self.finished.append(prompt)


def test_each_answer_is_told_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = server(monkeypatch, ["fier-64"])
    asked, told = [Prompt(range(length), 4) for length in (5, 7, 9)], Told()
    assert [answer.text for answer in found.answers(Row.parse("fier-64"), asked, told)] == [""] * 3
    assert told.begun == [(Row("fier-64"), 3)]
    assert sorted(told.read) == [5, 7, 9] and sorted(told.finished, key=asked.index) == asked


@pytest.mark.parametrize("status", [400, 503])
def test_a_prompt_that_is_refused(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Under other rows it may be answered, but not by a server that fails."""
    found, _ = server(monkeypatch, ["fier-64"], status)
    asked = [Prompt(range(length), 4) for length in (5, 9)]
    with pytest.raises(ToolError, match=rf"refuses fier-64 \({status}\): no room") as error:
        found.answers(Row.parse("fier-64"), asked, Told())
    assert isinstance(error.value, Refused) == (status == 400)
