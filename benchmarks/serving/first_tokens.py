"""When servers' first tokens are there, as a client sees it: what its benchmarks share."""

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.files import write_json
from benchmarks.common.word_tokenizer import write_tokenizer
from benchmarks.engine.compare import prepare_model
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving.client import MODEL
from vllm_kvx.tools.ideal.shape import Shape

# Of a server's name, its shape and how vLLM is given the model: figures of each length.
Measure = Callable[[str, Shape, dict[str, Any]], list[dict[str, Any]]]


def add_options(parser: argparse.ArgumentParser, lengths: list[int], up: str) -> None:
    """What all take. lengths: of prompts, by default. up: what has to be up in `--start`."""
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help=f"{', '.join(SHAPES)} (dummy weights), or a folder")
    add("--lengths", nargs="+", type=int, default=lengths)
    add("--repeats", type=int, default=5)
    add("--tokens", type=int, default=8, help="room for each answer")
    add("--entry-bytes", type=int, default=2, help="of a number in the KV cache")
    add("--seed", type=int, default=0)
    add("--start", type=float, default=400.0, help=f"seconds for {up} to be up")
    add("--server-args", default="", help="further flags of vllm serve, in one string")
    add("--output", type=Path, required=True)
    add("--commit", help="what is measured, where the tree is no git checkout")


def measure_all(
    args: argparse.Namespace, head: dict[str, Any], key: str, names: Iterable[str], measure: Measure
) -> None:
    """Measures one server after another, and rewrites `--output` after each.

    head: the file's ``about``. key: under which the file has the figures, by name.
    """
    result: dict[str, Any] = {"about": head, "model": args.model, key: {}}
    with tempfile.TemporaryDirectory() as folder:
        shape, model = prepare_model(args.model, Path(folder))
        if "load_format" in model:
            write_tokenizer(Path(folder), shape.vocab)
        for name in names:
            found = measure(name, shape, model)
            result[key][name] = found
            print(name, json.dumps(found), flush=True)
            write_json(args.output, result)


def prompt_of(args: argparse.Namespace, length: int, number: int, shape: Shape) -> list[int]:
    """Random token ids, others for each length and number."""
    draw = random.Random(f"{args.seed} {length} {number}")
    return [draw.randrange(100, shape.vocab - 100) for _ in range(length)]


def prompt_bytes(args: argparse.Namespace, length: int, shape: Shape) -> int:
    """What a prompt's keys and values take."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * args.entry_bytes * length


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
