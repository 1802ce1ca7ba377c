"""A running ``vllm serve`` of the demo checkpoint under ``speed-4``, as a client sees it.

It has room for retrieval too, for requests that name it.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from soak import drain, processes
from transformers import AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.server import CHECKPOINT

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="serves with vLLM's CPU build")

MODEL = "lookup"
LAYERS, CUTOFF, BLOCK = 8, 4, 32
LENGTH = 500
FLAGS = [
    str(CHECKPOINT),
    *("--served-model-name", MODEL),
    *("--kv-policy", f"speed-{CUTOFF}"),
    # Triton's interpreter compares bfloat16 by its bits.
    *("--dtype", "float32"),
    *("--block-size", str(BLOCK)),
    *("--max-model-len", str(drain.MAX_LEN)),
    *("--kv-layout", "fier-64", "speed-4+fier-64"),
    *("--additional-config", '{"kv_recall_every": 1}'),
    *("--enforce-eager", *drain.FLAGS),
]
FULL = {"vllm_xargs": {"kv_policy": "full"}}
POLICIES = [{}, FULL]
POLICY_IDS = ["default", "full"]
# Retrieves; no test asks what it counts.
SLOW = "fier-32"


class Server:
    """A running server, as a client sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=300)
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self._seed = 0
        self.was_asked_to_end = False

    def question(self, length: int = LENGTH) -> tuple[str, str]:
        """A document that no request had before, and its answer."""
        self._seed += 1
        return make_prompt(self._seed, length, self.tokenizer)

    def complete(self, prompt: str, **body: Any) -> Any:
        """An answer through the OpenAI client, greedy unless `body` says otherwise."""
        known = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4}
        return self.openai.completions.create(**(known | body))

    def text(self, prompt: str, **body: Any) -> str:
        return self.complete(prompt, **body).choices[0].text

    def post(self, prompt: str, **body: Any) -> httpx.Response:
        """The bare response to a completion request."""
        known = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 2}
        return self.http.post("/v1/completions", json=known | body)

    def slowed(self) -> AbstractContextManager[None]:
        """Answers take some four times as long, and what this server tells of them is of now."""
        return processes.slowed(self.url)

    def status(self) -> dict[str, Any]:
        """What the server tells of now; a busy one may answer with what it read before."""
        end = time.monotonic() + 60
        while True:
            time.sleep(0.3)  # The server answers with what it read up to 0.25 s ago.
            told: dict[str, Any] = self.http.get("/v1/kv_policy").raise_for_status().json()
            if told["current"]:
                return told
            assert time.monotonic() < end, "the server is too busy to tell what it has counted"

    def counters(self, policy: str) -> dict[str, int]:
        return self.status()["counters"][policy]

    def holds_no_blocks(self, policy: str) -> dict[str, int]:
        """Waits until requests under the policy hold none; the policy's counters then."""
        end = time.monotonic() + 60
        while (counters := self.counters(policy))["blocks_held"]:
            assert time.monotonic() < end, "the requests still hold blocks"
        return counters

    def spent(self, policy: str, ask: Callable[[], Any]) -> dict[str, int]:
        """How far `ask` moved the policy's counters, which begin with its first request."""
        before = self.status()["counters"].get(policy, {})
        ask()
        after = self.counters(policy)
        return {k: n - before.get(k, 0) for k, n in after.items() if isinstance(n, int)}

    def metrics(self) -> dict[tuple[str, str], float]:
        """Our samples, by name and what tells them apart within it, if it is one label."""
        return {
            (name, labels.get("policy", labels.get("reason", labels.get("server_policy")))): value
            for name, labels, value in self.samples()
            if not {"layer", "le"} & labels.keys()
        }

    def first_tokens(self, policy: str) -> float:
        """Requests under the policy whose first token was timed."""
        wanted = {"policy": policy, "le": "+Inf"}.items()
        return sum(
            value
            for name, labels, value in self.samples()
            if name == "vllm_kvx:first_token_bucket_total" and wanted <= labels.items()
        )

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Our samples: name, labels and value."""
        self.status()  # Of now, which those that are exported then are too.
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name.startswith("vllm_kvx:") and not sample.name.endswith("_created")
        ]
