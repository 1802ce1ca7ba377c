"""The real ``vllm serve`` command: starts that fail, and its help."""

import re
import subprocess

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
        timeout=120,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-policy", "sped-4"], "error: argument --kv-policy: .*did you mean speed-K"),
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
    ids=["unknown", "all layers", "refused"],
)
def test_a_bad_start_says_what_to_change(flags: list[str], message: str) -> None:
    """With vLLM's log and nothing else before it."""
    done = run_vllm(*FLAGS, *flags)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = "\n".join(done.stderr.strip().splitlines()[-2:])
    assert re.search(message, last), last


def test_help_shows_the_flag() -> None:
    done = run_vllm("--help=KVPolicy")
    assert done.returncode == 0
    assert "--kv-policy POLICY" in done.stdout
