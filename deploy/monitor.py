"""Loads a CPU server, has a Prometheus watch it, and asks for all that the dashboard shows.

    python -m deploy.monitor --seconds 180 --draw dashboard.png

Serves the demo checkpoint with room for several policies, sends requests under each of them, and
starts `prometheus`, which scrapes it and has the alerts. Then it evaluates every expression of the
dashboard there, as Grafana would, and ends with 1 if one has no data. With --draw it draws the
panels by matplotlib: the data is what Grafana would get, the picture is not Grafana's.
"""

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.server import (
    CHECKPOINT,
    HOST,
    ServerError,
    cpu_environment,
    free_port,
    post,
    serving,
)
from deploy import dashboard
from deploy.dashboard import Prometheus, Query, Series

MODEL = "lookup-8l"
POLICY = "fastkv:tsp_layer=4,kv_rate=0.1"
POLICIES = (POLICY, POLICY, "full", "snapkv:kv_rate=0.1", "fier-128:dense_below=0", "speed-4")
CONFIG = {
    "kv_layout": ["speed-4", "snapkv:kv_rate=0.1", "fier-128:dense_below=0"],
    # Room for one prompt, so that others wait.
    "kv_stash_tokens": 2048,
    "kv_recall_every": 4,
}
FLAGS = (
    *("--served-model-name", MODEL, "--kv-policy", POLICY),
    *("--additional-config", json.dumps(CONFIG)),
    *("--max-model-len", "2048", "--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
    # A pool that the load half fills.
    *("--num-gpu-blocks-override", "1200"),
    *("--dtype", "float32", "--block-size", "32", "--enforce-eager"),
)
# Requests that are answered with a 400, by their bodies' difference.
REFUSED = (
    {"vllm_xargs": {"kv_policy": "speed-6"}},
    {"vllm_xargs": {"kv_policy": "speed"}},
    {"kv_policy": "full"},
)
CLIENTS = 4
LENGTHS = (300, 700, 1200, 1800)
SCRAPE_S = 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.monitor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=int, default=120, help="of load (default: 120)")
    parser.add_argument("--draw", type=Path, help="where the picture goes")
    parser.add_argument("--prometheus", default="prometheus", help="its program")
    args = parser.parse_args()
    if args.seconds < 30:
        parser.error("--seconds: rates need at least 30")
    if shutil.which(args.prometheus) is None:
        parser.error(f"{args.prometheus} is not there: install Prometheus (Debian: `prometheus`)")
    return args


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="kvx-monitor-") as name:
        folder = Path(name)
        log = folder / "server.log"
        try:
            with contextlib.ExitStack() as stack:
                url = stack.enter_context(
                    serving([str(CHECKPOINT), *FLAGS], log, cpu_environment())
                )
                server = stack.enter_context(watching(args.prometheus, url, folder))
                print(f"{args.seconds} s of load, {CLIENTS} clients", flush=True)
                answered = load(url, args.seconds)
                time.sleep(2 * SCRAPE_S)
                print(f"{answered} requests were answered", flush=True)
                return report(server, args.seconds, args.draw)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1


@contextlib.contextmanager
def watching(program: str, url: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the server at `url` and has our alerts; `folder` is its."""
    settings = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "5s"},
        "rule_files": [str(dashboard.ALERTS)],
        "scrape_configs": [
            {
                "job_name": "vllm-kvx",
                "static_configs": [{"targets": [url.removeprefix("http://")]}],
            }
        ],
    }
    path = folder / "prometheus.json"  # JSON is YAML.
    path.write_text(json.dumps(settings))
    address = f"{HOST}:{free_port()}"
    process = subprocess.Popen(
        [
            program,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=(folder / "prometheus.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        server = Prometheus(f"http://{address}")
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                server.get("status/buildinfo")
                break
            if process.poll() is not None or time.monotonic() > end:
                raise ServerError((folder / "prometheus.log").read_text(errors="replace"))
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait()


def load(url: str, seconds: int) -> int:
    """Sends requests under every policy; how many were answered."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    end = time.monotonic() + seconds
    counts = [0] * CLIENTS

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            # Some are new, some were asked before.
            seed, length = rng.randrange(6), rng.choice(LENGTHS)
            body: dict[str, Any] = {
                "model": MODEL,
                "prompt": make_prompt(seed, length, tokenizer)[0],
                "max_tokens": rng.randint(4, 24),
                "ignore_eos": True,
                "temperature": 0,
            }
            is_refused = rng.random() < 0.05
            body |= (
                rng.choice(REFUSED)
                if is_refused
                else {"vllm_xargs": {"kv_policy": rng.choice(POLICIES)}}
            )
            status = post(f"{url}/v1/completions", body)
            if (status == 400) != is_refused or status not in (200, 400):
                raise ServerError(f"status {status} for {body}")
            counts[number] += 1

    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            client(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise ServerError(f"a client failed: {failures[0]}")
    return sum(counts)


def report(server: Prometheus, seconds: int, picture: Path | None) -> int:
    """Asks for every expression, prints what each has, and draws; 0 if all have data."""
    board = dashboard.load()
    answers: list[tuple[Query, list[Series]]] = [
        (query, dashboard.ask(server, query, seconds, "30s")) for query in dashboard.queries(board)
    ]
    for query, series in answers:
        last = f"{series[0].values[-1]:.4g}" if series else "NO DATA"
        print(f"{len(series):>3} series  {last:>10}  {query.panel}: {query.legend}")
    alerts = server.get("rules")["groups"][0]["rules"]
    for alert in alerts:
        print(f"alert {alert['name']}: {alert['state']} ({alert['health']})")
    empty = [query for query, series in answers if not series]
    broken = [alert["name"] for alert in alerts if alert["health"] != "ok"]
    if picture is not None:
        from deploy.drawing import draw

        draw(board, answers, picture)
        print(picture)
    print(f"{len(answers) - len(empty)} of {len(answers)} expressions have data")
    return 1 if empty or broken else 0


if __name__ == "__main__":
    sys.exit(main())
