"""When a server's first tokens are there, as a client sees it."""

import json
import statistics
import time
import urllib.request
from typing import Any

from benchmarks.serving.client import MODEL


def request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    """A completion, greedy, which no end of text ends."""
    data = {"model": MODEL, "temperature": 0, "ignore_eos": True, **body}
    return urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(data).encode(),
        {"Content-Type": "application/json"},
    )


def first_two(url: str, body: dict[str, Any], tokens: int) -> tuple[float, float]:
    """When the first token is there, and the second one; then it ends the request.

    tokens: that are asked for, two or more. Seconds of ``time.perf_counter``.
    """
    asked = request(url, {**body, "max_tokens": tokens, "stream": True})
    times: list[float] = []
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            if len(times) == 2:
                return times[0], times[1]
    raise SystemExit(f"{url} answered {len(times)} tokens: ask for two or more (--tokens)")


def median(seconds: list[float]) -> dict[str, Any]:
    """Of several times in seconds, with the lowest and the highest."""
    return {
        "median": round(statistics.median(seconds), 4),
        "spread": [round(min(seconds), 4), round(max(seconds), 4)],
    }
