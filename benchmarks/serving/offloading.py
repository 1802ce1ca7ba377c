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
import re
import shlex
import statistics
import sys
import time
import urllib.request
from typing import Any

from benchmarks.common.about import about, command_line, gpu
from benchmarks.common.names import STOCK
from benchmarks.common.server import cpu_environment, serving
from benchmarks.serving.client import MODEL, VLLM, environment, get
from benchmarks.serving.first_tokens import (
    add_options,
    first_two,
    measure_all,
    median,
    prompt_bytes,
    prompt_of,
)
from benchmarks.serving.load import check_names, own_flags
from vllm_kvx.tools.ideal.shape import Shape

_GIVEN = re.compile(r"^vllm:external_prefix_cache_hits_total\S* (\S+)", re.M)
# Without it a server has no /reset_prefix_cache.
_DEVELOPER = "VLLM_SERVER_DEV_MODE"
# How long a server may need to be done with what it copies.
_COPIED_S = 60.0
# A prompt of which blocks are still on their way to the CPU's memory would wait for them.
_REST_S = 1.0


def main(argv: list[str]) -> None:
    """Runs the command line and writes the result."""
    args = parse_args(argv)
    what = "Time to the first token: new, cached on the GPU, and offloaded to the CPU's memory."
    head = about(what, command_line("benchmarks.serving.offloading", argv), args.commit)
    env = environment() | ({} if gpu() else cpu_environment()) | {_DEVELOPER: "1"}

    def of(server: str, shape: Shape, model: dict[str, Any]) -> list[dict[str, Any]]:
        log = args.output.with_name(f"{args.output.stem}-{server}.log")
        with serving(flags_of(server, model, args), log, env, args.start, VLLM) as url:
            return [measure(url, length, shape, args) for length in args.lengths]

    measure_all(args, head, "servers", args.servers, of)


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
        prompt = prompt_of(args, length, number, shape)
        for kind in times:
            if kind == "offloaded":
                time.sleep(_REST_S)
                _empty_cache(url)
            before, begin = _given(url), time.perf_counter()
            first, _ = first_two(url, {"prompt": prompt}, args.tokens)
            if number < 0:
                continue
            times[kind].append(first - begin)
            if kind == "offloaded":
                given.append(_given(url) - before)
    return {
        "prompt_tokens": length,
        **{f"{kind}_s": median(seconds) for kind, seconds in times.items()},
        "given_tokens": statistics.median(given),
        "prompt_bytes": prompt_bytes(args, length, shape),
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
    add("--servers", nargs="+", default=[STOCK, "full", "fier-2048"], help="stock, or policies")
    add("--offload", type=float, default=64.0, metavar="GIB", help="--kv-offloading-size")
    add_options(parser, [8192, 32768, 120000], "a server")
    args = parser.parse_args(argv)
    try:
        check_names(args.servers)
    except ValueError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
