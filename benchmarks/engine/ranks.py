"""Where a decode step goes, by part, on one GPU and on several as one, with policies and without.

    python -m benchmarks.engine.ranks --model llama-3.1-8b --ranks 1 2 --servers stock fier-2048 \\
        --layout snapkv --cases 1x130000 1x130000@snapkv --out NAME.json

A case is REQUESTSxTOKENS that decode at once, and maybe @ and the policy that they ask for, for
which --layout makes room; stock runs it without. Servers run as `vllm serve` has them, with a
process for the scheduler and, from two ranks on, one for each rank. `step_ms` is of steps without
a profiler. Then vLLM's own records some on every rank (`common.step_parts`), each rank's kernels by
part, its pauses, and how long ranks wait for each other in collectives. A profiler slows the host
and graphs down: times of kernels count, pauses are more than without it, and `idle_ms`, what the
device's own time leaves of `step_ms`, is fair. `gain` is stock's step over the policy's, at as many
ranks. The scheduler's process is not recorded: `benchmarks.engine.host_time` times it.

The file is written again after each server, and a run that finds it goes on with those that it
lacks; the exit status is 1 while there are such.

On a CPU: --dtype float32 --enforce-eager --engine-args '{"block_size": 32}', which shows the host's
parts alone.
"""

import argparse
import gzip
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, check_plugin, command_line, gpu
from benchmarks.common.decode_steps import PROFILED, WARM, Decoding
from benchmarks.common.files import write_json
from benchmarks.common.names import STOCK, served, split_name
from benchmarks.common.step_marks import EXTENSION
from benchmarks.common.step_parts import Steps, of_rank, waits_of
from benchmarks.engine.compare import engine_options, prepare_model
from benchmarks.engine.ideal import Case
from benchmarks.engine.shapes import SHAPES
from vllm_kvx.policy.cache_dtype import cache_options
from vllm_kvx.tools.engine import last_line, on_cpu, prepare_environment

# Of `--steps` each; the median counts.
SAMPLES = 3
# Steps with the profiler that do not count: it sets up what it does once for every graph.
SETTLE = 2
# The scheduler goes on while this process asks for a profile.
AHEAD = 256
# What servers of one file have in common.
SAME = ("gpu", "model", "engine", "layout", "steps")
# Whose version counts besides: with it vLLM may fuse all-reduces and norms.
PACKAGES = ("flashinfer",)


def options_of(args: argparse.Namespace, server: str, ranks: int, folder: str) -> dict[str, Any]:
    """What a server is started with, but for its model. folder: of its traces."""
    policy, dtype = split_name(server)
    options = dict(args.engine)
    if policy is not None:
        layout = [served(name) for name in args.layout]
        options["additional_config"] = {"kv_policy": served(policy), "kv_layout": layout}
    if dtype is not None:
        options |= cache_options(dtype)
    if ranks > 1:
        options["tensor_parallel_size"] = ranks
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return {**options, "profiler_config": profiler, "worker_extension_cls": EXTENSION}


def traces_of(folder: Path, prefix: str) -> list[list[dict[str, Any]]]:
    """Every rank's events, in the order of ranks."""
    found = {}
    for path in folder.glob(f"{prefix}_*.pt.trace.json*"):
        rank = re.search(r"_rank(\d+)\.", path.name)
        if rank is not None:
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".gz" else content
            found[int(rank[1])] = json.loads(text.decode(errors="replace"))["traceEvents"]
    return [found[rank] for rank in sorted(found)]


