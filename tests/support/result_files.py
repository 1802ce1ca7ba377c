"""Contents of result files, as the benchmarks' commands write them, with made-up figures."""

from typing import Any

from benchmarks.engine.compare import derive
from benchmarks.engine.shapes import SHAPES

SETTINGS = ["4x8192/1024@inf", "4x8192/1024@c1", "4x8192/1024@1", "4x8192/1024@2"]


def about(device: str | None = None, date: str = "2026-01-01") -> dict[str, Any]:
    """The head of a result file."""
    head = {"what": "w", "command": "c", "date": date, "commit": "abc", "device": device}
    return {**head, "versions": None}


def loaded(speeds: dict[str, float], gpu: str | None = "NVIDIA H200, 1") -> dict[str, Any]:
    """A file of `benchmarks.serving`: every server's requests/s, alone and together."""

    def measured(speed: float) -> dict[str, Any]:
        times = {f"{q}_{name}_ms": 10.0 / speed for q in ("p50", "p99") for name in ("ttft", "itl")}
        bench = {"request_throughput": speed, "output_throughput": 1024 * speed, "completed": 4}
        bench |= times | {"mean_tpot_ms": 8.0 / speed}
        return {"bench": bench, "server": {"most_running": 4, "preemptions": 0}, "run": 0}

    servers = {
        name: {"settings": {text: measured(speed) for text in SETTINGS}, "pool": {"tokens": 90000}}
        for name, speed in speeds.items()
    }
    model = {"name": "llama-3.1-8b", **SHAPES["llama-3.1-8b"].as_dict()}
    run = {"gpu": gpu, "date": "2026-01-01", "commit": "abc", "command": "c"}
    settings = {"flags": ["--max-num-seqs", "256"], "seed": 0}
    head = {"about": about(gpu), "model": model, "settings": settings}
    return {**head, "runs": [run], "servers": servers}


def evaluated(kept: dict[str, float], **facts: Any) -> dict[str, Any]:
    """A file of `vllm-kvx evaluate`: the share that each policy kept."""

    def cell(policy: str, share: float) -> dict[str, Any]:
        of_full = [share, share - 0.1, share + 0.1]
        score = [share / 2, 0.0, 1.0]
        both = {"policy": policy, "task": "all", "length": "all", "n": 40}
        return both | {"score": score, "of_full": of_full}

    cells = [cell("full", 1.0), *(cell(policy, share) for policy, share in kept.items())]
    return {"about": about(), "model": "small", "tasks": [], "cells": cells, **facts}


def tuned(cutoff: int, share: float, yardstick: str = "full (original)") -> dict[str, Any]:
    """A file of `benchmarks.tuning.sweep` with one cutoff of a model of 20 layers."""
    report = evaluated({f"speed-{cutoff}": share}, original="small", yardstick=yardstick)
    report["cells"][0]["policy"] = yardstick
    data = {"data": {"tokens": 2_000_000}, "training": {"epochs": 1.5}, "layers": 20}
    return {"about": about(), "cutoffs": {str(cutoff): {"record": data, "report": report}}}


def compared(engines: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A file of `benchmarks.engine.compare`: medians by engine and case."""
    cases = {
        name: {
            "cases": {case: {"median": median} for case, median in medians.items()},
            "pool": {"tokens": 9},
        }
        for name, medians in engines.items()
    }
    settings = {"engine": {"dtype": "bfloat16"}, "tokens": 129, "steps": 64}
    model = {"name": "llama-3.1-8b", **SHAPES["llama-3.1-8b"].as_dict()}
    run = {"gpu": "NVIDIA H200, 1", "date": "2026-01-01", "commit": "abc", "command": "c"}
    content = {"about": about("NVIDIA H200, 1"), "model": model, "settings": settings}
    content |= {"runs": [run], "engines": cases}
    derive(content, SHAPES["llama-3.1-8b"])
    return content


def searched(rates: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A file of `benchmarks.serving.within`: by server and setting the share within the limits."""

    def measured(share: float) -> dict[str, Any]:
        verdict = {"share": share, "missed_ttft": 1 - share, "missed_tpot": 0.0}
        bench = {"p90_ttft_ms": 1500.0, "p90_tpot_ms": 21.0, "completed": 16}
        return {"bench": bench, "within": verdict | {"held": share >= 0.9}, "run": 0}

    content = loaded({})
    content["settings"]["within"] = {"ttft": 2000.0, "tpot": 30.0, "share": 0.9, "seconds": None}
    content["servers"] = {
        name: {"settings": {f"16x8192/1024@{rate}": measured(s) for rate, s in of.items()}}
        for name, of in rates.items()
    }
    return content
