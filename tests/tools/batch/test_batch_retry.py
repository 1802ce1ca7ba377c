"""``vllm-kvx batch --retry-errors``: what was refused is asked again, and nothing else."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support.stand_in import http, replying

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.batch import answers as module
from vllm_kvx.tools.batch.answers import Answers
from vllm_kvx.tools.batch.lines import Line, answer_line, error_line, parse

URL = "/v1/completions"


def request(custom_id: str, prompt: str = "good") -> bytes:
    body = {"model": "m", "prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode()


def answer(number: int, raw: bytes, status: int = 200) -> bytes:
    line = parse(number, raw)
    return error_line(line) if line.error else answer_line(line, status, "r", {"choices": []})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A batch of four, of which the second and third have an error."""
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    raws = [request("a"), request("b", "bad"), b"{", request("d")]
    batch.write_bytes(b"\n".join(raws))
    held = (answer(4, raws[3]), answer(2, raws[1], 400), answer(3, raws[2]), answer(1, raws[0]))
    path.write_bytes(b"".join(held))
    return batch, path


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def server(asked: list[str]) -> Callable[[str, bytes], bytes]:
    """Refuses the prompt "bad", and answers others."""

    def reply(path: str, body: bytes) -> bytes:
        if path == "/health":
            return http(200)
        asked.append(json.loads(body)["prompt"])
        if asked[-1] == "bad":
            error = {"message": "bad", "type": "BadRequestError", "code": 400}
            return http(400, {"error": error})
        return http(200, {"id": "x", "choices": []})

    return reply


