"""Two CPU servers behind vLLM's router: which replica gets whose turns, and what they find there.

    python -m benchmarks.serving.replicas --router vllm-router --output cpu-replicas.json

`vllm-router` is the package of that name (`pip install vllm-router`, in an environment of its own).
Four sessions ask three times each about a document of their own, every turn under another policy.
With a router that keeps a session on one replica, every turn but the first finds its prompt in the
prefix cache. Ends with 1 if one does not under `consistent_hash`, or if the router loses a policy.
--output writes what it prints, as JSON.
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
from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.common.server import (
    CHECKPOINT,
    HOST,
    ServerError,
    cpu_environment,
    free_port,
    post,
    serving,
)

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


class Outcome(NamedTuple):
    """What came of one routing.

    requests: by replica. by_policy: of both replicas. found: share of the later turns' prompts
    that was in the prefix cache of the replica they met.
    """

    requests: list[int]
    by_policy: dict[str, int]
    found: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.replicas", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--router", default="vllm-router", help="its program")
    parser.add_argument("--output", type=Path, help="file for the figures (default: none)")
    args = parser.parse_args()
    if shutil.which(args.router) is None:
        parser.error(f"{args.router} is not there: pip install vllm-router, and name its program")
    return args


def main() -> int:
    args = parse_args()
    outcomes: dict[str, Outcome] = {}
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
            for number, routing in enumerate(ROUTING):
                with routed(args.router, routing, replicas, folder) as url:
                    outcomes[routing] = ask(routing, url, replicas, number * SESSIONS)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    if args.output is not None:
        command = command_line("benchmarks.serving.replicas", sys.argv[1:])
        write_json(args.output, figures(outcomes, command, router_version(args.router)))
    return 0 if all(is_right(name, each) for name, each in outcomes.items()) else 1


def is_right(routing: str, outcome: Outcome) -> bool:
    """No policy was lost, and a routing by session kept every session on its replica."""
    if outcome.by_policy != dict.fromkeys(POLICIES, SESSIONS):
        print(f"{routing}: the router changed policies: {outcome.by_policy}")
        return False
    return routing != "consistent_hash" or outcome.found > 0.99


def figures(outcomes: Mapping[str, Outcome], command: str, router: str | None) -> dict[str, Any]:
    """The result file; router: its version."""
    head = about("Sessions through vLLM's router to two replicas, by its way of routing.", command)
    head["versions"]["vllm-router"] = router
    return {
        "about": head,
        "replicas": 2,
        "sessions": SESSIONS,
        "turns": list(POLICIES),
        "document_tokens": TOKENS,
        "routing": {
            name: {
                "requests_by_replica": each.requests,
                "requests_by_policy": each.by_policy,
                "later_turns_found": round(each.found, 4),
            }
            for name, each in outcomes.items()
        },
    }


def router_version(program: str) -> str | None:
    """By the Python beside the router's program, since it has no flag that says it."""
    python = Path(shutil.which(program) or program).parent / "python"
    code = "import importlib.metadata as m; print(m.version('vllm-router'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


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


def ask(routing: str, url: str, replicas: list[str], first_seed: int) -> Outcome:
    """Sends every session's turns and prints who answered."""
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
    outcome = outcome_of(done)
    text = " and ".join(map(str, outcome.requests))
    print(f"{routing}: requests {text}; later turns found {outcome.found:.0%} of their prompt")
    return outcome


def outcome_of(done: list[Counted]) -> Outcome:
    """What the replicas did together."""
    asked = {policy: sum(each.requests.get(policy, 0) for each in done) for policy in POLICIES}
    # Whole blocks before the window are found.
    repeated = SESSIONS * (len(POLICIES) - 1) * (TOKENS // 32 * 32)
    found = sum(each.found for each in done) / repeated
    return Outcome([sum(each.requests.values()) for each in done], asked, found)


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
