"""Lines of a batch file, and the file of its answers."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.batch.answers import Answers
from vllm_kvx.tools.batch.lines import Line, answer_line, error_line, parse, read_lines

CHAT = "/v1/chat/completions"


def request(custom_id: Any = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}}
    return json.dumps(fields | changes).encode()


def without(key: str) -> bytes:
    fields = json.loads(request())
    del fields[key]
    return json.dumps(fields).encode()


def test_a_request() -> None:
    line = parse(7, request("é\ud800", body={"model": "m", "n": 1, "text": "é\ud800\n"}))
    assert (line.number, line.custom_id, line.url, line.error) == (7, "é\ud800", CHAT, None)
    assert json.loads(line.body) == {"model": "m", "n": 1, "text": "é\ud800\n"}
    assert b"\n" not in line.body


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b"{", "invalid_json_line", "line 3: is no JSON: "),
        (b"\xff\xfe", "invalid_json_line", "is no JSON"),
        (b"[" * 100_000, "invalid_json_line", "is no JSON"),
        (b'{"custom_id": NaN}', "invalid_json_line", "NaN is no JSON number"),
        *(
            (request(body={"x": 0}).replace(b"0", text), "invalid_json_line", f"is no JSON: {says}")
            for text, says in (
                (b"1e999", "the number 1e999 is too large"),
                (b"-Infinity", "-Infinity is no JSON number"),
                (b"9" * 5000, "an integer has more than 4,300 digits"),
                (b"[" * 300 + b"]" * 300, "it is nested more than 200 levels deep"),
                (b"[" * 5000 + b"]" * 5000, "it is nested more than 200 levels deep"),
                (b'{"kv": 1, "kv": 2}', "an object has the key 'kv' twice"),
                (b'"\xed\xa0\x80"', "'utf-8' codec can't decode"),
            )
        ),
        (request().decode().encode("utf-16"), "invalid_json_line", "is no JSON: 'utf-8' codec"),
        (b"[1]", "invalid_json_line", "is no JSON object, but list"),
        (b'"text"', "invalid_json_line", "is no JSON object, but str"),
        *(
            (without(key), "missing_required_parameter", f"has no '{key}'")
            for key in ("custom_id",)
        ),
        (without("method"), "missing_required_parameter", "has no 'method'"),
        (without("url"), "missing_required_parameter", "has no 'url'"),
        (without("body"), "missing_required_parameter", "has no 'body'"),
        (request(5), "invalid_custom_id", "string that is not empty, got 5"),
        (request([[[[[[[[5]]]]]]]]), "invalid_custom_id", r"not empty, got \[.*\.\.\..*\]$"),
        (request(["a" * 1000] * 9), "invalid_custom_id", r"not empty, got \['aaa.{,299}$"),
        (request(method="G" * 1000), "invalid_method", 'must be "POST", got \'GGG.{,99}$'),
        (request(url="/" * 1000), "invalid_url", "must be one of .*got '///.{,99}$"),
        (request(""), "invalid_custom_id", "string that is not empty, got ''"),
        (request(method="GET"), "invalid_method", "must be \"POST\", got 'GET'"),
        (request(url="/sleep"), "invalid_url", "must be one of /v1/chat/completions, .*'/sleep'"),
        (request(url=[CHAT]), "invalid_url", "must be one of"),
        (request(body=[]), "invalid_body", "body must be an object, got list"),
        (request(body={"stream": True}), "invalid_body", "in one piece: drop 'stream'"),
        (request(body={"background": True}), "invalid_body", "drop 'background'"),
        *(
            (request(body={"vllm_xargs": xargs}), "invalid_policy", says)
            for xargs, says in (
                ({"kv_policy": "snapvk"}, "line 3: 'snapvk': unknown policy .*did you mean snapkv"),
                ({"kv_policy": "snapkv"}, "does not say how much stays"),
                ({"kv_policy": "snapkv:kv_rate=0"}, r"kv_rate must be a number in \(0, 1\], got 0"),
                ({"kv_policy": "swiftkv-4+snapkv"}, "keeps every entry"),
                ({"kv_policy": {"name": "full"}}, "a policy is a string .*got dict"),
                ({"kv_polcy": "full"}, "unknown key 'kv_polcy' in vllm_xargs"),
                ({"kvPolicy": "full"}, "unknown key 'kvPolicy'"),
                ({"kv_policy": "full", "kv_layout": []}, "unknown key 'kv_layout'"),
            )
        ),
    ],
)
def test_what_is_no_request_has_an_error(raw: bytes, code: str, says: str) -> None:
    line = parse(3, raw)
    assert line.error is not None and line.error[0] == code
    with pytest.raises(ValueError, match=says):
        raise ValueError(line.error[1])
    written = json.loads(error_line(line))
    assert written["response"] is None and written["id"] == line.id
    assert written["error"] == {"code": code, "message": line.error[1]}
    assert written["custom_id"] in (None, "", "a")


@pytest.mark.parametrize(
    "xargs", [None, {}, {"kv_policy": None}, {"kv_policy": "speed-4+fier-64", "priority": 1}]
)
def test_a_request_may_name_its_policy(xargs: Any) -> None:
    line = parse(1, request(body={"vllm_xargs": xargs}))
    assert line.error is None and json.loads(line.body)["vllm_xargs"] == xargs


def test_a_depth_is_an_error_or_none() -> None:
    """Python's limit is near a thousand, and less the deeper the call is."""
    for depth in (190, 198, 199, *range(940, 1010)):
        for raw in (request(body={"x": 0}), request(0)):
            line = parse(1, raw.replace(b"0", b"[" * depth + b"]" * depth))
            assert (line.error is None) == (depth <= 198 and b'"x"' in raw)


