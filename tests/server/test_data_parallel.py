"""``vllm serve --data-parallel-size 2``: two engines behind one address, and two API processes."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support.nightly import nightly
from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.server import CHECKPOINT, cpu_environment, log_tail, serving

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has one for GPUs"),
    nightly,
]

MODEL = "lookup"
POLICIES = ("speed-4", "full", "fier-64", "snapkv:kv_floor=0")
FLAGS = [
    *(str(CHECKPOINT), "--served-model-name", MODEL, "--kv-policy", "speed-4"),
    *(
        "--additional-config",
        '{"kv_layout": ["fier-64", "snapkv:kv_rate=0.1,kv_floor=0", "full"], "kv_debug": true}',
    ),
    *("--kv-request-policies", "list", "--data-parallel-size", "2"),
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager"),
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines") / "server.log"


@pytest.fixture(scope="module")
def http(log: Path) -> Iterator[httpx.Client]:
    # Its log is read; tests before this one may have asked for less of it. vLLM 0.33 gives each
    # engine a NUMA node of its own, and a small machine has one.
    environment = cpu_environment() | {
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_SIM_MULTI_NUMA": "1",
    }
    with (
        serving(FLAGS, log, environment, timeout_s=560.0) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client
        assert client.get("/health").status_code == 200, log_tail(log)


def post(http: httpx.Client, prompt: str, policy: str, **body: Any) -> httpx.Response:
    known = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4}
    known["vllm_xargs"] = {"kv_policy": policy}
    return http.post("/v1/completions", json=known | body)


def status(http: httpx.Client) -> dict[str, Any]:
    end = time.monotonic() + 60
    while True:
        time.sleep(0.6)  # Each API process answers with what it read up to 0.25 s ago.
        found: dict[str, Any] = http.get("/v1/kv_policy").raise_for_status().json()
        assert found["engines"] == 2
        if found["current"]:
            return found
        assert time.monotonic() < end, "the server is too busy to tell what it has counted"


def samples(http: httpx.Client, name: str, label: str) -> dict[str, float]:
    """Of a metric, the samples by one label, added up over the others."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                key = sample.labels[label]
                found[key] = found.get(key, 0) + sample.value
    return found


def test_engines_share_requests_and_counters_add_up(http: httpx.Client, log: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    asked = [
        (POLICIES[i % 4], 200 + 7 * i, *make_prompt(1000 + i, 200 + 7 * i, tokenizer))
        for i in range(16)
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda each: post(http, each[2], each[0]), asked))
    for reply, (policy, _, _, answer) in zip(replies, asked, strict=True):
        assert reply.json()["choices"][0]["text"] == answer, policy
    by_engine = samples(http, "vllm:request_success_total", "engine")
    assert set(by_engine) == {"0", "1"} and min(by_engine.values()) >= 4, by_engine
    told = status(http)
    for policy in POLICIES:
        counters = told["counters"][policy]
        lengths = [length for name, length, *_ in asked if name == policy]
        assert (counters["requests"], counters["prompt_tokens"]) == (4, sum(lengths)), policy
        assert counters["blocks_held"] == 0
    # Those of each engine, as its own line says.
    blocks = [int(n.replace(",", "")) for n in re.findall(r"KV pool: ([\d,]+) bl", log.read_text())]
    assert len(blocks) == 2 and told["layout"]["num_blocks"] == sum(blocks)
    # One API process polls for all.
    end = time.monotonic() + 20
    expected = dict.fromkeys(POLICIES, 4.0)
    while (counted := samples(http, "vllm_kvx:requests_total", "policy")) != expected:
        assert time.monotonic() < end, counted
        time.sleep(0.5)


def test_what_requests_may_name_holds_in_every_api_process(http: httpx.Client) -> None:
    for _ in range(4):
        with httpx.Client(base_url=http.base_url, timeout=60) as other:  # A connection of its own.
            reply = post(other, "a", "speed-4:tail=2")
            assert reply.status_code == 400
            assert "these policies alone: speed-4, fier-64, snapkv:kv_floor=0, full (" in reply.text


def test_a_client_that_leaves_frees_its_engines_blocks(http: httpx.Client) -> None:
    body = {"stream": True, "max_tokens": 1500, "ignore_eos": True, "model": MODEL}
    body |= {"prompt": "a b c " * 40, "vllm_xargs": {"kv_policy": "full"}}
    for _ in range(2):  # One for each engine.
        for _ in range(5):  # On a busy machine an answer may be at its end before it is counted.
            with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                lines = response.iter_lines()  # Once it is collected, the connection is closed.
                next(lines)
                held = status(http)["counters"]["full"]["blocks_held"]
            if held:
                break
        assert held > 0
    end = time.monotonic() + 20
    while status(http)["counters"]["full"]["blocks_held"]:
        assert time.monotonic() < end
