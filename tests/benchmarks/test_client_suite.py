"""The client suite's own checks, on replies that no server made."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving.client_suite import Failed, Suite, ask, is_object


def test_an_object_of_the_schema_passes() -> None:
    is_object(json.dumps({"city": "Rome", "size": "large"}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        '{"city": "Rome"',
        '{"city": "Rome"}',
        '{"city": " ", "size": "large"}',
        '{"city": "Rome", "size": "large", "more": 1}',
    ],
)
def test_what_is_no_such_object_fails(text: str) -> None:
    with pytest.raises(Failed):
        is_object(text)


def client(headers: dict[str, str], text: str = "Paris") -> Any:
    """Answers every chat with `text`."""
    message = SimpleNamespace(content=text, tool_calls=None)
    reply = SimpleNamespace(
        choices=[SimpleNamespace(message=message, index=0, finish_reason="stop")],
        usage=SimpleNamespace(completion_tokens=1, prompt_tokens=20, kv_policy="full"),
    )
    raw = SimpleNamespace(headers=headers, parse=lambda: reply)
    create = SimpleNamespace(create=lambda **_: raw)
    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(with_raw_response=create))
    )


def test_a_chat_without_the_policy_s_header_fails() -> None:
    assert Suite(client({"x-kv-policy": "full"}), "full").chat() == "Paris"
    with pytest.raises(Failed, match="x-kv-policy"):
        Suite(client({}), "full").chat()


@pytest.mark.parametrize("kind", ["tool", "schema", "choices", "chat_long", "stop"])
def test_a_reply_of_another_kind_fails(kind: str) -> None:
    suite = Suite(client({"x-kv-policy": "full"}), "full")
    with pytest.raises(Failed):
        suite.kinds()[kind]()


def test_texts_are_compared_with_those_of_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(suite: Suite) -> Any:
        return {"chat": lambda: "Paris" if suite._policy != "speed-24" else "Rome"}

    monkeypatch.setattr(Suite, "kinds", kinds)
    found = ask(None, ["full", "fier-512", "speed-24"])
    assert "as_full" not in found["full"]["chat"]
    assert found["fier-512"]["chat"]["as_full"] is True
    assert found["speed-24"]["chat"]["as_full"] is False
