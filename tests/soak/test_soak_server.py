"""A server under load: clients that leave, requests that are none, and at last a killed engine.

Every answer must be the one that its request had alone, on the same server before. The kernels run,
interpreted, so that requests are fewer than ``test_soak_engine`` has.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from support import options
from support.nightly import nightly

from benchmarks.common.server import CHECKPOINT, cpu_environment, log_tail, serving
from soak import drain, report
from soak.client import MODEL, ask, body, run_alone, samples, short_turn
from soak.memory import Series
from soak.plan import (
    BLOCK,
    KV_GROUPS,
    MAX_LEN,
    ROOM,
    SERVER_POLICY,
    Comparison,
    Turn,
    adapters_of,
    conversations,
    with_adapters,
    with_drafts,
)
from soak.processes import engine_of, tree

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's load")

SEED, CLIENTS = 1, 12
# Of the engine's requests, since they take so much longer here.
SHARE = 10
# Lines of the batch that is cut short, whose answers are compared.
COMPARED = 10
FLAGS = [
    *(str(CHECKPOINT), "--served-model-name", MODEL, "--kv-policy", SERVER_POLICY),
    *("--additional-config", json.dumps({"kv_layout": ROOM, "kv_debug": True})),
    *(
        "--num-gpu-blocks-override",
        str(23 * KV_GROUPS),
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "192",
    ),
    *("--no-scheduler-reserve-full-isl", "--max-model-len", str(MAX_LEN)),
    *("--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"),
]
# Bodies that no server should answer with 200, or be hurt by.
MALFORMED: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b'{"model": "lookup"}',
    b'{"model": "none", "prompt": "a"}',
    b'{"model": "lookup", "prompt": "a", "max_tokens": -1}',
    b'{"model": "lookup", "prompt": "a", "max_tokens": 100000}',
    b'{"model": "lookup", "prompt": [1, 2, 999999]}',
    b'{"model": "lookup", "prompt": "a", "vllm_xargs": {"kv_policy": "sped-4"}}',
    b'{"model": "lookup", "prompt": "a", "vllm_xargs": {"kv_policy": "speed-5"}}',
    b'{"model": "lookup", "prompt": "a", "vllm_xargs": {"kv_polcy": "full"}}',
    b'{"model": "lookup", "prompt": "a", "kv_policy": "full"}',
    b'{"model": "lookup", "prompt": "a", "use_beam_search": true, "n": 2}',
)
if SERVER_POLICY.startswith("speed"):  # It skips layers that these come from.
    MALFORMED += (b'{"model": "lookup", "prompt": "a", "prompt_logprobs": 1}',)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak") / "server.log"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    flags, more = list(FLAGS), with_adapters() | with_drafts()
    if adapters := adapters_of(log.parent):
        flags += ["--enable-lora", "--max-loras", str(more["max_loras"])]
        flags += ["--max-lora-rank", str(more["max_lora_rank"]), "--lora-modules"]
        flags += [f"{adapter.name}={adapter}" for adapter in adapters]
    if "speculative_config" in more:
        flags += ["--speculative-config", json.dumps(more["speculative_config"])]
    with serving(flags, log, cpu_environment(), timeout_s=500.0) as url:
        yield url


def held(http: httpx.Client) -> int:
    counters = http.get("/v1/kv_policy").json()["counters"].values()
    return sum(each["blocks_held"] for each in counters)


def test_answers_are_those_of_requests_alone(url: str, log: Path) -> None:
    count = max(options.requests() // SHARE, 8)
    talks = conversations(count, SEED)
    compared, rng = Comparison(), random.Random(SEED)
    left = refused = 0
    with httpx.Client(base_url=url, timeout=300) as http:
        run_alone(http, talks)

        def talk_through(talk: list[Turn]) -> list[tuple[Turn, list[int] | None]]:
            return [(turn, ask(http, turn)) for turn in talk]

        def send(bad: bytes) -> int:
            headers = {"Content-Type": "application/json"}
            return http.post("/v1/completions", content=bad, headers=headers).status_code

        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            bad = [MALFORMED[i % len(MALFORMED)] for i in range(max(count, len(MALFORMED)))]
            orders = [(talk_through, talk) for talk in talks] + [(send, each) for each in bad]
            rng.shuffle(orders)
            sent = [(do is send, pool.submit(do, what)) for do, what in orders]
            asked = [future for is_bad, future in sent if not is_bad]
            statuses = [future for is_bad, future in sent if is_bad]
            for future in asked:
                for turn, tokens in future.result():
                    if tokens is None:
                        left += 1
                    else:
                        compared.add(turn, tokens)
        for status in statuses:
            assert status.result() in (400, 404, 422), (status.result(), log_tail(log))
            refused += 1
        end = time.monotonic() + 60
        while True:
            leaked, used = held(http), samples(http, "vllm:kv_cache_usage_perc")
            if not (leaked or used) or time.monotonic() > end:
                break
            time.sleep(0.3)
        preempted = samples(http, "vllm:num_preemptions_total")
    report.add(
        "server",
        requests=count,
        malformed=refused,
        disconnects=left,
        preemptions=int(preempted),
        equal=compared.equal,
        near_ties=compared.near_ties,
        mismatches=len(compared.mismatches),
        leaked_blocks=leaked,
        seconds=round(time.monotonic() - began),
    )
    assert not compared.mismatches, "\n".join(compared.mismatches)
    assert compared.near_ties <= max(count // 50, 1)
    assert compared.equal + compared.near_ties + left == count
    assert leaked == 0 and used == 0
    assert preempted or count < 100


def test_memory_does_not_grow(url: str, log: Path) -> None:
    """Over as many requests as the engine's test has, which are short here, and bad ones."""
    count, rng, left = options.requests(), random.Random(SEED + 2), 0
    began, memory = time.monotonic(), Series(count, tree(url))
    with httpx.Client(base_url=url, timeout=300) as http, ThreadPoolExecutor(CLIENTS) as pool:

        def send(turn: Turn) -> bool:
            answer = ask(http, turn)
            bad = MALFORMED[len(turn.prompt) % len(MALFORMED)]
            headers = {"Content-Type": "application/json"}
            assert http.post("/v1/completions", content=bad, headers=headers).status_code >= 400
            return answer is None

        done = 0
        # As many at a time as there are clients, so that nothing runs when memory is measured.
        while done < count:
            turns = [short_turn(rng) for _ in range(min(CLIENTS, count - done))]
            left += sum(pool.map(send, turns))
            done += len(turns)
            memory.after(done)
    report.add(
        "server_memory",
        requests=count,
        malformed=count,
        disconnects=left,
        **memory.figures(),
        seconds=round(time.monotonic() - began),
    )
    assert left, "no client left"
    memory.assert_still()


