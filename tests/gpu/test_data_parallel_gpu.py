"""Two engines on two GPUs behind one address. Skipped without two GPUs."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.models import add_tokenizer
from reference.zoo import build
from support.answers_over_http import ask_server
from support.expected import FULL, Policy, Read, named
from support.gpu import why_no_communicator
from support.parity import assert_parity, room_for
from support.prompts import VOCAB, prompts_of
from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.server import CHECKPOINT, serving

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MODEL = "lookup"
# Where packages lie in a folder of PYTHONPATH, no `vllm` is beside this Python.
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
POLICIES = ("speed-4", "full", "fier-64:dense_below=0", "snapkv:kv_floor=0", "speed-4:tail=2")


def answers(
    url: str, asked: list[tuple[str, str]]
) -> tuple[list[str], dict[str, Any], dict[str, float]]:
    """The answers to all at once, what the server says then, and by engine how many it gave."""
    with httpx.Client(base_url=url, timeout=300) as http:

        def ask(each: tuple[str, str]) -> str:
            policy, prompt = each
            body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8}
            reply = http.post("/v1/completions", json=body | {"vllm_xargs": {"kv_policy": policy}})
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["text"])

        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(ask, asked))
        time.sleep(1)
        told = http.get("/v1/kv_policy").raise_for_status().json()
        by_engine: dict[str, float] = {}
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "vllm:request_success_total":
                    engine = sample.labels["engine"]
                    by_engine[engine] = by_engine.get(engine, 0) + sample.value
    return texts, told, by_engine


def test_two_engines_answer_as_one(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    lengths = [200 + 31 * i for i in range(40)]
    asked = [
        (POLICIES[i % len(POLICIES)], make_prompt(2000 + i, length, tokenizer)[0])
        for i, length in enumerate(lengths)
    ]
    flags = [
        *(str(CHECKPOINT), "--served-model-name", MODEL, "--kv-policy", "speed-4"),
        *(
            "--additional-config",
            '{"kv_layout": ["fier-64", "snapkv:kv_rate=0.1,kv_floor=0"], "kv_debug": true}',
        ),
        *("--dtype", "float32", "--attention-backend", "TRITON_ATTN"),
        *("--max-model-len", "2048", "--gpu-memory-utilization", "0.1"),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        "--no-enable-prefix-caching",  # Which engine has a prefix would show in the counters.
    ]

    def run(engines: int) -> tuple[list[str], dict[str, Any], dict[str, float]]:
        log = tmp_path / f"server-{engines}.log"
        more = ["--data-parallel-size", str(engines)]
        with serving([*flags, *more], log, os.environ, 420.0, VLLM) as url:
            return answers(url, asked)

    with ThreadPoolExecutor(2) as pool:  # Starts take most of the time.
        found = dict(zip((1, 2), pool.map(run, (1, 2)), strict=True))
    (alone, one, _), (together, two, by_engine) = found[1], found[2]
    assert together == alone
    assert (one["engines"], two["engines"]) == (1, 2)
    assert set(by_engine) == {"0", "1"} and min(by_engine.values()) >= 10
    for policy in POLICIES:
        for field in ("requests", "prompt_tokens", "layer_tokens_skipped", "entries_retained"):
            assert two["counters"][policy][field] == one["counters"][policy][field], (policy, field)
        assert two["counters"][policy]["blocks_held"] == 0


def test_experts_of_two_ranks(tmp_path: Path) -> None:
    """Experts are spread over two engines, which run in lockstep: one waits where the other lacks.

    Prompts come in two waves, the second of a single one: then a rank has nothing to do but that.
    """
    if reason := why_no_communicator():
        pytest.skip(reason)
    model = build(tmp_path / "model", "qwen3_moe", head_dim=64, hidden_size=256)
    add_tokenizer(model, VOCAB)
    policies: list[Policy] = [
        FULL,
        Keep(kv_rate=0.2),
        Critical(kv_rate=0.2),
        Read(Retrieve(64)),
    ]
    prompts = prompts_of((97, 33, 200, 5, 161, 64, 130, 250, 48, 500, 290, 340))
    asked = [policies[i % len(policies)] for i in range(len(prompts))]
    flags = [
        *(str(model), "--kv-policy", "full"),
        *("--additional-config", json.dumps({"kv_debug": True, **room_for(policies)})),
        *("--data-parallel-size", "2", "--enable-expert-parallel"),
        *("--dtype", "float32", "--attention-backend", "TRITON_ATTN", "--block-size", "32"),
        *("--max-model-len", "1024", "--gpu-memory-utilization", "0.1"),
        *("--kv-cache-memory-bytes", str(1 << 28), "--max-num-batched-tokens", "96"),
        "--no-enable-prefix-caching",
    ]
    with serving(flags, tmp_path / "server.log", os.environ, 420.0, VLLM) as url:
        answers = ask_server(url, prompts, [named(policy) for policy in asked], 16)
        for i in range(len(policies)):
            answers += ask_server(url, prompts[i : i + 1], [named(policies[i])], 16)
        told = httpx.get(f"{url}/v1/kv_policy", timeout=60).raise_for_status().json()
        assert told["engines"] == 2
    # Rounding may choose another expert.
    assert_parity(model, answers, [*asked, *policies], most=2)
