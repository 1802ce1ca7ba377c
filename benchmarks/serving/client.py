"""One run of `vllm bench serve` against a server, beside which the server's metrics are read."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.names import served
from benchmarks.common.server import ROOT
from benchmarks.serving.figures import Gauges, Setting

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
# The name under which every server offers its model.
MODEL = "model"
# How the error of a run begins that its limit ended.
_OVER = "not done after"
_READ_EVERY_S = 0.5


def bench_flags(
    setting: Setting, seed: int, policy: str | None = None, first: bool = True
) -> list[str]:
    """What `vllm bench serve` is told of a setting, and of the policy that requests name.

    first: on its server. Only then a request is sent ahead, which is not counted: all that policies
    run was compiled when the server started, and 4,096 output tokens take a small setting's time.
    """
    load = ["--request-rate", "inf" if setting.rate is None else f"{setting.rate:g}"]
    if setting.users:
        load += ["--max-concurrency", str(setting.users)]
    if policy:
        load += ["--extra-body", json.dumps({"vllm_xargs": {"kv_policy": served(policy)}})]
    return [
        *("--dataset-name", "random", "--num-prompts", str(setting.prompts)),
        *("--random-input-len", str(setting.input), "--random-output-len", str(setting.output)),
        *("--seed", str(seed), "--num-warmups", str(int(first))),
        *("--ignore-eos", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *load,
    ]


def bench(
    url: str,
    tokenizer: str,
    setting: Setting,
    seed: int,
    seconds: float,
    log: Path,
    policy: str | None = None,
    first: bool = True,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """One run of `vllm bench serve` against a server, beside which its metrics are read.

    `bench` is what it wrote, `server` what the metrics said, `error` what went wrong.

    more: further flags of `vllm bench serve`.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("a") as output:
        result = Path(folder) / "result.json"
        command = [
            *(*VLLM, "bench", "serve", "--base-url", url, "--model", MODEL),
            *("--tokenizer", tokenizer, "--disable-tqdm"),
            *("--save-result", "--result-filename", str(result)),
            *bench_flags(setting, seed, policy, first),
            *more,
        ]
        output.write(f"\n== {setting} {policy or ''}\n")
        output.flush()
        with metrics_of(url) as gauges, client(command, output) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            over = process.poll() is None
        found: dict[str, Any] = {"server": gauges.as_json()}
        if result.exists():
            found["bench"] = json.loads(result.read_text())
            # Folders of this machine say nothing.
            for key in ("model_id", "tokenizer_id", "errors"):
                found["bench"].pop(key, None)
        if over:
            found["error"] = [f"{_OVER} {seconds:.0f} s"]
        elif process.returncode or "bench" not in found:
            found["error"] = [f"exit status {process.returncode}", *_last_lines(log)]
        elif found["bench"]["completed"] != setting.prompts:
            found["error"] = [f"{found['bench']['completed']} of {setting.prompts} answered"]
    return {**found, "took_s": round(time.monotonic() - began, 1)}


def was_over(found: Mapping[str, Any]) -> bool:
    """Whether a run was ended by its limit."""
    return str(found.get("error", [""])[0]).startswith(_OVER)


@contextlib.contextmanager
def client(command: list[str], output: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of a group of its own, which is ended with all that it started."""
    # No session: see `serving`, whose engine might keep it from running.
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment(), process_group=0
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def metrics_of(url: str) -> Iterator[Gauges]:
    """Reads the server's metrics every half second, and once more at the end."""
    gauges, end = Gauges(), threading.Event()

    def read() -> None:
        # A busy server may answer late; the next reading has the same counters.
        with contextlib.suppress(OSError):
            gauges.read(get(f"{url}/metrics"))

    def run() -> None:
        while not end.wait(_READ_EVERY_S):
            read()

    read()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield gauges
    finally:
        end.set()
        thread.join()
        read()


def environment() -> dict[str, str]:
    """This environment; servers and clients find this checkout and ask no hub."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # A server closes what was idle for 5 s, by default; vLLM's client keeps it for 60 s, and a
        # request that is sent in that moment ends with "Server disconnected".
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    }


def wait_until_idle(url: str, end: float) -> None:
    """Until a killed client's requests have left the server, at most a minute or until `end`."""
    end = min(end, time.monotonic() + 60)
    while time.monotonic() < end:
        gauges = Gauges()
        with contextlib.suppress(OSError):
            gauges.read(get(f"{url}/metrics"))
            if not gauges.as_json()["most_running"]:
                return
        time.sleep(_READ_EVERY_S)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def _last_lines(log: Path) -> list[str]:
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if line][-12:]
