"""Lines of a batch file, and of its answers, in OpenAI's batch format.

A line of input is ``{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}``. Each has one
line of output, whatever it holds: an answer, the server's refusal, or what is wrong with the line.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from vllm_kvx.config.spelling import POLICY_KEY, VLLM_KEYS, has_prefix, misspelling
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import check_served, parse_policy
from vllm_kvx.tools.batch import strict_json

# Where a body names its policy.
XARGS = "vllm_xargs"
# The routes of a server that generate, and answer one body with one body.
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Levels of arrays and objects in a line: fewer than in a reply, which may repeat the request.
_DEPTH = 200


@dataclass(frozen=True)
class Line:
    """A line of input that is not blank.

    number: counted from 1. id: names the line and its text, in the output. custom_id: as given, if
    it is a string. url, body: the request, the body as JSON. error: OpenAI's code and what is wrong
    with the line, which then is no request.
    """

    number: int
    id: str
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: tuple[str, str] | None = None


class _Invalid(ValueError):
    """What is wrong with a line; code: OpenAI's word for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def id_of(number: int, raw: bytes) -> str:
    """What a line's answer is found by again: its number, and a digest of its text."""
    return f"line-{number}-{hashlib.sha256(raw.strip()).hexdigest()[:16]}"


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line that is not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw.strip()


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a batch file, in order."""
    seen: set[str] = set()
    for number, raw in raw_lines(path):
        line = parse(number, raw)
        if line.custom_id is not None and line.error is None:
            if line.custom_id in seen:
                message = f"an earlier line has the custom_id {short(line.custom_id)} too"
                line = duplicate(line, message)
            seen.add(line.custom_id or "")
        yield line


def duplicate(line: Line, message: str) -> Line:
    """`line` with the error that another one has its custom_id, as `message` says."""
    return Line(
        line.number,
        line.id,
        line.custom_id,
        error=("duplicate_custom_id", f"line {line.number}: {message}"),
    )


def parse(number: int, raw: bytes) -> Line:
    """The line in `raw`; what is wrong with it is in the line's `error`."""
    name, custom_id = id_of(number, raw), None
    try:
        fields = _object(raw)
        if isinstance(fields.get("custom_id"), str):
            custom_id = fields["custom_id"]
        url, body = _request(fields)
        return Line(number, name, custom_id, url, body)
    except _Invalid as error:
        return Line(number, name, custom_id, error=(error.code, f"line {number}: {error}"))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = strict_json.loads(raw, _DEPTH, unique_keys=True)
    except ValueError as error:
        raise _Invalid("invalid_json_line", f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise _Invalid("invalid_json_line", f"is no JSON object, but {type(found).__name__}")
    return found


def _request(fields: dict[str, Any]) -> tuple[str, bytes]:
    """Where the request goes, and its body as JSON."""
    for key in ("custom_id", "method", "url", "body"):
        if key not in fields:
            raise _Invalid("missing_required_parameter", f"has no {key!r}")
    if not isinstance(fields["custom_id"], str) or not fields["custom_id"]:
        message = f"custom_id must be a string that is not empty, got {short(fields['custom_id'])}"
        raise _Invalid("invalid_custom_id", message)
    if fields["method"] != "POST":
        raise _Invalid("invalid_method", f'method must be "POST", got {short(fields["method"])}')
    if fields["url"] not in URLS:
        message = f"url must be one of {', '.join(URLS)}, got {short(fields['url'])}"
        raise _Invalid("invalid_url", message)
    body = fields["body"]
    if not isinstance(body, dict):
        raise _Invalid("invalid_body", f"body must be an object, got {type(body).__name__}")
    for key in ("stream", "background"):
        if body.get(key):
            raise _Invalid("invalid_body", f"a line has one answer, in one piece: drop {key!r}")
    _check_policy(body.get(XARGS))
    return fields["url"], strict_json.dumps(body)


def _check_policy(xargs: Any) -> None:
    """Before anything is sent: no server of this version takes what is refused here."""
    if not isinstance(xargs, dict):
        return
    found = misspelling(xargs, (POLICY_KEY,))
    for key in [found.key] if found else [key for key in xargs if has_prefix(key)]:
        if key != POLICY_KEY and key not in VLLM_KEYS:
            message = f"unknown key {short(key)} in {XARGS}; a request's policy is {POLICY_KEY!r}"
            raise _Invalid("invalid_policy", message)
    name = xargs.get(POLICY_KEY)
    if name is None:
        return
    try:
        parse_policy(name).check_composition()
        check_served(name)
    except PolicyError as error:
        raise _Invalid("invalid_policy", str(error)) from None


def answer_line(line: Line, status: int, request_id: str, body: Any) -> bytes:
    """The output for a request that the server answered, be it with a refusal."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output(line, response, None)


def error_line(line: Line) -> bytes:
    """The output for a line that is no request."""
    assert line.error is not None
    code, message = line.error
    return _output(line, None, {"code": code, "message": message})


def _output(line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    fields = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
    return strict_json.dumps(fields) + b"\n"
