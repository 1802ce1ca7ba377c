"""The real ``vllm serve`` command: what it tells of itself and counts, and how it ends."""

import asyncio
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import vllm
from soak import drain
from soak.client import samples
from support.served import (
    BLOCK,
    CUTOFF,
    LAYERS,
    LENGTH,
    MODEL,
    SLOW,
    Server,
    on_cpu,
)

from vllm_kvx.cache.latency import FIRST_TOKEN_BOUNDS, PER_TOKEN_BOUNDS
from vllm_kvx.policy.counted import MAX_POLICIES
from vllm_kvx.server.refusal_reasons import Reason

pytestmark = on_cpu


def test_tuned_weights_are_told(server: Server, log: Path) -> None:
    told = server.status()
    assert told["tuned_for"]["policy"] == "speed-4" and told["tuned_for"]["original"] == "demo"
    assert told["matches_tuning"]["speed-4"] and told["matches_tuning"]["speed-4+fier-64"]
    said = "weights tuned for speed-4 (by self-distillation of demo, held-out agreement 97.1% of"
    assert log.read_text().count(said) == 1
    prompt, _ = server.question()
    server.text(prompt, extra_body={"vllm_xargs": {"kv_policy": "speed-4:tail=2"}})
    assert server.status()["matches_tuning"]["speed-4:tail=2"] is False


def test_the_pool_is_told_beside_vllms_line(server: Server, log: Path) -> None:
    text = log.read_text()
    number = r"([\d,]+)"

    def found(pattern: str) -> list[int]:
        match = re.search(pattern, text)
        assert match is not None, pattern
        return [int(re.sub("[,.]", "", each)) for each in match.groups()]

    tokens, longest, fit = found(
        rf"CPU KV cache size: {number} tokens, Maximum concurrency for {number} tokens per "
        r"request: (\d+\.\d\d)x"
    )
    blocks, prompt, ours, of, stock = found(
        rf"KV pool: {number} blocks hold {number} prompt tokens under speed-{CUTOFF} once prompts "
        rf"are in: (\d+\.\d\d) prompts of --max-model-len {number}, and .*x the {number} tokens of"
    )
    [named] = found(rf'KV pool: the "KV cache size: {number} tokens" of vLLM')
    assert named == tokens and of == longest
    layout = server.status()["layout"]
    assert blocks == layout["num_blocks"] and prompt == layout["pool_prompt_tokens"]
    assert stock == layout["stock_pool_tokens"]
    assert abs(ours / 100 - prompt / longest) < 0.01 and abs(fit / 100 - tokens / longest) < 0.01
    # Half of the layers store prompts; all of them store what vLLM counts, and a sidecar too.
    assert 1.9 * tokens < prompt < 2.1 * tokens
    assert tokens <= stock * 1.01


def test_status(server: Server) -> None:
    status = server.status()
    assert status["policy"] == "speed-4"
    assert status["parameters"] == {
        "propagate": {"method": "speed", "cutoff": CUTOFF, "anchors": 1, "tail": 1}
    }
    assert status["num_layers"] == LAYERS
    assert status["current"] is True
    layout = status["layout"]
    assert layout["splits"] == [CUTOFF]
    assert [(len(group["layers"]), group["segment"]) for group in layout["groups"]] == [
        (CUTOFF, 0),
        (LAYERS - CUTOFF, 1),
    ]
    ratio = layout["pool_prompt_tokens"] / layout["stock_pool_tokens"]
    # Of 32 tokens and 64 channels a code bit each and two float16, beside float32 keys and values.
    assert ratio == pytest.approx(LAYERS / CUTOFF / (1 + 1 / 32), rel=0.001)
    sidecar = {"has_codes": True, "group": 32, "reduction": "max", "max_units": 64}
    sidecar |= {"reuse_layers": 1, "dense_layers": 2}
    assert layout["sidecar"] == sidecar


