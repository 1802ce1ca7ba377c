"""What a server's reply means for the line that was asked.

Between a batch and vLLM stand routers, ingresses, proxies and login pages, and what they say is no
line's answer, whatever its status. An answer is known by its form: vLLM's.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx

from vllm_kvx.tools.batch import strict_json

# Of a server that is busy, and of what stands before one that is slow or gone.
_BUSY = (408, 425, 429, 502, 503, 504)
# What is wrong is the key, and so with every line.
_NO_KEY = (401, 403)
# vLLM says 404 of a model. Otherwise these say that there is no vLLM.
_NOT_THERE = (404, 405, 410)
_SHOWN, _KEPT = 300, 1000


class Meaning(Enum):
    """What is to be done about a reply."""

    # vLLM's answer or refusal: it is written.
    ANSWER = auto()
    # The same would come for every line, until a setting is changed: the run ends.
    ENDS_RUN = auto()
    # No answer, however often it comes: the request is sent again.
    NO_ANSWER = auto()
    # A failure, which may be the request's own: it is sent again, and if the failure stays and the
    # server is well, it is written.
    FAILURE = auto()


@dataclass(frozen=True)
class Reply:
    """A reply, as it is written if it is an answer.

    status: HTTP's. request_id: the server's name for the request, "" if it has none. body: JSON.
    why: what is wrong, for the user.
    """

    meaning: Meaning
    status: int
    request_id: str
    body: Any
    why: str


def read_reply(url: str, response: httpx.Response) -> Reply:
    """What `response` to a POST to the path `url` means. Its content is read already."""
    status = response.status_code
    body: Any = None
    problem = ""
    try:
        body = strict_json.loads(response.content)
    except ValueError as error:
        problem = f"it is no JSON: {error}"
    meaning = _meaning(url, status, body)
    if body is None and meaning is Meaning.FAILURE:
        body = {"error": {"message": _text(response)[:_KEPT], "code": status}}
    request_id = response.headers.get("x-request-id") or (
        body.get("id") if isinstance(body, dict) else None
    )
    return Reply(
        meaning,
        status,
        request_id if isinstance(request_id, str) else "",
        body,
        _why(response, meaning, problem),
    )


def is_well(response: httpx.Response) -> bool:
    """Whether this is what a server that is ready answers at /health, and not some page."""
    return response.status_code == 200 and not response.content.lstrip().startswith(b"<")


def _meaning(url: str, status: int, body: Any) -> Meaning:
    if 300 <= status < 400 or status in (*_NO_KEY, 407):
        return Meaning.ENDS_RUN
    if status in _BUSY:
        return Meaning.NO_ANSWER
    if status == 200 and _is_answer(url, body):
        return Meaning.ANSWER
    if 400 <= status < 500 and _is_refusal(body):
        return Meaning.ANSWER
    if 400 <= status < 500 and status not in _NOT_THERE:
        return Meaning.FAILURE  # As a proxy's 413 for a long prompt, and a router's 400.
    if status in (500, 501) or (500 < status < 600 and _is_refusal(body)):
        return Meaning.FAILURE
    return Meaning.NO_ANSWER


def _is_answer(url: str, body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    if url == "/v1/responses":
        return isinstance(body.get("output"), list) and body.get("status") != "cancelled"
    choices = body.get("choices")
    return isinstance(choices, list) and not any(map(_is_cut_off, choices))


def _is_cut_off(choice: Any) -> bool:
    """Whether the server ended and took this answer along, with status 200."""
    return isinstance(choice, dict) and choice.get("finish_reason") == "abort"


def _is_refusal(body: Any) -> bool:
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and all(
        isinstance(error.get(key), str) for key in ("message", "type")
    )


def _why(response: httpx.Response, meaning: Meaning, problem: str) -> str:
    status, said = response.status_code, repr(_text(response)[:_SHOWN])
    if status in _NO_KEY:
        return f"the server answers {status}: set VLLM_API_KEY to its key. It says {said}"
    if status == 407:
        return (
            f"a proxy before the server answers 407 and wants a login: go round it. It says {said}"
        )
    if meaning is Meaning.ENDS_RUN:
        where = response.headers.get("location", "")[:_SHOWN]
        return (
            f"the server answers {status} and sends elsewhere, to {where!r}: give --base-url the "
            "address of the server itself"
        )
    if meaning is Meaning.NO_ANSWER and status not in _BUSY:
        problem = f" ({problem})" if problem else ""
        return f"the server answers {status} with what is no answer of vLLM's{problem}: {said}"
    return f"the server answers {status}: {said}"


def _text(response: httpx.Response) -> str:
    """The beginning of a reply, which may name any encoding and hold any bytes."""
    return response.content[: 4 * _KEPT].decode("utf-8", "replace")
