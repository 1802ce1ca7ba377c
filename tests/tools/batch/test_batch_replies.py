"""What a server, or what stands before it, may reply to a line; and which of it is an answer."""

import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.stand_in import http, replying

from vllm_kvx.cli import main
from vllm_kvx.tools.batch import run as asking
from vllm_kvx.tools.batch import strict_json
from vllm_kvx.tools.batch.replies import Meaning, read_reply

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ANSWER = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [{"index": 0}]}
MISSING = {"message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}
PAGE = b"<!DOCTYPE html><html><title>Log in</title></html>"


def answering_with(**changes: Any) -> bytes:
    return http(200, ANSWER | changes)


def healthy(*replies: bytes) -> Callable[[str, bytes], bytes]:
    """Is well at /health, and gives these replies elsewhere, in turn, the last for ever."""
    left = list(replies)

    def reply(path: str, body: bytes) -> bytes:
        if path == "/health":
            return http(200)
        return left.pop(0) if len(left) > 1 else left[0]

    return reply


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(asking, "RETRY_S", (0.001, 0.001))
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}
    path.write_text(json.dumps(line) + "\n")
    return path


def ask(batch: Path, url: str, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code, and what is written, as JSON has it."""
    path = batch.with_name("out.jsonl")
    code = main(["batch", str(batch), str(path), "--base-url", url, *flags])
    text = path.read_bytes() if path.exists() else b""
    return code, [strict_json.loads(line) for line in text.splitlines()]


ENDS = {
    "login page": (http(302, PAGE, "Location: https://login.test/?to=x"), "'https://login.test"),
    "moved": (http(301, b"", "Location: /v2/"), "answers 301 and sends elsewhere, to '/v2/'"),
    "other host": (http(307, b"", "Location: http://b/"), "give --base-url the address of the"),
    "permanently": (http(308, b"", "Location: http://b/"), "answers 308 and sends elsewhere"),
    "choices": (http(300), "answers 300 and sends elsewhere, to ''"),
    "not modified": (http(304), "answers 304"),
    "key": (http(401, {"error": "Unauthorized"}), "set VLLM_API_KEY to its key. It says '{"),
    "forbidden": (http(403, PAGE), "answers 403: set VLLM_API_KEY"),
    "proxy": (http(407, PAGE), "a proxy before the server answers 407"),
}
NO_ANSWERS = {
    "timeout": (http(408, PAGE), "answers 408: '<!DOCTYPE"),
    "timeout in JSON": (http(408, {"error": MISSING}), "answers 408"),
    "too early": (http(425), "answers 425"),
    "too many": (http(429, {"error": MISSING}), "answers 429"),
    "bad gateway": (http(502, PAGE), "answers 502"),
    "unavailable": (http(503, {"error": MISSING}), "answers 503"),
    "gateway timeout": (http(504, PAGE), "answers 504"),
    "origin down": (http(521, PAGE), "answers 521 with what is no answer of vLLM's"),
    "no backend": (http(404, b"default backend - 404"), "no JSON: Expecting .*'default backend"),
    "no route": (http(404, PAGE), "answers 404 with what is no answer of vLLM's"),
    "nothing": (http(404), "answers 404 with what is no answer"),
    "other service": (http(404, {"detail": "Not Found"}), r"answers 404 .*'\{\"detail\""),
    "gateway in JSON": (http(404, {"error": {"code": 404, "message": "x"}}), "answers 404"),
    "static files": (http(405, PAGE), "answers 405 with what is no answer"),
    "page": (http(200, PAGE, "Content-Type: text/html"), "answers 200 with what is no answer"),
    "empty": (http(200), "answers 200 with what is no answer"),
    "no content": (b"HTTP/1.1 204 No\r\n\r\n", "answers 204"),
    "part": (http(206, ANSWER), "answers 206 with what is no answer"),
    "accepted": (http(202, ANSWER), "answers 202 with what is no answer"),
    "status": (http(200, {"status": "ok"}), "answers 200 with what is no answer"),
    "list": (http(200, [ANSWER]), "answers 200 with what is no answer"),
    "unknown status": (http(600, ANSWER), "answers 600 with what is no answer"),
    "nan": (http(200, b'{"choices": [], "x": NaN}'), "NaN is no JSON number"),
    "infinity": (http(200, b'{"choices": [-Infinity]}'), "-Infinity is no JSON number"),
    "large": (http(200, b'{"choices": [1e999]}'), "the number 1e999 is too large"),
    "digits": (http(200, b'{"choices": [%s]}' % (b"9" * 5000)), "more than 4,300 digits"),
    "brackets": (http(200, b"[" * 5000), "nested more than 500 levels"),
    "nested": (http(200, b'{"choices": %s%s}' % (b"[" * 5000, b"]" * 5000)), "more than 500 lev"),
    "deep": (http(200, b'{"choices": %s%s}' % (b"[" * 600, b"]" * 600)), "more than 500 levels"),
    "utf-16": (http(200, json.dumps(ANSWER).encode("utf-16")), "is no JSON: 'utf-8' codec"),
    "surrogate": (http(200, b'{"choices": ["\xed\xa0\x80"]}'), "is no JSON: 'utf-8' codec"),
    "server ends": (
        answering_with(choices=[{"index": 0, "finish_reason": "abort"}]),
        "answers 200 with what is no answer",
    ),
    "torn": (http(200, json.dumps(ANSWER).encode()[:-9]), "it is no JSON: "),
    "cut off": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        "cannot be reached: peer closed",
    ),
    "too long": (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + b"{}" * 9, "it is no JSON"),
    "cut chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        "cannot be reached: peer closed",
    ),
    "no gzip": (http(200, ANSWER, "Content-Encoding: gzip"), "cannot be reached: Error -3"),
    "cut gzip": (
        http(200, gzip.compress(json.dumps(ANSWER).encode())[:-20], "Content-Encoding: gzip"),
        "it is no JSON",
    ),
    "codec": (http(200, PAGE, "Content-Type: text/html; charset=hex"), "answers 200"),
    "no codec": (http(404, PAGE, "Content-Type: text/html; charset=undefined"), "answers 404"),
    "no http": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "cannot be reached: illegal status line"),
    "no word": (b"", "cannot be reached: Server disconnected"),
    "nowhere": (http(302, b"", "Location: http:"), "answers 302|cannot be reached"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_every_line_would_get_ends_the_run(
    name: str, batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply, says = ENDS[name]
    with replying(healthy(reply)) as url:
        assert ask(batch, url) == (2, [])
    assert says in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_is_never_written(
    name: str, batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply, says = NO_ANSWERS[name]
    with replying(healthy(reply)) as url:
        code, written = ask(batch, url)
    said = capsys.readouterr().err
    assert code == (2 if name == "nowhere" and "answers 302" in said else 1) and written == []
    assert re.search(says, said), said
    assert said.count("\n") == 1 and len(said) < 1000


def test_the_second_try_may_have_the_answer(batch: Path) -> None:
    for status in (408, 425, 404, 200, 500):
        batch.with_name("out.jsonl").unlink(missing_ok=True)
        with replying(healthy(http(status, PAGE), http(status), answering_with())) as url:
            code, written = ask(batch, url)
        assert code == 0 and [line["response"]["body"] for line in written] == [ANSWER]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, MISSING),
        (400, {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}),
        (422, {"message": "no", "type": "UnprocessableEntityError", "code": 422}),
    ],
)
def test_vllms_refusal_is_an_answer_at_once(
    batch: Path, status: int, error: dict[str, Any]
) -> None:
    with replying(healthy(http(status, {"error": error}), answering_with())) as url:
        code, (line,) = ask(batch, url)
    assert code == 0 and line["error"] is None
    assert line["response"] == {
        "status_code": status,
        "request_id": "",
        "body": {"error": error},
    }


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (413, PAGE),
        (400, {"error": "Model m not found or vLLM engine is sleeping."}),
        (422, {"detail": [{"loc": ["body"]}]}),
        (400, b"[" * 5000),
        (400, b'{"error": NaN}'),
        (500, b"Internal Server Error"),
        (501, {"error": {"message": "not here", "type": "NotImplementedError", "code": 501}}),
    ],
)
def test_anothers_failure_is_an_answer_if_it_stays_and_the_server_is_well(
    batch: Path, status: int, body: Any
) -> None:
    with replying(healthy(http(status, body))) as url:
        code, (line,) = ask(batch, url)
    assert (code, line["response"]["status_code"]) == (0, status)
    if isinstance(body, bytes):
        message = line["response"]["body"]["error"]["message"]
        assert message == body.decode()[:1000]
    else:
        assert line["response"]["body"] == body


def test_a_failure_is_no_answer_of_a_server_that_is_not_well(batch: Path) -> None:
    failures = (http(413, PAGE), http(500))
    for failure, health in zip(
        failures * 2, (http(404), http(200, PAGE), http(302), b""), strict=True
    ):
        healths = iter((http(200), *[health] * 9))

        def reply(path: str, _: bytes, healths: Any = healths, failure: bytes = failure) -> bytes:
            return next(healths) if path == "/health" else failure

        with replying(reply) as url:
            assert ask(batch, url) == (1, [])


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2}, (7, 2)),
        ({"input_tokens": 7, "output_tokens": 2}, (7, 2)),
        ({"prompt_tokens": "7", "completion_tokens": ["2"]}, (0, 0)),
        ({"prompt_tokens": None, "completion_tokens": {"a": 1}}, (0, 0)),
        ({"prompt_tokens": 10**400, "completion_tokens": -1}, (0, 0)),
        ({"prompt_tokens": 1e300, "completion_tokens": True}, (0, 0)),
        (["7"], (0, 0)),
        ("7", (0, 0)),
        (None, (0, 0)),
    ],
)
def test_usage_may_be_anything(batch: Path, usage: Any, counted: tuple[int, int]) -> None:
    summary = batch.with_name("summary.json")
    with replying(healthy(answering_with(usage=usage))) as url:
        code, (line,) = ask(batch, url, "--summary", str(summary))
    assert code == 0 and line["response"]["body"]["usage"] == usage
    told = json.loads(summary.read_text())
    assert (told["prompt_tokens"], told["generated_tokens"]) == counted


def test_a_page_is_no_health(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with replying(lambda path, body: http(200, PAGE)) as url:
        assert ask(batch, url) == (2, [])
    assert "/health answers 200 with a page" in capsys.readouterr().err


def test_an_address_that_is_none_has_one_line(
    batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("", "127.0.0.1:1", "http://[::1", "http://xn--a", f"http://{'a' * 70}.de"):
        assert ask(batch, url) == (2, [])
        said = capsys.readouterr().err
        assert f"no server answers at {url}: " in said and said.count("\n") == 1


def test_a_key_that_no_header_may_hold_is_not_sent(
    batch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("schlüssel", "key\n"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with replying(healthy(answering_with())) as url:
            assert ask(batch, url) == (2, [])
        said = capsys.readouterr().err
        assert "VLLM_API_KEY holds what no header may" in said and key.strip() not in said


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
REPLIES = st.one_of(
    st.binary(),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(
        st.sampled_from(["id", "choices", "output", "usage", "error"]),
        VALUES | st.fixed_dictionaries({"message": VALUES, "type": VALUES, "code": VALUES}),
    ).map(lambda value: json.dumps(value).encode()),
    st.integers(1, 2000).map(lambda depth: b'{"choices": ' + b"[" * depth + b"]" * depth + b"}"),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([CHAT, RESPONSES]), st.integers(200, 999), REPLIES, st.text(max_size=9))
@example(CHAT, 200, b"\xff\xfe{", "hex")
def test_whatever_comes_only_vllms_form_is_an_answer(
    url: str, status: int, content: bytes, charset: str
) -> None:
    headers = [(b"content-type", b"text/html; charset=" + charset.encode())]
    reply = read_reply(url, httpx.Response(status, headers=headers, content=content))
    assert len(reply.why) < 3000 and "\n" not in reply.why
    if reply.meaning in (Meaning.ANSWER, Meaning.FAILURE):
        # It can be written, and read again by whoever reads JSON.
        again = strict_json.loads(strict_json.dumps(reply.body))
        assert again == reply.body
    if reply.meaning is Meaning.ANSWER and status == 200:
        assert isinstance(reply.body["choices" if url == CHAT else "output"], list)
    elif reply.meaning is Meaning.ANSWER:
        assert 400 <= status < 500 and isinstance(reply.body["error"]["message"], str)
    if reply.meaning is Meaning.FAILURE:
        assert 400 <= status < 600 and status not in (401, 403, 404, 407, 408, 425, 429, 502, 503)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(100, 999),
    st.lists(
        st.sampled_from(
            [
                *("Location: http:", "Location: //[", "Location: \xff", "Content-Length: 3"),
                *("Content-Encoding: gzip", "Content-Encoding: deflate", "Set-Cookie: =;;="),
                *("Transfer-Encoding: chunked", "x-request-id: \xe9", "no header", "a: \x01"),
            ]
        ),
        max_size=3,
    ),
    REPLIES,
)
def test_no_reply_is_a_traceback(
    batch: Path, status: int, headers: list[str], content: bytes
) -> None:
    head = "\r\n".join([f"HTTP/1.1 {status} x", *headers, "", ""]).encode("latin-1")
    batch.with_name("out.jsonl").unlink(missing_ok=True)
    with replying(healthy(head + content)) as url:
        code, written = ask(batch, url)
    assert code in (0, 1, 2) and len(written) == (code == 0)


@settings(max_examples=100, deadline=None)
@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
@example(b"NaN")
@example(b"-1e999")
@example(b"9" * 5000)
@example(b'"\\ud800"')
@example(b"[" * 501 + b"]" * 501)
def test_strict_json_is_what_others_read(raw: bytes) -> None:
    try:
        value = strict_json.loads(raw)
    except ValueError as error:
        assert "\n" not in str(error)
        if raw in (b"NaN", b"-1e999", b"9" * 5000) or raw.startswith(b"[" * 501):
            return
        try:
            found = json.loads(raw.decode("utf-8-sig"), parse_constant=lambda name: math.inf)
        except ValueError:
            return
        with pytest.raises(ValueError, match="Out of range"):
            json.dumps(found, allow_nan=False)
        return
    assert strict_json.loads(strict_json.dumps(value)) == value


def test_keys_that_are_there_twice() -> None:
    raw = b'{"a": 1, "b": {"c": 1, "c": 2}}'
    assert strict_json.loads(raw) == {"a": 1, "b": {"c": 2}}
    with pytest.raises(ValueError, match="an object has the key 'c' twice"):
        strict_json.loads(raw, unique_keys=True)
