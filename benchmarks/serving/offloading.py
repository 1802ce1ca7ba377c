"""The first token of a prompt that is new, that the GPU has cached, and that the CPU's memory has.

    python -m benchmarks.serving.offloading --servers stock fier-2048 --output offloading.json

Each server runs with prefix caching and `--kv-offloading-size`. For each length and repetition a
fresh random prompt is asked three times: new, again at once, and again when the GPU's prefix cache
was emptied (`POST /reset_prefix_cache`), so that its blocks come from the connector. Beside the
times stand how many tokens the connector gave by vLLM's own metrics, and the bytes that the
prompt's keys and values take: what the copy would take at a bus's rate is the ideal of the third.
Without a GPU name another connector by `--server-args`, and `--offload 0`.
"""

import argparse
import json
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line, gpu
from benchmarks.common.files import write_json
from benchmarks.common.names import STOCK
from benchmarks.common.server import cpu_environment, serving
from benchmarks.common.word_tokenizer import write_tokenizer
from benchmarks.engine.compare import prepare_model
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving.client import MODEL, VLLM, environment, get
from benchmarks.serving.first_tokens import first_two, median
from benchmarks.serving.load import own_flags
from vllm_kvx.tools.ideal.shape import Shape

_GIVEN = re.compile(r"^vllm:external_prefix_cache_hits_total\S* (\S+)", re.M)
# How long a server may need to be done with what it copies.
_COPIED_S = 60.0


def main(argv: list[str]) -> None:
    """Runs the command line and writes the result."""
    args = parse_args(argv)
    what = "Time to the first token: new, cached on the GPU, and offloaded to the CPU's memory."
    result: dict[str, Any] = {
        "about": about(what, command_line("benchmarks.serving.offloading", argv), args.commit),
        "model": args.model,
        "servers": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        shape, model = prepare_model(args.model, Path(folder))
        if "load_format" in model:
            write_tokenizer(Path(folder), shape.vocab)
        for server in args.servers:
            with serving(
                flags_of(server, model, args),
                args.output.with_name(f"{args.output.stem}-{server}.log"),
                environment() | ({} if gpu() else cpu_environment()) | {_DEVELOPER: "1"},
                args.start,
                VLLM,
            ) as url:
                found = [measure(url, length, shape, args) for length in args.lengths]
            result["servers"][server] = found
            print(server, json.dumps(found), flush=True)
            write_json(args.output, result)


# Without it a server has no /reset_prefix_cache.
_DEVELOPER = "VLLM_SERVER_DEV_MODE"


def flags_of(server: str, model: dict[str, Any], args: argparse.Namespace) -> list[str]:
    offload = ("--kv-offloading-size", f"{args.offload:g}") if args.offload else ()
    return [
        *(model["model"], "--served-model-name", MODEL),
        *("--max-model-len", str(max(args.lengths) + args.tokens)),
        *("--max-num-batched-tokens", "8192", "--enable-prefix-caching", *offload),
        *shlex.split(args.server_args),
        *(("--load-format", model["load_format"]) if "load_format" in model else ()),
        *([] if server == STOCK else own_flags(server)),
    ]


def measure(url: str, length: int, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one prompt length, in seconds."""
    times: dict[str, list[float]] = {"new": [], "cached": [], "offloaded": []}
    given: list[float] = []
    # The first one compiles what is left to compile.
    for number in range(-1, args.repeats):
        draw = random.Random(f"{args.seed} {length} {number}")
        prompt = [draw.randrange(100, shape.vocab - 100) for _ in range(length)]
        for kind in times:
            if kind == "offloaded":
                _empty_cache(url)
            before, begin = _given(url), time.perf_counter()
            first, _ = first_two(url, {"prompt": prompt}, args.tokens)
            if number < 0:
                continue
            times[kind].append(first - begin)
            if kind == "offloaded":
                given.append(_given(url) - before)
    entry = 2 * shape.layers * shape.kv_heads * shape.head_dim * args.entry_bytes
    return {
        "prompt_tokens": length,
        **{f"{kind}_s": median(seconds) for kind, seconds in times.items()},
        "given_tokens": statistics.median(given),
        "prompt_bytes": entry * length,
    }


def _given(url: str) -> float:
    """Tokens that the connector has given so far; metrics say so a moment later."""
    time.sleep(0.3)
    return sum(map(float, _GIVEN.findall(get(f"{url}/metrics"))))


def _empty_cache(url: str) -> None:
    """Forgets what is cached on the GPU; blocks that are still being copied keep it from that."""
    asked = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    end = time.monotonic() + _COPIED_S
    while time.monotonic() < end:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            if json.loads(answer.read())["success"]:
                return
        time.sleep(0.2)
    raise SystemExit(f"{url} has not emptied its prefix cache in {_COPIED_S:g} s")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving.offloading", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help=f"{', '.join(SHAPES)} (dummy weights), or a folder")
    add("--servers", nargs="+", default=[STOCK, "full", "fier-2048"], help="stock, or policies")
    add("--lengths", nargs="+", type=int, default=[8192, 32768, 120000])
    add("--repeats", type=int, default=5)
    add("--tokens", type=int, default=8, help="room for each answer")
    add("--offload", type=float, default=64.0, metavar="GIB", help="--kv-offloading-size")
    add("--entry-bytes", type=int, default=2, help="of a number in the KV cache")
    add("--seed", type=int, default=0)
    add("--start", type=float, default=400.0, help="seconds for a server to be up")
    add("--server-args", default="", help="further flags of vllm serve, in one string")
    add("--output", type=Path, required=True)
    add("--commit", help="what is measured, where the tree is no git checkout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
