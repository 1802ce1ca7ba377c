"""Measuring at start: one server measures for all, the log shows it, and it comes to an end."""

import errno
import itertools
import logging
import os
import pwd
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import evaluation as evaluations
from vllm_kvx.records import lock as locks
from vllm_kvx.records.folder import CacheFolderError, cache_problem, cache_root
from vllm_kvx.records.layers import load
from vllm_kvx.records.lock import Lock
from vllm_kvx.server import measure_at_start
from vllm_kvx.server.measure_at_start import (
    Measurement,
    NotMeasuredError,
    Pace,
    Progress,
    limit,
    measured,
)

LOGGER = logging.getLogger("vllm.kvx")
QUICK = Pace(look=0.02, log=0.1, beat=0.05, stale=0.6)
# A server that is held up does not lose its lock.
PATIENT = QUICK._replace(stale=60)

# A measurement of so many prompts, 0.1 s each: it counts its runs, and keeps its result. While the
# file that it is given is there, it does not end.
TOOL = """
    import os, sys, time
    from pathlib import Path
    folder = Path(os.environ["KVX_CACHE_ROOT"])
    with Path(sys.argv[1]).open("a") as runs:
        print(os.getpid(), file=runs, flush=True)
    count = int(sys.argv[2])
    for number in range(1, count + 1):
        print(f"prompt {number}/{count}, 7 tokens", file=sys.stderr, flush=True)
        time.sleep(0.1)
    while Path(sys.argv[3]).exists():
        time.sleep(0.01)
    folder.mkdir(exist_ok=True)
    (folder / "result").write_text("5")
"""
# A server that measures so.
SERVER = """
    import logging, sys
    sys.path.insert(0, sys.argv[1])
    from tools.calibrate import test_at_start as here
    print(here.measure(here.Path(sys.argv[2]), int(sys.argv[3])))
"""


def known(folder: Path | None) -> int | None:
    path = (folder or cache_root()) / "result"
    return int(path.read_text()) if path.exists() else None


def measure(runs: Path, count: int, pace: Pace = PATIENT) -> int:
    """As a server does, whose tool takes `count` steps; `runs` gets the tools' process ids."""
    command = [sys.executable, "-c", textwrap.dedent(TOOL), str(runs), str(count)]
    command.append(str(goes_on(runs)))
    return measured(Measurement("a layer", "a.lock", command), known, LOGGER, pace)


def goes_on(runs: Path) -> Path:
    """The file while which is there no tool ends."""
    return runs.with_name("goes on")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def runs_of(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def another_server(runs: Path, count: int) -> "subprocess.Popen[str]":
    """One that measures now."""
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(tests), str(runs), str(count)]
    env = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}
    server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    until(lambda: runs_of(runs))
    return server


def test_one_server_measures_and_others_wait(runs: Path, cache: Path, log: list[str]) -> None:
    goes_on(runs).touch()
    first = another_server(runs, 1)

    def let_it_end() -> None:
        until(lambda: len(log) > 1)
        goes_on(runs).unlink()

    Thread(target=let_it_end).start()
    assert measure(runs, 1) == 5
    assert first.communicate(timeout=60)[0].split() == ["5"]
    assert len(runs_of(runs)) == 1
    assert log[0].endswith(" measures a layer: waiting for it.")
    assert f"process {first.pid} on " in log[0] and f"waiting for process {first.pid}" in log[1]
    assert not list(cache.rglob("*.lock*"))


def test_who_waits_takes_over_from_the_dead(runs: Path, cache: Path, log: list[str]) -> None:
    first = another_server(runs, 400)
    [orphan] = runs_of(runs)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (cache / "calibration" / "a.lock").exists()
    assert measure(runs, 1, QUICK) == 5
    assert len(runs_of(runs)) == 2
    assert not list(cache.rglob("*.lock*"))

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_gone)  # Nobody reads what it says, so the device is free.


def test_a_live_holder_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: now))
    holder, waiter = (Lock(tmp_path / "lock", beat=5, stale=90) for _ in range(2))
    assert holder.take()
    for _ in range(30):
        now += 10
        time.sleep(0.02)  # File systems tell apart what is some milliseconds apart.
        holder.keep()
        assert not waiter.take()
    # It stops, and later goes on: the lock is another's now, and stays.
    now += 89
    assert not waiter.take()
    now += 1
    assert waiter.take()
    holder.keep()
    holder.release()
    assert waiter.path.exists() and not Lock(waiter.path).take()
    waiter.release()
    assert not list(tmp_path.iterdir())