def test_a_byte_order_mark_does_not_matter() -> None:
    assert parse(1, b"\xef\xbb\xbf" + request()).error is None


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    again = request("b", body={"model": "other"})
    path.write_bytes(
        b"\n".join([request("a"), b"  ", b"{", request("b"), again, b"", request("c")])
    )
    lines = list(read_lines(path))
    assert [line.number for line in lines] == [1, 3, 4, 5, 7]
    assert [line.custom_id for line in lines] == ["a", None, "b", "b", "c"]
    assert [line.error and line.error[0] for line in lines] == [
        *(None, "invalid_json_line", None, "duplicate_custom_id", None)
    ]
    assert [line.error[1].split(": ")[0] for line in lines if line.error] == ["line 3", "line 5"]
    assert len({line.id for line in lines}) == 5


def answered(number: int, raw: bytes) -> bytes:
    return answer_line(parse(number, raw), 200, "r", {"text": "x"})


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    raws = [request(str(i)) for i in range(3)]
    batch.write_bytes(b"\n".join(raws))
    whole = answered(2, raws[1]) + answered(1, raws[0])
    for torn in (b"", b"{", answered(3, raws[2])[:-1], b"\0\0\0"):
        path.write_bytes(whole + torn)
        answers = Answers(path)
        assert set(answers.done) == {1, 2} and answers.check(batch) == 3
        answers.add(answered(3, raws[2]))
        answers.sync()
        answers.close()
        assert path.read_bytes() == whole + answered(3, raws[2])


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    raws = [request(str(i)) for i in range(3)]
    batch.write_bytes(b"\n".join(raws))
    for held, says in (
        (b"notes\n", "line 1 is no answer of a batch"),
        (b'{"custom_id": "0"}', "line 1 is no answer of a batch"),
        (answered(1, raws[0]) + b"notes", "line 2 is no answer"),
        (answered(1, raws[0]) + b'{"id": "batch_req_1"}\n', "line 2 is no answer"),
        (answered(1, raws[0]) * 2, "line 2 is there twice"),
    ):
        path.write_bytes(held)
        with pytest.raises(ToolError, match=says):
            Answers(path)
        assert path.read_bytes() == held
    for number, raw, says in (
        (2, raws[0], "to another line 2"),
        (9, raws[0], "a line 9, which .*in.jsonl does not have"),
    ):
        path.write_bytes(answered(number, raw))
        answers = Answers(path)
        with pytest.raises(ToolError, match=says):
            answers.check(batch)
        answers.close()


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """As on a full disk: other lines come after it, and none may follow half of one."""
    path = tmp_path / "out.jsonl"
    answers = Answers(path)
    line = error_line(parse(1, b"{"))
    answers.add(line)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            answers.add(error_line(parse(2, b"{")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == line
    answers.add(error_line(parse(3, b"{")))
    answers.close()
    assert set(Answers(path).done) == {1, 3}


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(ToolError, match="/dev/null is no regular file"):
        Answers(Path(os.devnull))


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    first = Answers(tmp_path / "out.jsonl")
    with pytest.raises(ToolError, match="another run writes it"):
        Answers(tmp_path / "out.jsonl")
    first.close()
    Answers(tmp_path / "out.jsonl").close()
    with pytest.raises(ToolError, match="No such file"):
        Answers(tmp_path / "none" / "out.jsonl")


def test_an_answer_says_what_openais_does() -> None:
    line = Line(4, "line-4-0", "mine", CHAT, b"{}")
    assert json.loads(answer_line(line, 400, "r-1", {"error": {"message": "m"}})) == {
        "id": "line-4-0",
        "custom_id": "mine",
        "response": {"status_code": 400, "request_id": "r-1", "body": {"error": {"message": "m"}}},
        "error": None,
    }
