"""``vllm-kvx batch`` as a process of its own: killed, begun again, and given what is no request."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.stand_in import handing_on
from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.server import CHECKPOINT, cpu_environment, log_tail, serving
from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.batch import guard
from vllm_kvx.tools.batch import run as asking
from vllm_kvx.tools.batch.server import own_server

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="serves with vLLM's CPU build")

MODEL = "lookup"
POLICIES = ("speed-4", "full", "fier-64", None)
FLAGS = [
    *("--served-model-name", MODEL, "--kv-policy", "speed-4", "--kv-request-policies", "list"),
    *("--additional-config", '{"kv_layout": ["fier-64", "full"]}', "--max-model-len", "1024"),
]
CPU_FLAGS = ["--dtype", "float32", "--block-size", "32", "--enforce-eager"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("batch") / "server.log"
    # vLLM's CPU platform then runs no worker beside the engine, which imports vLLM once more.
    environment = cpu_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with serving([str(CHECKPOINT), *FLAGS, *CPU_FLAGS], log, environment) as url:
        yield url


def batch_process(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "vllm_kvx.cli", "batch", *map(str, arguments)]
    return subprocess.Popen(command, env=cpu_environment(), stderr=subprocess.PIPE, **options)


def run(*arguments: Any, **options: Any) -> tuple[int, str]:
    """Exit code and what was said."""
    process = batch_process(*arguments, **options)
    said = process.communicate(timeout=240)[1].decode()
    return process.returncode, said


def written(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of answers."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def write_batch(path: Path, count: int, length: int = 100) -> dict[str, str]:
    """A batch of lookups under a policy each; their answers by custom_id."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    expected = {}
    with path.open("w") as file:
        for i in range(count):
            prompt, expected[f"q-{i}"] = make_prompt(5000 + i, length + 3 * i, tokenizer)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
            if (policy := POLICIES[i % len(POLICIES)]) is not None:
                body["vllm_xargs"] = {"kv_policy": policy}
            line = {"custom_id": f"q-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            print(json.dumps(line), file=file)
    return expected


def kill_at(process: "subprocess.Popen[bytes]", path: Path, lines: int) -> None:
    """Ends the process by SIGKILL as soon as so many lines are written."""
    end = time.monotonic() + 240
    while len(written(path)) < lines:
        assert process.poll() is None and time.monotonic() < end, process.stderr
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def assert_answered(path: Path, expected: dict[str, str]) -> None:
    """Every line once, with its answer."""
    found = written(path)
    assert sorted(each["custom_id"] for each in found) == sorted(expected)
    for each in found:
        response = each["response"]
        assert (response["status_code"], each["error"]) == (200, None)
        assert response["request_id"]
        assert response["body"]["choices"][0]["text"] == expected[each["custom_id"]]


def test_killed_again_and_again_no_line_is_lost_or_there_twice(url: str, tmp_path: Path) -> None:
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    expected = write_batch(batch, 24)
    before = 0
    for lines in (3, 13):
        with handing_on(url, lines - before) as address:
            process = batch_process(batch, path, "--base-url", address, "--concurrency", "4")
            kill_at(process, path, lines)
        before = len(written(path))
        assert before == lines
    with path.open("ab") as file:
        file.write(b'{"id": "line-24-')  # As a write that was cut off leaves it.
    summary = tmp_path / "summary.json"
    code, said = run(
        batch, path, "--base-url", f"{url}/v1", "--progress", "1", "--summary", summary
    )
    assert code == 0, said
    told = json.loads(summary.read_text())
    assert (told["lines"], told["by_earlier_runs"], told["errors"]) == (24, before, 0)
    assert told["answered"] == 24 - before and told["prompt_tokens"] > 100 * (24 - before)
    assert told["generated_tokens"] > 0 and told["seconds"] > 0
    assert f"24 of 24 lines, {before} by earlier runs, 0 errors; " in said
    assert_answered(path, expected)
    text = path.read_bytes()
    code, said = run(batch, path, "--base-url", url, "--summary", summary)
    assert code == 0 and "24 lines, all answered already" in said
    assert path.read_bytes() == text
    told = json.loads(summary.read_text())
    assert (told["lines"], told["by_earlier_runs"], told["answered"]) == (24, 24, 0)


def test_a_full_disk_ends_a_run_and_loses_nothing(url: str, tmp_path: Path) -> None:
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    expected = write_batch(batch, 12)

    def few_bytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    code, said = run(batch, path, "--base-url", url, preexec_fn=few_bytes)
    assert code == 1 and f"stopped: {path}: File too large." in said, said
    assert "Traceback" not in said and 1 <= len(written(path)) < 12
    code, said = run(batch, path, "--base-url", url)
    assert code == 0, said
    assert_answered(path, expected)


@contextmanager
def answering(statuses: dict[str, int]) -> Iterator[str]:
    """The address of what answers with these statuses, by path, and with 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(statuses.get(self.path, 404))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_wrong_with_the_server_is_no_lines_answer(tmp_path: Path) -> None:
    """Else a batch without its key, or of another port, would be done at once, and wrongly."""
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(batch, 4)
    for statuses, says in (
        ({}, "/health answers 404"),
        ({"/health": 503}, "/health answers 503"),
        ({"/health": 200, "/v1/completions": 401}, "answers 401: set VLLM_API_KEY"),
    ):
        with answering(statuses) as elsewhere:
            code, said = run(batch, path, "--base-url", elsewhere)
        assert code == 2 and says in said and "Traceback" not in said, said
        assert written(path) == []


def test_failures_of_a_moment_are_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """502 is a proxy's word for a server that is gone, 500 an answer if it comes time and again."""
    monkeypatch.setattr(asking, "RETRY_S", (0.01,) * 3)
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(batch, 2)
    statuses = {"/health": 200, "/v1/completions": 502}
    with answering(statuses) as elsewhere:
        assert main(["batch", str(batch), str(path), "--base-url", elsewhere]) == 1
        assert written(path) == []
        statuses["/v1/completions"] = 500
        assert main(["batch", str(batch), str(path), "--base-url", elsewhere]) == 0
    assert [line["response"]["status_code"] for line in written(path)] == [500, 500]


def test_what_is_no_request_or_is_refused_has_a_line(url: str, tmp_path: Path) -> None:
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def line(custom_id: str, body: dict[str, Any], where: str = "/v1/chat/completions") -> str:
        request = {"custom_id": custom_id, "method": "POST", "url": where, "body": body}
        return json.dumps(request)

    messages = [{"role": "user", "content": "hello"}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 2}
    lines = [
        line("good", chat),
        "{",
        line("bad policy", chat | {"vllm_xargs": {"kv_policy": "sped-4"}}),
        line("not allowed", chat | {"vllm_xargs": {"kv_policy": "speed-4:tail=2"}}),
        line("misplaced", chat | {"kv_policy": "full"}),
        line("stream", chat | {"stream": True}),
        line("no such route", chat, "/v1/embeddings"),
        line("good", chat),
        line("too long", chat | {"messages": [{"role": "user", "content": "a b " * 2000}]}),
        line("responses", {"model": MODEL, "input": "hi", "max_output_tokens": 2}, "/v1/responses"),
    ]
    batch.write_text("\n".join(lines) + "\n")
    code, said = run(batch, path, "--base-url", url)
    assert code == 0 and "10 of 10 lines, 8 errors" in said, said
    found = {each["id"].split("-")[1]: each for each in written(path)}
    assert set(found) == {str(n) for n in range(1, 11)}
    codes = {n: each["error"] and each["error"]["code"] for n, each in found.items()}
    statuses = {
        n: each["response"] and each["response"]["status_code"] for n, each in found.items()
    }
    assert {n: code for n, code in codes.items() if code} == {
        "2": "invalid_json_line",
        "3": "invalid_policy",
        "6": "invalid_body",
        "7": "invalid_url",
        "8": "duplicate_custom_id",
    }
    answered = {"1": 200, "4": 400, "5": 400, "9": 400, "10": 200}
    assert {n: status for n, status in statuses.items() if status} == answered
    assert "did you mean speed-K" in found["3"]["error"]["message"]
    for number, says in (("4", "lets requests name"), ("5", "is not read")):
        assert says in found[number]["response"]["body"]["error"]["message"]
    # Mended, but for two: those are refused again, and what was answered is not asked.
    chat["max_tokens"] = 3
    policy = {"vllm_xargs": {"kv_policy": "full"}}
    for number, mended in (
        *((2, line("mended", chat)), (3, line("policy", chat | policy))),
        *((5, line("placed", chat | policy)), (6, line("stream", chat))),
        *((7, line("such a route", chat)), (8, line("better", chat))),
    ):
        lines[number - 1] = mended
    batch.write_text("\n".join(lines) + "\n")
    code, said = run(batch, path, "--base-url", url)
    assert code == 2 and "another line 2" in said and "--retry-errors" in said, said
    code, said = run(batch, path, "--base-url", url, "--retry-errors")
    assert code == 0 and "10 of 10 lines, 2 by earlier runs, 2 errors" in said, said
    again = {each["id"].split("-")[1]: each for each in written(path)}
    assert len(again) == len(written(path)) == 10
    assert all(again[number] == found[number] for number in ("1", "10"))
    assert {n: each["response"]["status_code"] for n, each in again.items()} == {
        str(n): 400 if n in (4, 9) else 200 for n in range(1, 11)
    }


def processes_of(group: str) -> list[str]:
    """Commands that run and have `group` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if group.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@nightly
def test_its_own_server_ends_with_it(url: str, tmp_path: Path) -> None:
    """Killed with its own server, and finished by another: an answer is an answer."""
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    expected = write_batch(batch, 60)
    mark = f"KVX_TEST_MARK={os.getpid()}"
    command = [sys.executable, "-m", "vllm_kvx.cli", "batch", str(batch), str(path)]
    command += [str(CHECKPOINT), *FLAGS, "--concurrency", "2"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        env = cpu_environment() | {"KVX_TEST_MARK": str(os.getpid())}
        del env["KVX_CPU"]  # As with CPU_FLAGS, the command adds it.
        process = subprocess.Popen(command, env=env, stderr=output)
        try:
            kill_at(process, path, 5)
        except AssertionError:
            pytest.fail(log_tail(log))
        finally:
            process.kill()
    end = time.monotonic() + 60
    while left := processes_of(mark):
        assert time.monotonic() < end, left
        time.sleep(0.5)
    assert 5 <= len(written(path)) < 60
    code, said = run(batch, path, "--base-url", url)
    assert code == 0, said
    assert_answered(path, expected)


def test_a_server_that_does_not_listen_yet_ends_too() -> None:
    """vLLM's does not hear that it is asked to end, before it is up; its engines hear nothing."""
    mark = f"KVX_TEST_GUARD={os.getpid()}"
    deaf = "import signal, time; [signal.signal(n, 1) for n in (2, 15)]; print(1, flush=True)"
    deaf += "; time.sleep(99)"
    engine = f'import subprocess, sys; subprocess.Popen([sys.executable, "-c", "{deaf}"])'
    command = [
        sys.executable,
        guard.__file__,
        "0.2",
        sys.executable,
        "-c",
        f"{engine}; {deaf}",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"KVX_TEST_GUARD": str(os.getpid())},
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == process.stdout.readline() == b"1\n"
    assert len(processes_of(mark)) == 3
    process.stdin.close()
    assert process.wait(30) == 128 + 9
    end = time.monotonic() + 30
    while left := processes_of(mark):
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.mark.parametrize("code", [0, 3])
def test_the_guard_ends_as_its_command(code: int) -> None:
    command = [
        sys.executable,
        guard.__file__,
        "1",
        sys.executable,
        "-c",
        f"raise SystemExit({code})",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.wait(30) == code


def test_what_cannot_be_done_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(batch, 2)
    for arguments, says in (
        ([batch, path], "name either MODEL"),
        ([batch, batch, "--base-url", "http://127.0.0.1:9"], "is the batch itself"),
        ([tmp_path / "none", path, "--base-url", "http://127.0.0.1:9"], "none: No such file"),
        ([batch, path, "--base-url", "http://a", "--kv-policy", "full"], "takes no flags: --kv"),
        ([batch, path, "--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0."),
        ([batch, path, "--base-url", "http://a", "--progress", "0"], "must be seconds above 0"),
        ([batch, path, "--base-url", "http://a", "--summary", tmp_path], "Is a directory"),
        ([batch, path, "m", "--api-key", "k"], "behind a Unix socket: drop --api-key"),
        ([batch, path, "m", "--ssl_keyfile=f"], "behind a Unix socket: drop --ssl-keyfile"),
    ):
        code, said = run(*arguments)
        assert code == 2 and says in said, said
    assert written(path) == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ToolError, match="the server ended with code 1 before it was up"):
        own_server(str(CHECKPOINT), ["--kv-policy", "full"]).__enter__()