def measure(
    llm: Any, args: argparse.Namespace, case: Case, folder: Path, name: str
) -> dict[str, Any]:
    """A case's figures on a server, by step. name: of its traces in `folder`."""
    import numpy as np

    prompts = [
        np.random.default_rng((args.seed, case.length, index))
        .integers(0, args.vocab, case.length)
        .tolist()
        for index in range(case.batch or 1)
    ]
    extra_args = {"kv_policy": served(case.policy)} if case.policy else None
    most = most_tokens(args.steps)
    decoding = Decoding(llm, prompts, most, extra_args)
    times = [decoding.run(args.steps)[0] * 1e3 / args.steps for _ in range(SAMPLES)]
    step_ms = statistics.median(times)
    llm.collective_rpc("mark_step_parts")
    llm.start_profile(name, max_iterations=SETTLE + PROFILED)
    decoding.run(SETTLE + PROFILED + 2)
    llm.stop_profile()
    llm.collective_rpc("unmark_step_parts")
    decoding.end()
    ranks = [Steps.of(events, SETTLE) for events in traces_of(folder, name)]
    if not ranks:
        raise RuntimeError(f"vLLM's profiler left no trace in {folder}")
    figures = [of_rank(rank) for rank in ranks]
    for each in figures:
        if each["device_busy_ms"] is not None:
            each["idle_ms"] = round(step_ms - each["device_busy_ms"], 4)
    return {
        "step_ms": round(step_ms, 4),
        "samples_ms": [round(each, 4) for each in times],
        "waits": (waits_of(ranks) or None) if len(ranks) > 1 else None,
        "ranks": figures,
    }


def resolved(config: Any) -> dict[str, Any]:
    """What vLLM made of the settings that say how a step runs. config: its ``VllmConfig``."""
    compilation = config.compilation_config
    return {
        "cudagraph_mode": str(compilation.cudagraph_mode).rpartition(".")[2],
        "fuse_allreduce_rms": bool(compilation.pass_config.fuse_allreduce_rms),
        "custom_all_reduce": not config.parallel_config.disable_custom_all_reduce,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "block_size": config.cache_config.block_size,
    }


def most_tokens(steps: int) -> int:
    """Tokens that a request may get."""
    return WARM + SAMPLES * steps + SETTLE + PROFILED + AHEAD


def run(args: argparse.Namespace, server: str, ranks: int) -> dict[str, Any]:
    """A server's figures, by case."""
    with tempfile.TemporaryDirectory() as folder:
        _, model = prepare_model(args.model, Path(folder))
        if server != STOCK:
            check_plugin()
        from vllm import LLM

        began = time.monotonic()
        llm = LLM(**model, **options_of(args, server, ranks, folder))
        entry: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1), "cases": {}}
        entry["resolved"] = resolved(llm.llm_engine.vllm_config)
        for text in args.cases:
            case = Case.parse(f"decode:{text}")
            if split_name(server)[0] is None:
                case, text = case.stock, text.partition("@")[0]
            if text not in entry["cases"]:
                name = f"case{len(entry['cases'])}"
                entry["cases"][text] = measure(llm, args, case, Path(folder), name)
        llm.llm_engine.engine_core.shutdown()
    return entry


def run_alone(args: argparse.Namespace, server: str, ranks: int) -> dict[str, Any]:
    """The same in a process of its own, whose end frees the devices' memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, args, server, ranks).result()


def add_gains(servers: dict[str, dict[str, Any]]) -> None:
    """Stock's step over each policy's, at as many ranks, wherever both were measured."""
    for server, by_ranks in servers.items():
        for ranks, entry in by_ranks.items():
            stock = servers.get(STOCK, {}).get(ranks, {}).get("cases", {})
            for text, row in entry.get("cases", {}).items():
                base = stock.get(text.partition("@")[0])
                if base and server != STOCK:
                    row["gain"] = round(base["step_ms"] / row["step_ms"], 4)


def told(row: dict[str, Any]) -> dict[str, Any]:
    """What is printed of a case."""
    return {
        "step_ms": row["step_ms"],
        "gain": row.get("gain"),
        "busy_ms": [rank["device_busy_ms"] for rank in row["ranks"]],
        "parts": {part: of["ms"] for part, of in row["ranks"][0].get("parts", {}).items()},
        "pauses": row["ranks"][0].get("pauses"),
        "waits": row["waits"],
    }


def go_on(args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Takes over what --out has of an earlier run; raises SystemExit if that was another's."""
    if not args.out.exists():
        return
    earlier = json.loads(args.out.read_text(encoding="utf-8"))
    if any(earlier[key] != content[key] for key in SAME):
        raise SystemExit(f"{args.out} was made with other settings: name another --out")
    for server, by_ranks in earlier["servers"].items():
        content["servers"].setdefault(server, {}).update(by_ranks)


