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
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support import options

from deploy.server import CHECKPOINT, cpu_environment, log_tail, serving
from soak import report
from soak.memory import Series
from soak.plan import (
    BLOCK,
    MAX_LEN,
    POLICIES,
    ROOM,
    SERVER_POLICY,
    Comparison,
    Turn,
    conversations,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's load")

MODEL, SEED, CLIENTS = "lookup", 1, 12
# Of the engine's requests, since they take so much longer here.
SHARE = 10
# Policies that choose nothing of a short prompt: interpreted, scores take most of a request's time.
QUICK = [name for name in POLICIES if "_rate=" not in name]
# Lines of the batch that is cut short, whose answers are compared.
COMPARED = 10
FLAGS = [
    *(str(CHECKPOINT), "--served-model-name", MODEL, "--kv-policy", SERVER_POLICY),
    *("--additional-config", json.dumps({"kv_layout": ROOM, "kv_debug": True})),
    *("--num-gpu-blocks-override", "46", "--max-num-seqs", "8", "--max-num-batched-tokens", "192"),
    *("--no-scheduler-reserve-full-isl", "--max-model-len", str(MAX_LEN)),
    *("--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"),
]
# What a server that drains gives its answers at most; those of the test take a part of it.
DRAIN_S = 120
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
    b'{"model": "lookup", "prompt": "a", "prompt_logprobs": 1}',
    b'{"model": "lookup", "prompt": "a", "use_beam_search": true, "n": 2}',
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak") / "server.log"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    with serving(FLAGS, log, cpu_environment(), timeout_s=500.0) as url:
        yield url


def body(turn: Turn, salt: str | None = None) -> dict[str, Any]:
    found = {"model": MODEL, "prompt": turn.prompt, "temperature": 0, "ignore_eos": True}
    found |= {"max_tokens": turn.max_tokens, "return_token_ids": True, "logprobs": 2}
    found |= {"vllm_xargs": {"kv_policy": turn.policy}}
    return found | ({} if salt is None else {"cache_salt": salt})


def run_alone(http: httpx.Client, talks: list[list[Turn]]) -> None:
    """Fills in prompts and answers: one request at a time, and no prefix that another left."""
    for number, talk in enumerate(talks):
        said: list[int] = []
        for depth, turn in enumerate(talk):
            turn.prompt = said + turn.adds
            reply = http.post("/v1/completions", json=body(turn, f"alone-{number}-{depth}"))
            (choice,) = reply.raise_for_status().json()["choices"]
            turn.answer = choice["token_ids"]
            for top in choice["logprobs"]["top_logprobs"]:
                best, second = sorted(top.values(), reverse=True)[:2]
                turn.gaps.append(best - second)
            said = turn.prompt + turn.answer


def ask(http: httpx.Client, turn: Turn) -> list[int] | None:
    """The tokens of the streamed answer; None if the client left before its end."""
    tokens: list[int] = []
    with http.stream("POST", "/v1/completions", json=body(turn) | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        if turn.abort_after == 0:
            return None
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
            if turn.abort_after is not None and len(tokens) >= turn.abort_after:
                return None
    return tokens


def samples(http: httpx.Client, name: str) -> float:
    """A metric, added up over its labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == name
    )


def tree(url: str) -> list[int]:
    """The server's processes: those that have its socket's port in their ancestors' command."""
    port, parents, roots = url.rpartition(":")[2], {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            if f"--port\0{port}\0".encode() in (folder / "cmdline").read_bytes():
                roots.append(int(folder.name))
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


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
        end = time.monotonic() + 30
        while (leaked := held(http)) and time.monotonic() < end:
            time.sleep(0.3)
        preempted = samples(http, "vllm:num_preemptions_total")
        used = samples(http, "vllm:kv_cache_usage_perc")
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


def short_turn(rng: random.Random) -> Turn:
    """A prompt of random tokens, of one or two blocks, and an answer of a token or two."""
    policy = rng.choice(POLICIES if rng.random() < 0.2 else QUICK)
    turn = Turn([], policy, rng.randint(1, 2), 0 if rng.random() < 0.1 else None)
    turn.prompt = [rng.randint(10, 500) for _ in range(rng.randint(8, 2 * BLOCK))]
    return turn


def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    """As in an update: what streams is answered to its end, nothing new is, and the server goes.

    By a server of its own, which ends here. Interpreted kernels are not needed for that.
    """
    log, flags = tmp_path / "server.log", [*FLAGS[:2], MODEL, "--kv-policy", "speed-4"]
    flags += ["--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"]
    flags += ["--max-model-len", str(MAX_LEN), "--shutdown-timeout", str(DRAIN_S)]
    rng = random.Random(SEED + 3)
    turns = [short_turn(rng) for _ in range(3)]
    for turn, policy in zip(turns, ("speed-4", "full", "speed-4"), strict=True):
        turn.policy, turn.max_tokens, turn.abort_after = policy, 48, None
        turn.adds = turn.prompt

    def is_answered(http: httpx.Client) -> bool:
        """Whether a request that comes now is; vLLM's refusal may be an answer that is aborted."""
        try:
            reply = http.post("/v1/completions", json=body(turns[0]) | {"max_tokens": 1})
        except httpx.TransportError:
            return False
        assert reply.status_code == 200 or reply.status_code >= 500, reply.text
        if reply.status_code != 200:
            return False
        (choice,) = reply.json()["choices"]
        assert (choice["finish_reason"] == "abort") == (not choice["token_ids"]), choice
        return choice["finish_reason"] != "abort"

    with serving(flags, log, cpu_environment(), timeout_s=500.0) as url:
        pids = tree(url)
        with httpx.Client(base_url=url, timeout=100) as http, ThreadPoolExecutor(3) as pool:
            run_alone(http, [[turn] for turn in turns])
            answers = [pool.submit(ask, http, turn) for turn in turns]
            end = time.monotonic() + 60
            while samples(http, "vllm:num_requests_running") < len(turns):
                assert time.monotonic() < end, log_tail(log)
                time.sleep(0.05)
            os.kill(pids[0], signal.SIGTERM)
            began = time.monotonic()
            while is_answered(http):
                assert not all(answer.done() for answer in answers), "new requests are answered"
            streaming = sum(not answer.done() for answer in answers)
            compared = Comparison()
            for turn, answer in zip(turns, answers, strict=True):
                tokens = answer.result()
                assert tokens is not None and len(tokens) == turn.max_tokens, log_tail(log)
                compared.add(turn, tokens)
        end = began + DRAIN_S
        while tree(url):
            assert time.monotonic() < end, f"the server stays: {log_tail(log)}"
            time.sleep(0.2)
    report.add(
        "drain",
        streams=len(turns),
        streaming_at_sigterm=streaming,
        equal=compared.equal,
        near_ties=compared.near_ties,
        mismatches=len(compared.mismatches),
        seconds=round(time.monotonic() - began),
    )
    assert streaming, "every answer was there before the signal: nothing was shown"
    assert not compared.mismatches, "\n".join(compared.mismatches)


def test_a_killed_engine_costs_no_line_of_a_batch(url: str, tmp_path: Path, log: Path) -> None:
    """What was answered stays, nothing else is written, and the client does not wait for ever.

    It stands last: the server is gone then.
    """
    talks = [turn for talk in conversations(30, SEED + 1) for turn in talk]
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
    engines = [
        pid for pid in tree(url) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert engines
    os.kill(engines[0], signal.SIGKILL)
    said = process.communicate(timeout=120)[1].decode()
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
