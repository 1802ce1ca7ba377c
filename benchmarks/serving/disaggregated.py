"""A server that prefills and one that decodes, which fetches the prompt's KV over NIXL.

    python -m benchmarks.serving.disaggregated --policies full snapkv:kv_rate=0.2 --output pair.json

Each policy has two servers of its own, on the first two GPUs that are visible (without any, on
CPU). For each length, fresh random prompts: the time to the first token from the second server
alone, and from both, and how many bytes it fetched by its own metrics, beside what the prompt's
keys and values take. Under a policy that retains, the first token is that of the server that
prefills; the second one is the first that is computed from what was fetched.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.names import STOCK
from benchmarks.common.nixl import NIXL, PORT, PREFILL
from benchmarks.common.server import cpu_environment, free_port, serving
from benchmarks.serving.client import MODEL, VLLM, environment
from benchmarks.serving.first_tokens import (
    add_options,
    first_two,
    measure_all,
    median,
    prompt_bytes,
    prompt_of,
    request,
)
from benchmarks.serving.load import own_flags
from vllm_kvx.tools.ideal.shape import Shape

_TRANSFER = "kv_transfer_params"
_BYTES = re.compile(r"^vllm:nixl_bytes_transferred_sum\S* (\S+)", re.M)


def main(argv: list[str]) -> None:
    """Runs the command line and writes the result."""
    args = parse_args(argv)
    what = "Time to the first token from one server, and from two, one of which prefills."
    head = about(what, command_line("benchmarks.serving.disaggregated", argv), args.commit)

    def measure(policy: str, shape: Shape, model: dict[str, Any]) -> list[dict[str, Any]]:
        with _pair(policy, model, args) as urls:
            return [_measure(urls, length, shape, args) for length in args.lengths]

    measure_all(args, head, "policies", args.policies, measure)


@contextlib.contextmanager
def _pair(policy: str, model: dict[str, Any], args: argparse.Namespace) -> Iterator[list[str]]:
    """The addresses of a server that prefills and of one that decodes."""
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    flags = [
        *(model["model"], "--served-model-name", MODEL),
        *("--max-model-len", str(max(args.lengths) + args.tokens), "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(NIXL), *shlex.split(args.server_args)),
        *(("--load-format", model["load_format"]) if "load_format" in model else ()),
        *([] if policy == STOCK else own_flags(policy)),
    ]

    def start(number: int) -> str:
        own = {PORT: str(free_port())}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = gpus[number]
        env = environment() | ({} if gpus else cpu_environment()) | own
        log = args.output.with_name(f"{args.output.stem}-{policy}-{number}.log")
        return stack.enter_context(serving(flags, log, env, args.start, VLLM))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        yield list(threads.map(start, range(2)))


def _measure(
    urls: list[str], length: int, shape: Shape, args: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one prompt length; seconds are medians, spreads the lowest and the highest."""
    prefill, decode = urls
    # Times to the first two tokens.
    alone: list[tuple[float, ...]] = []
    both: list[tuple[float, ...]] = []
    handed: list[float] = []
    fetched: list[float] = []
    # The first one connects the two, and compiles what is left to compile.
    for number in range(-1, args.repeats):
        prompt = prompt_of(args, length, number, shape)
        before = _fetched(decode)
        begin = time.perf_counter()
        asked = _post(prefill, {"prompt": prompt, "max_tokens": 1, _TRANSFER: PREFILL})
        filled = time.perf_counter()
        body = {"prompt": prompt, _TRANSFER: asked[_TRANSFER]}
        first, second = first_two(decode, body, args.tokens)
        fetched_now = _fetched(decode) - before
        own = time.perf_counter()
        times = first_two(decode, {"prompt": prompt}, args.tokens)
        if number >= 0:
            alone.append(tuple(each - own for each in times))
            both.append((first - begin, second - begin))
            handed.append(first - filled)
            fetched.append(fetched_now)
    return {
        "prompt_tokens": length,
        "alone_s": median([first for first, _ in alone]),
        "both_s": median([first for first, _ in both]),
        "alone_second_s": median([second for _, second in alone]),
        "both_second_s": median([second for _, second in both]),
        "handed_over_s": median(handed),
        "fetched_bytes": statistics.median(fetched),
        "prompt_bytes": prompt_bytes(args, length, shape),
    }


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(request(url, body), timeout=300) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def _fetched(url: str) -> float:
    """Bytes that a server has fetched so far; its metrics say so a moment later."""
    time.sleep(0.3)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return sum(map(float, _BYTES.findall(answer.read().decode())))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving.disaggregated", description=(__doc__ or "").split("\n")[0]
    )
    policies = [STOCK, "full", "fier-2048", "snapkv:kv_rate=0.2"]
    parser.add_argument("--policies", nargs="+", default=policies)
    add_options(parser, [8192, 32768], "both servers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