def test_errors_are_asked_again_mended_or_not(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    batch, path = files
    good = [lines_of(path)[0], lines_of(path)[3]]
    asked: list[str] = []
    with replying(server(asked)) as url:
        command = ["batch", str(batch), str(path), "--base-url", url, "--concurrency", "1"]
        assert main(command) == 0 and asked == []
        # As they are: the server's refusal, and what is no request.
        assert main([*command, "--retry-errors"]) == 0 and asked == ["bad"]
        said = capsys.readouterr().err
        assert "2 lines whose answer is an error are asked again" in said
        assert "4 of 4 lines, 2 by earlier runs, 2 errors" in said
        assert lines_of(path)[:2] == good and len(lines_of(path)) == 4
        # One is mended.
        raws = batch.read_bytes().split(b"\n")
        batch.write_bytes(b"\n".join([raws[0], request("b", "mended"), *raws[2:]]))
        assert main(command) == 2
        assert "has the answer to another line 2" in (said := capsys.readouterr().err)
        assert "it is an error, which --retry-errors asks again" in said
        assert main([*command, "--retry-errors"]) == 0 and asked == ["bad", "mended"]
        # The other too, and the first is to be another's.
        raws = batch.read_bytes().split(b"\n")
        batch.write_bytes(b"\n".join([*raws[:2], request("c", "mended, too"), raws[3]]))
        assert main([*command, "--retry-errors"]) == 0 and asked[2:] == ["mended, too"]
        found = [json.loads(line) for line in lines_of(path)]
        assert [line["custom_id"] for line in found] == ["d", "a", "b", "c"]
        assert {line["response"]["status_code"] for line in found} == {200}
        text = path.read_bytes()
        assert main([*command, "--retry-errors"]) == 0 and len(asked) == 3
        assert "4 lines, all answered already" in capsys.readouterr().err
        batch.write_bytes(batch.read_bytes().replace(b"good", b"else"))
        assert main([*command, "--retry-errors"]) == 2
        assert "--retry-errors" not in capsys.readouterr().err
    assert path.read_bytes() == text and os.listdir(path.parent) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("status", [302, 204, 404, 408, 500])
def test_whatever_is_no_success_is_an_error(tmp_path: Path, status: int) -> None:
    """As earlier versions wrote redirects."""
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch.write_bytes(request("a"))
    path.write_bytes(answer(1, request("a"), status))
    answers = Answers(path)
    assert answers.check(batch, retry_errors=True) == 1 and answers.again == {1}
    answers.drop_errors()
    answers.close()
    assert path.read_bytes() == b""


def test_errors_of_lines_that_are_gone_leave_the_file(files: tuple[Path, Path]) -> None:
    batch, path = files
    raws = batch.read_bytes().split(b"\n")
    batch.write_bytes(b"\n".join([raws[0], b"", b"", raws[3]]))
    # Nothing is to be asked, so no server is.
    command = ["batch", str(batch), str(path), "--base-url", "http://127.0.0.1:9"]
    good = [lines_of(path)[0], lines_of(path)[3]]
    assert main([*command]) == 2
    assert main([*command, "--retry-errors"]) == 0
    assert lines_of(path) == good


def test_nothing_leaves_the_file_before_a_server_is_there(files: tuple[Path, Path]) -> None:
    batch, path = files
    held = path.read_bytes()
    command = ["batch", str(batch), str(path), "--base-url", "http://127.0.0.1:9"]
    assert main([*command, "--retry-errors"]) == 2
    assert path.read_bytes() == held


def test_a_mended_line_may_not_take_anothers_custom_id(files: tuple[Path, Path]) -> None:
    batch, path = files
    raws = batch.read_bytes().split(b"\n")
    batch.write_bytes(b"\n".join([raws[0], request("d", "mended"), request("b"), raws[3]]))
    asked: list[str] = []
    with replying(server(asked)) as url:
        command = ["batch", str(batch), str(path), "--base-url", url, "--retry-errors"]
        assert main(command) == 0 and asked == ["good"]
    found = {json.loads(line)["id"].split("-")[1]: json.loads(line) for line in lines_of(path)}
    assert found["2"]["error"]["code"] == "duplicate_custom_id"
    assert found["2"]["error"]["message"].startswith("line 2: another line")
    assert found["3"]["response"]["status_code"] == 200


STAGES = ["flock", "fchmod", "fsync", "replace", "unlink"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_moment_of_the_change(
    files: tuple[Path, Path], stage: str, after: bool, again: bool
) -> None:
    """By SIGKILL, before or after each of its steps: no good answer is lost, and a run goes on."""
    batch, path = files
    good = [lines_of(path)[0], lines_of(path)[3]]
    with path.open("ab") as file:
        file.write(b'{"id": "line-')
    (path.parent / f".{path.name}.retry").write_bytes(b"left by another run that was killed")
    child = os.fork()
    if child == 0:
        try:
            _die_at(stage, after)
            answers = Answers(path)
            answers.check(batch, retry_errors=True)
            answers.drop_errors()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    kept = lines_of(path)
    assert [line for line in kept if line in good] == good
    asked: list[str] = []
    with replying(server(asked)) as url:
        command = ["batch", str(batch), str(path), "--base-url", url]
        assert main([*command, *["--retry-errors"] * again]) == 0
    gone = b'"line-2-' not in b"".join(kept)
    assert gone == (stage == "replace" and after)
    assert asked == ["bad"] * (again or gone)
    found = lines_of(path)
    assert [line for line in found if line in good] == good
    assert sorted(json.loads(line)["id"].split("-")[1] for line in found) == list("1234")
    assert os.listdir(path.parent) == ["in.jsonl", "out.jsonl"]


def _die_at(stage: str, after: bool) -> None:
    """Has this process end by SIGKILL where it next calls this; flock: of the new file."""
    where = fcntl if stage == "flock" else Path if stage == "unlink" else os
    original = getattr(where, stage)

    def killed(*arguments: Any, **options: Any) -> Any:
        now = stage != "flock" or os.readlink(f"/proc/self/fd/{arguments[0]}").endswith(".retry")
        if now and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*arguments, **options)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(where, stage, killed)


def test_killed_while_it_asks(tmp_path: Path) -> None:
    """A process as it is used, killed again and again, with the flag and without."""
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["bad" if i % 3 else "good" for i in range(60)]
    batch.write_bytes(b"\n".join(request(str(i), p) for i, p in enumerate(prompts)))
    asked: list[str] = []
    answering = server(asked)
    # It answers no more while the file has so many lines, until who asks is killed.
    enough, killed = 60, Event()

    def no_further(where: str, body: bytes) -> bytes:
        while enough <= len(lines_of(path)) < 60 and not killed.is_set():
            killed.wait(0.002)
        return answering(where, body)

    with replying(no_further) as url:
        command = ["batch", str(batch), str(path), "--base-url", url, "--concurrency", "2"]
        assert main(command) == 0
        good = [line for line in lines_of(path) if b'"status_code": 200' in line]
        assert len(good) == 20 and asked.count("good") == 20
        batch.write_bytes(batch.read_bytes().replace(b'"bad"', b'"mended"', 30))
        for flags, enough in ((["--retry-errors"], 25), ([], 33), (["--retry-errors"], 40)):
            killed.clear()
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_kvx.cli", *command, *flags],
                stderr=subprocess.DEVNULL,
            )
            try:
                end = time.monotonic() + 60
                # Not before the errors have left the file.
                while not enough <= len(lines_of(path)) < 60:
                    assert process.poll() is None and time.monotonic() < end
                    time.sleep(0.002)
            finally:
                process.kill()
                process.wait()
                killed.set()
            assert [line for line in lines_of(path) if line in good] == good
        assert main([*command, "--retry-errors"]) == 0
    found = [json.loads(line) for line in lines_of(path)]
    assert sorted(int(line["custom_id"]) for line in found) == list(range(60))
    assert [line["response"]["status_code"] for line in found].count(200) == 50
    assert [line for line in lines_of(path) if line in good] == good
    assert asked.count("good") == 20