def has_all(entry: Mapping[str, Any], server: str, cases: Sequence[str]) -> bool:
    """Whether a server's entry has every case; stock's are without a policy."""
    stock = split_name(server)[0] is None
    wanted = {text.partition("@")[0] if stock else text for text in cases}
    return wanted <= entry.get("cases", {}).keys()


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.engine.ranks")
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(SHAPES)} (dummy weights), or a checkpoint")
    add("--ranks", nargs="+", type=int, default=[1, 2], help="tensor_parallel_size, one by one")
    add("--servers", nargs="+", required=True, help=f"{STOCK}, or policies; @fp8: such a cache")
    add("--cases", nargs="+", default=["1x130000"], help="REQUESTSxTOKENS, maybe @ and a policy")
    add("--layout", nargs="+", default=[], help="policies that servers with one make room for, too")
    add("--steps", type=int, default=64, help="of each of the samples without a profiler")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=int, help="default: the model's, at most 131072")
    add("--max-num-batched-tokens", type=int, default=8192, help="prefill chunk")
    add("--enforce-eager", action="store_true")
    add("--engine-args", type=json.loads, default={}, help="JSON: further arguments of vllm.LLM")
    add("--time-limit", type=float, help="seconds; a server that would last longer is left out")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.steps < 1 or min(args.ranks) < 1:
        parser.error("--steps and --ranks must be at least 1")
    try:
        for server in args.servers:
            split_name(server)
    except ValueError as error:
        parser.error(str(error))
    for text in args.cases:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(@.+)?", text):
            parser.error(f"--cases {text}: write REQUESTSxTOKENS, maybe @ and a policy: 1x130000")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    prepare_environment()
    began, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        shape, model = prepare_model(args.model, Path(folder))
    args.engine, args.vocab = engine_options(args, shape), shape.vocab
    room, most = args.engine["max_model_len"], most_tokens(args.steps)
    for text in args.cases:
        if (length := Case.parse(f"decode:{text}").length) + most > room:
            raise SystemExit(
                f"--cases {text}: {length} tokens and {most} more exceed {room}: "
                "shorten the prompt, or give fewer --steps or a larger --max-model-len"
            )
    info = {"name": args.model, "dummy_weights": "load_format" in model, **shape.as_dict()}
    what = f"Where decode steps go on {Path(args.model).name}, by part, server and number of ranks."
    content: dict[str, Any] = {
        "about": about(what, command_line("benchmarks.engine.ranks", argv), args.commit, PACKAGES),
        "gpu": None if on_cpu() else gpu(),
        "model": info,
        "engine": args.engine,
        "layout": args.layout,
        "steps": args.steps,
        "servers": {server: {} for server in args.servers},
    }
    go_on(args, content)
    well = True
    for ranks in args.ranks:
        for server in args.servers:
            before = content["servers"][server].get(str(ranks), {})
            if has_all(before, server, args.cases):
                print(f"{server}, {ranks} ranks: measured before", flush=True)
                continue
            entry: dict[str, Any] = {}
            start = time.monotonic()
            if args.time_limit and start - began + longest > args.time_limit:
                entry["left_out"] = "--time-limit"
            else:
                try:
                    entry = run_alone(args, server, ranks)
                except Exception as error:  # the other servers' figures stay
                    entry["error"] = last_line(error)
            longest = max(longest, time.monotonic() - start)
            if known := before.get("cases", {}) | entry.get("cases", {}):
                entry["cases"] = known
            content["servers"][server][str(ranks)] = entry
            add_gains(content["servers"])
            write_json(args.out, content)
            for text, row in entry.get("cases", {}).items():
                print(f"{server}, {ranks} ranks, {text}: {told(row)}", flush=True)
            if not has_all(entry, server, args.cases):
                well = False
                why = {key: entry[key] for key in ("error", "left_out") if key in entry}
                print(f"{server}, {ranks} ranks: {why}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
