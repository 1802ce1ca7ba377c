"""Two CPU servers behind vLLM's router: which replica gets whose turns, and what they find there.

    python -m deploy.replicas --router vllm-router

`vllm-router` is the package of that name (`pip install vllm-router`, in an environment of its own).
Four sessions ask three times each about a document of their own, every turn under another policy.
With a router that keeps a session on one replica, every turn but the first finds its prompt in the
prefix cache. Ends with 1 if one does not under `consistent_hash`, or if the router loses a policy.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from deploy.server import CHECKPOINT, HOST, ServerError, cpu_environment, free_port, post, serving

MODEL = "lookup-8l"
# A turn each.
POLICIES = ("full", "speed-4", "snapkv:kv_rate=0.2")
ROUTING = ("consistent_hash", "cache_aware", "round_robin")
FLAGS = (
    *("--served-model-name", MODEL, "--kv-policy", POLICIES[-1]),
    *("--additional-config", json.dumps({"kv_layout": [POLICIES[1]]})),
    *("--max-model-len", "1024", "--dtype", "float32", "--block-size", "32", "--enforce-eager"),
)
SESSIONS, TOKENS = 4, 600
# Servers answer with what they read up to 0.25 s ago.
STALE_S = 0.4


class Counted(NamedTuple):
    """What one replica did: requests by policy, and prompt tokens found in its cache."""

    requests: dict[str, int]
    found: int


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.replicas", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--router", default="vllm-router", help="its program")
    args = parser.parse_args()
    if shutil.which(args.router) is None:
        parser.error(f"{args.router} is not there: pip install vllm-router, and name its program")
    return args


def main() -> int:
    args = parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvx-replicas-") as name,
        contextlib.ExitStack() as all_,
    ):
        folder = Path(name)
        flags = [str(CHECKPOINT), *FLAGS]
        try:
            replicas = [
                all_.enter_context(serving(flags, folder / f"{i}.log", cpu_environment(), 500))
                for i in range(2)
            ]
            is_right = True
            for number, routing in enumerate(ROUTING):
                with routed(args.router, routing, replicas, folder) as url:
                    is_right &= show(routing, url, replicas, first_seed=number * SESSIONS)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    return 0 if is_right else 1


@contextlib.contextmanager
def routed(program: str, routing: str, replicas: list[str], folder: Path) -> Iterator[str]:
    """A router before the replicas; yields its address."""
    port, log = free_port(), folder / f"{routing}.log"
    command = [program, "--host", HOST, "--port", str(port), "--policy", routing]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *replicas]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url, end = f"http://{HOST}:{port}", time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readiness"):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise ServerError(f"the router did not come up:\n{log.read_text(errors='replace')}")
            time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait()


def show(routing: str, url: str, replicas: list[str], first_seed: int) -> bool:
    """Sends every session's turns and prints who answered; False if that is not as it must be."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    before = [counted(replica) for replica in replicas]
    for session in range(SESSIONS):
        prompt, _ = make_prompt(first_seed + session, TOKENS, tokenizer)
        for policy in POLICIES:
            body = {"prompt": prompt, "vllm_xargs": {"kv_policy": policy}}
            status = complete(url, body, {"x-session-id": f"session-{session}"})
            if status != 200:
                raise ServerError(f"{routing}: status {status} under {policy}")
    refused = complete(url, {"prompt": "a", "vllm_xargs": {"kv_policy": "speed-6"}}, {})
    if refused != 400:
        raise ServerError(f"{routing}: a policy that no replica has room for got {refused}")
    after = [counted(replica) for replica in replicas]
    done = [_less(now, then) for now, then in zip(after, before, strict=True)]
    repeated = SESSIONS * (len(POLICIES) - 1)
    # Whole blocks before the window are found.
    share = sum(each.found for each in done) / (repeated * (TOKENS // 32 * 32))
    text = " and ".join(str(sum(each.requests.values())) for each in done)
    print(f"{routing}: requests {text}; later turns found {share:.0%} of their prompt", flush=True)
    asked = [sum(each.requests.get(policy, 0) for each in done) for policy in POLICIES]
    if asked != [SESSIONS] * len(POLICIES):
        print(f"  the router changed policies: {dict(zip(POLICIES, asked, strict=True))}")
        return False
    return routing != "consistent_hash" or share > 0.99


def counted(replica: str) -> Counted:
    """What a replica has counted until now."""
    time.sleep(STALE_S)
    with urllib.request.urlopen(f"{replica}/v1/kv_policy", timeout=30) as answer:
        counters: dict[str, Any] = json.load(answer)["counters"]
    requests = {name: each["requests"] for name, each in counters.items()}
    return Counted(requests, sum(each["prefix_hit"] for each in counters.values()))


def _less(now: Counted, then: Counted) -> Counted:
    requests = {name: n - then.requests.get(name, 0) for name, n in now.requests.items()}
    return Counted(requests, now.found - then.found)


def complete(url: str, body: dict[str, Any], headers: Mapping[str, str]) -> int:
    """The status that a completion of two tokens is answered with."""
    common = {"model": MODEL, "max_tokens": 2, "temperature": 0}
    return post(f"{url}/v1/completions", {**common, **body}, headers)


if __name__ == "__main__":
    sys.exit(main())