@nightly
def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    """By a server of its own, which ends here. By day `serve/test_serve_status.py` ends another."""
    log, flags = tmp_path / "server.log", [*FLAGS[:2], MODEL, "--kv-policy", "speed-4"]
    flags += ["--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"]
    flags += ["--max-model-len", str(drain.MAX_LEN), *drain.FLAGS]
    with serving(flags, log, cpu_environment(), timeout_s=500.0) as url:
        figures = drain.end_by_sigterm(url, log)
    report.add("drain", **figures)


def test_a_killed_engine_costs_no_line_of_a_batch(url: str, tmp_path: Path, log: Path) -> None:
    """What was answered stays, nothing else is written, and the client does not wait for ever.

    It stands last: the server is gone then.
    """
    talks = [turn for talk in conversations(120, SEED + 1) for turn in talk]
    batch, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for turn in talks:
        turn.prompt, turn.abort_after = turn.adds, None
    with httpx.Client(base_url=url, timeout=300) as http:
        # Those that come first, of which a few are answered when the engine dies.
        run_alone(http, [[turn] for turn in talks[:COMPARED]])
    with batch.open("w") as file:
        for number, turn in enumerate(talks):
            request = {"method": "POST", "url": "/v1/completions", "body": body(turn)}
            print(json.dumps({"custom_id": str(number), **request}), file=file)
    command = [sys.executable, "-m", "vllm_kvx.cli", "batch", str(batch), str(path)]
    process = subprocess.Popen(
        [*command, "--base-url", url, "--concurrency", "4"], stderr=subprocess.PIPE
    )
    end = time.monotonic() + 200
    while not path.exists() or path.read_bytes().count(b"\n") < 4:
        assert process.poll() is None and time.monotonic() < end, log_tail(log)
        time.sleep(0.02)
    os.kill(engine_of(tree(url)), signal.SIGKILL)
    said = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 1 and "goes on from here" in said, said
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert 4 <= len(lines) < len(talks)
    assert {line["response"]["status_code"] for line in lines} == {200}
    end = time.monotonic() + 60
    while tree(url):
        assert time.monotonic() < end, "the server outlives its engine"
        time.sleep(0.5)
    compared = Comparison()
    for line in lines:
        if (number := int(line["custom_id"])) < COMPARED:
            (choice,) = line["response"]["body"]["choices"]
            compared.add(talks[number], choice["token_ids"])
    report.add(
        "engine_kill",
        lines=len(talks),
        answered_before=len(lines),
        equal=compared.equal,
        near_ties=compared.near_ties,
        mismatches=len(compared.mismatches),
    )
    assert not compared.mismatches, "\n".join(compared.mismatches)
    assert compared.equal >= 3
