"""The real ``vllm serve`` command: starts that fail, and its help.

What its arguments alone decide is asked of the command in this process, which has imported vLLM.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.nightly import nightly
from support.served import FLAGS, on_cpu

from benchmarks.common.server import cpu_environment, vllm_command

pytestmark = on_cpu


def run_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [vllm_command(), "serve", *arguments],
        capture_output=True,
        text=True,
        env=cpu_environment(),
        timeout=300,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            ["--kv-policy", "speed-8"],
            "error: kv_policy: speed-8: this model has 8 layers; use",
            marks=nightly,
        ),
        (
            ["--enable-prompt-embeds"],
            "error: KV policy .*\n.*  - prompt embeddings .*: drop --enable-prompt-embeds",
        ),
    ],
    ids=["all layers", "refused"],
)
def test_a_bad_start_says_what_to_change(flags: list[str], message: str) -> None:
    """With vLLM's log and nothing else before it."""
    done = run_vllm(*FLAGS, *flags)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = "\n".join(done.stderr.strip().splitlines()[-2:])
    assert re.search(message, last), last


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs ``vllm serve``, which ends; its exit code, and what it says to stdout and stderr.

    Not what other processes do that earlier tests of this one have started.
    """
    from vllm.entrypoints.cli.main import main

    # The command sets it.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_an_unknown_policy_says_what_to_change(ends: Callable[..., Any]) -> None:
    code, out, err = ends(*FLAGS, "--kv-policy", "sped-4")
    assert code == 2 and "Traceback" not in out + err
    assert re.search("error: argument --kv-policy: .*did you mean speed-K", err.splitlines()[-1])


def test_help_shows_the_flag(ends: Callable[..., Any]) -> None:
    code, out, _ = ends("--help=KVPolicy")
    assert code in (0, None) and "--kv-policy POLICY" in out