def test_the_lock_is_on_the_new_file(files: tuple[Path, Path]) -> None:
    batch, path = files
    first = Answers(path)
    first.check(batch, retry_errors=True)
    path.chmod(0o640)
    first.drop_errors()
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ToolError, match="another run writes it"):
        Answers(path)
    first.add(answer(2, batch.read_bytes().split(b"\n")[1]))
    first.sync()
    first.close()
    second = Answers(path)
    assert set(second.done) == {1, 2, 4}
    second.close()


def test_who_opened_the_old_file_takes_the_new_one(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write into a file that has no name any more."""
    batch, path = files
    changes = iter([True, False])
    flock = fcntl.flock

    def late(file: int, how: int) -> None:
        if next(changes, False):
            new = path.with_name("new")
            new.write_bytes(lines_of(path)[0])
            new.replace(path)
        flock(file, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    answers = Answers(path)
    assert set(answers.done) == {4} and answers.check(batch) == 4
    answers.add(answer(1, batch.read_bytes().split(b"\n")[0]))
    answers.close()
    assert len(lines_of(path)) == 2


def test_a_link_to_the_file_stays_one(files: tuple[Path, Path], tmp_path: Path) -> None:
    batch, path = files
    (tmp_path / "there").mkdir()
    target = path.rename(tmp_path / "there" / "answers")
    path.symlink_to(target)
    answers = Answers(path)
    answers.check(batch, retry_errors=True)
    answers.drop_errors()
    answers.close()
    assert path.is_symlink() and len(lines_of(target)) == 2
    assert os.listdir(target.parent) == ["answers"]


@contextmanager
def small_files() -> Iterator[None]:
    """No file grows beyond 50 bytes. Pytest's own output may be a file too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_changes_nothing(files: tuple[Path, Path]) -> None:
    batch, path = files
    held = path.read_bytes()
    answers = Answers(path)
    answers.check(batch, retry_errors=True)
    with small_files(), pytest.raises(ToolError, match="can take its place: File too large"):
        answers.drop_errors()
    answers.close()
    assert path.read_bytes() == held and os.listdir(path.parent) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (b'{"id": "line-%s-0123456789abcdef"}\n' % (b"9" * 5000), "its id names no line"),
        ('{"id": "line-٣-0123456789abcdef"}\n'.encode(), "its id names no line"),
        (b'{"id": "line-01-0123456789abcdef"}\n', "its id names no line"),
        (b'{"id": "line-1-0123456789abcdef"}\n', "it has neither response nor error"),
        (b'{"id": %s}\n' % (b"[" * 5000), "it is nested more than 502"),
        (b'{"id": %s}\n' % (b"9" * 5000), "an integer has more than 4,300"),
        (b'{"id": "line-1-0123456789abcdef", "response": {"x": NaN}}\n', "NaN is no JSON number"),
        (b"7\n", "it is no object"),
    ],
)
def test_what_is_no_answer_in_a_file_has_one_line(
    files: tuple[Path, Path], held: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, path = files
    path.write_bytes(held)
    assert main(["batch", str(batch), str(path), "--base-url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert f"line 1 is no answer of a batch ({why}" in said
    assert said.count("\n") == 1 and path.read_bytes() == held


def test_the_deepest_reply_is_read_again(tmp_path: Path) -> None:
    body = {"choices": json.loads("[" * 499 + "]" * 499)}
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer_line(Line(1, "line-1-0123456789abcdef"), 200, "r", body))
    answers = Answers(path)
    assert set(answers.done) == {1}
    answers.close()