def test_counters_and_metrics_grow_by_what_was_sent(server: Server) -> None:
    before = server.metrics()
    # The layer below the cutoff stores all rows and runs two.
    skipped = (LENGTH - 2) * (LAYERS - CUTOFF + 1)
    for policy, saved in (("speed-4", skipped), ("full", 0)):
        prompt, _ = server.question()
        body = {"vllm_xargs": {"kv_policy": policy}}
        timed = server.first_tokens(policy)
        spent = server.spent(policy, lambda: server.text(prompt, max_tokens=1, extra_body=body))  # noqa: B023
        assert server.first_tokens(policy) - timed == 1
        assert spent == {
            "requests": 1,
            "prompt_tokens": LENGTH,
            "layer_tokens_computed": LENGTH * LAYERS - saved,
            "layer_tokens_skipped": saved,
            "tokens_propagated": 0,
            "blocks_freed": 0,
            "entries_retained": 0,
            "entries_dropped": 0,
            "entries_held_in_decode": 0,
            "entries_scored": 0,
            "entries_read": 0,
            "retrieval_steps": 0,
            "dense_fallbacks": 0,
            "blocks_held": 0,
            "blocks_saved": 0,
            "prefix_not_shared": 0,
            "prefix_hit": 0,
            "prefix_cached": 0,
            "tokens_drafted": 0,
            "tokens_accepted": 0,
            "prefix_states": 0,
            "kv_bytes_moved": 0,
            "stash_tokens_used": 0,
            "recall_samples": 0,
        }
        after = server.metrics()
        for name in ("requests", "prompt_tokens", "layer_tokens_computed", "layer_tokens_skipped"):
            key = (f"vllm_kvx:{name}_total", policy)
            assert after.get(key, 0) - before.get(key, 0) == spent[name], key
    assert after["vllm_kvx:layer_tokens_skipped_total", "speed-4"] > 0
    assert after.get(("vllm_kvx:layer_tokens_skipped_total", "full"), 0) == 0
    layout = server.status()["layout"]
    assert after["vllm_kvx:kv_pool_tokens", "speed-4"] == layout["pool_prompt_tokens"]
    assert after["vllm_kvx:stock_kv_pool_tokens", "speed-4"] == layout["stock_pool_tokens"]


@pytest.mark.parametrize("policy", ["fier-64", "speed-4+fier-64"])
def test_retrieval_answers_and_is_counted(server: Server, policy: str) -> None:
    prompt, answer = server.question()
    body = {"vllm_xargs": {"kv_policy": policy}, "ignore_eos": True}
    before, samples = server.metrics(), server.status()["retrieval"]["recall_samples"]
    texts: list[str] = []
    spent = server.spent(policy, lambda: texts.append(server.text(prompt, extra_body=body)))
    assert texts[0].startswith(answer)
    # Of four tokens prefill gave the first. Two layers are always read whole.
    lower, upper = (sum(n + i for i in (1, 2, 3)) for n in (LENGTH, 2))
    choosing = 6 if policy == "fier-64" else CUTOFF - 2
    few = (LAYERS - 2 - choosing) * upper
    expected = {
        "entries_held_in_decode": (2 + choosing) * lower + few,
        "entries_scored": choosing * lower,
        "entries_read": 2 * lower + choosing * 3 * 64 + few,
    }
    steps = {"retrieval_steps": 3, "dense_fallbacks": 0}
    assert {key: spent[key] for key in (*expected, *steps)} == expected | steps
    after = server.metrics()
    for name, moved in {f"kv_{k}": n for k, n in expected.items()}.items() | steps.items():
        key = (f"vllm_kvx:{name}_total", policy)
        assert after.get(key, 0) - before.get(key, 0) == moved, key
    retrieval = server.status()["retrieval"]
    assert retrieval["ops"] == "torch" and retrieval["seconds_in_sidecar_writes"] > 0
    # On a CPU every length may try it.
    assert (retrieval["policy"], retrieval["dense_below"], retrieval["auto"]) == ("fier-64", 65, 0)
    assert retrieval["dense_below_batch"] == 65
    assert retrieval["recall_samples"] - samples == 3 * choosing * 4  # steps, layers, query heads
    assert 0 < retrieval["recall"] <= 1
    measured = server.status()["counters"][policy]
    assert measured["recall_samples"] == spent["recall_samples"] == 3 * choosing * 4
    assert after["vllm_kvx:retrieval_recall", policy] == pytest.approx(measured["recall"])
    assert after["vllm_kvx:retrieval_crossover_tokens", f"speed-{CUTOFF}"] == 0
    assert after["vllm_kvx:retrieval_dense_below_tokens", f"speed-{CUTOFF}"] == 65
    assert after["vllm_kvx:retrieval_dense_below_batch_tokens", f"speed-{CUTOFF}"] == 65
    assert retrieval["dense_below_one"] is None
    assert after["vllm_kvx:retrieval_dense_below_one_tokens", f"speed-{CUTOFF}"] == math.inf
    written = after["vllm_kvx:sidecar_write_seconds_total", f"speed-{CUTOFF}"]
    assert written >= retrieval["seconds_in_sidecar_writes"] > 0