def test_a_takeover_spares_who_was_quicker(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    dead, late, quick = (Lock(path, stale=0) for _ in range(3))
    assert dead.take() and not late.take() and not quick.take()
    rename = os.rename

    def after_the_quick(*paths: Path) -> None:
        os.rename = rename
        assert quick.take()
        rename(*paths)

    os.rename = after_the_quick
    try:
        assert not late.take()
    finally:
        os.rename = rename
    quick.release()
    assert not list(tmp_path.iterdir())


def test_a_start_measures_for_so_long(
    runs: Path, cache: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit is reached once the log has this.
    awaited = " s left of these; "

    def clock() -> float:
        return time.monotonic() + 90 * any(awaited in line for line in log)

    there = SimpleNamespace(monotonic=clock, sleep=time.sleep)
    monkeypatch.setattr(measure_at_start, "time", there)
    monkeypatch.setenv("KVX_CALIBRATION_LIMIT", "89.5")
    with pytest.raises(NotMeasuredError, match=r"took longer than 90 s, .*KVX_CALIBRATION_LIMIT"):
        measure(runs, 400)
    [tool] = runs_of(runs)
    assert not Path(f"/proc/{tool}").exists() and not list(cache.rglob("*.lock"))
    states = [line for line in log if awaited in line]
    assert states and all("Measuring a layer: prompt " in line for line in states)
    # Whoever holds the lock, a start ends.
    awaited = "waiting for process"
    other = Lock(cache / "calibration" / "a.lock", beat=0)
    assert other.take()
    keep = Lock.take
    monkeypatch.setattr(Lock, "take", lambda lock: other.keep() or keep(lock))
    with pytest.raises(
        NotMeasuredError, match=rf"process {os.getpid()} on .* measuring it for lon"
    ):
        measure(runs, 1)
    assert len(runs_of(runs)) == 1
    other.release()


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_limits_are_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVX_CALIBRATION_LIMIT", text)
    with pytest.raises(ValueError, match=f"KVX_CALIBRATION_LIMIT must be .*, got '{text}'"):
        limit()


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVX_CALIBRATION_LIMIT", raising=False)
    assert limit() == 1800
    monkeypatch.setenv("KVX_CALIBRATION_LIMIT", "90")
    assert limit() == 90


def test_where_nothing_can_be_locked(
    runs: Path, cache: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if str(path).endswith(".lock"):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert measure(runs, 1) == 5
    assert log[0].startswith("Servers that start now may all measure a layer: ")
    assert "Operation not supported; set KVX_CACHE_ROOT to a directory" in log[0]


def test_progress_tells_what_is_left() -> None:
    clock = itertools.count(100, 4).__next__
    progress = Progress(clock)
    assert str(progress) == "loading the model"
    progress.read("Loading weights:  50%|#####     | 1/2")
    assert str(progress) == "loading the model"
    progress.read("prompt 1/16, 2048 tokens\n")  # at 100
    assert str(progress) == "prompt 1/16, 2048 tokens"
    progress.read("prompt 3/16, 2048 tokens\n")
    assert str(progress) == "prompt 3/16, 2048 tokens, about 28 s left of these"  # at 104
    # Another kind of questions, and answers: each part is counted for itself.
    for line in ("prompt 1/16, 2040 tokens", "answers under layer 3 by sum: 1/16"):
        progress.read(line)
        assert str(progress) == line
    progress.read("answers under layer 3 by sum: 2/16")
    assert str(progress).endswith("2/16, about 60 s left of these")
    progress.read("answers under layer 4 by sum: 3/16")
    assert str(progress) == "answers under layer 4 by sum: 3/16"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No home directory: as in a container with a user id that its /etc/passwd lacks."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("KVX_CACHE_ROOT", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CacheFolderError, match=r"~/.cache needs a home .*; set KVX_CACHE_ROOT to"):
        cache_root()
    assert cache_problem("calibration").endswith(
        "set KVX_CACHE_ROOT to a directory that can be written"
    )
    monkeypatch.setenv("KVX_CACHE_ROOT", "~nobody-has-this-name/cache")
    assert "~nobody-has-this-name/cache needs a home directory" in cache_problem()
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    assert cache_problem("calibration") == "" and (tmp_path / "cache" / "calibration").is_dir()


@pytest.mark.usefixtures("homeless")
def test_a_server_without_a_home_directory_starts(
    runs: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no records, and says so once."""
    fastkv = parse_policy("fastkv")
    assert evaluations.load("ab", fastkv) is None and evaluations.load("cd", fastkv) is None
    assert load(fastkv.parts[0], "ab", 8) is None
    [line] = log
    assert line.startswith("no folder to keep measurements in: ") and "set KVX_CACHE_ROOT" in line
    # And what it has to measure serves this start.
    monkeypatch.setattr(sys.modules[__name__], "known", lambda folder: folder and 7)
    assert measure(runs, 1) == 7
    assert line in log[1] and "every start measures" in log[1]