def test_the_server_says_what_it_is(server: Server) -> None:
    infos = {name: labels for name, labels, value in server.samples() if name.endswith("_info")}
    build = infos["vllm_kvx:build_info"]
    assert (build["model_name"], build["server_policy"]) == (MODEL, f"speed-{CUTOFF}")
    assert build["version"] == server.status()["version"]
    assert build["vllm_version"] == vllm.__version__
    assert build["torch_version"] == torch.__version__
    assert "KV groups split at layer 4" in build["layout"]
    ops = infos["vllm_kvx:retrieval_ops_info"]
    expected = ("torch", "torch", "the device is a CPU")
    assert (ops["score"], ops["attend"], ops["reason"]) == expected


def test_refusals_are_counted_by_reason(server: Server) -> None:
    def refused() -> dict[str, float]:
        name = "vllm_kvx:requests_refused_total"
        return {labels["reason"]: n for own, labels, n in server.samples() if own == name}

    before = refused()
    assert set(before) == set(Reason)
    prompt, _ = server.question(64)
    for name in ("sped-4", "speed-5", 4):
        assert server.post(prompt, vllm_xargs={"kv_policy": name}).status_code == 400
    assert server.post(prompt, prompt_logprobs=1).status_code == 400
    assert server.post(prompt, kv_policy="full").status_code == 400
    assert server.post(prompt, use_beam_search=True, n=2).status_code == 400
    assert server.post(prompt, max_tokens=-1).status_code == 400, "vLLM's own, not counted"
    now = refused()
    reasons = ("malformed", "no_room", "not_a_string", "prompt_logprobs", "misplaced")
    moved = {reason: now[reason] - before[reason] for reason in now}
    assert moved == dict.fromkeys(Reason, 0) | dict.fromkeys((*reasons, "beam_search"), 1)


def test_a_shared_prefix_counts_once(server: Server) -> None:
    """Ten requests hold one prefix; stock would hold it in every group, and once as well."""
    prompt, _ = server.question(1000)
    server.text(prompt)
    before = server.counters("speed-4")["layer_tokens_computed"]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1000}
    body |= {"temperature": 0, "ignore_eos": True}

    async def ask() -> dict[str, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            answers = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(10)
            ]
            while await asyncio.to_thread(_running, server) < 10:
                assert not any(answer.done() for answer in answers)
            counters = await asyncio.to_thread(server.counters, "speed-4")
            assert await asyncio.to_thread(_running, server) == 10
            for answer in answers:
                answer.cancel()
            await asyncio.wait(answers)
        return counters

    with server.slowed():
        counters = asyncio.run(ask())
    server.holds_no_blocks("speed-4")
    shared = 998 // BLOCK
    own = 10 * (1 + 1)  # Of every request the rest of the prompt, and the upper layers' block.
    # The answers may have grown into further blocks meanwhile.
    tokens = (counters["layer_tokens_computed"] - before) // LAYERS
    grown = 2 * (tokens // BLOCK + 10)
    assert shared + own <= counters["blocks_held"] <= shared + own + grown
    stock = 2 * (shared + 10)
    assert 0 < counters["blocks_saved"] <= stock


def _running(server: Server) -> float:
    return samples(server.http, "vllm:num_requests_running")


def test_odd_policies_leave_the_servers_own_alone(server: Server) -> None:
    """More policies than are kept apart, from any client: rows are bounded, and kept for its own.

    It stands after what counts other policies by name: those that come later are `other`.
    """
    names = [f"speed-4:anchors={a},tail={t}" for a in range(2, 12) for t in range(2, 9)]
    assert len(names) > MAX_POLICIES

    def ask(name: str) -> int:
        return server.post("a", max_tokens=1, vllm_xargs={"kv_policy": name}).status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, names)) == {200}
    for policy in ("speed-4", "fier-64", "speed-4+fier-64", "full"):
        body = {"vllm_xargs": {"kv_policy": policy}}
        spent = server.spent(policy, lambda: server.text("a b", max_tokens=1, extra_body=body))  # noqa: B023
        assert spent["requests"] == 1
    counters = server.status()["counters"]
    assert len(counters) == MAX_POLICIES + 5 and counters["other"]["requests"] >= 6
    series = [name for name, labels, _ in server.samples() if "policy" in labels]
    assert series.count("vllm_kvx:requests_total") == MAX_POLICIES + 5
    bounds = max(len(FIRST_TOKEN_BOUNDS), len(PER_TOKEN_BOUNDS)) + 1
    assert max(map(series.count, series)) <= (MAX_POLICIES + 5) * max(LAYERS, bounds)


def test_sigterm_lets_answers_end(server: Server, log: Path) -> None:
    """It stands after all that needs the server."""
    server.was_asked_to_end = True
    drain.end_by_sigterm(server.url, log, f"{SLOW}:dense_below=0")
