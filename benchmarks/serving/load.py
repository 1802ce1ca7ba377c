"""Servers under load: `vllm serve` with each policy, asked by vLLM's own `vllm bench serve`.

    python -m benchmarks.serving --model llama-3.1-8b --out serving.json \\
        --servers stock stock@fp8 fastkv:tsp_layer=15 --settings 256x8192/1024@inf 64x8192/1024@1
    python -m benchmarks.serving --model llama-3.1-8b --out serving.json --preset 32k \\
        --servers stock fastkv:tsp_layer=15

A server is `stock` or a policy, and maybe `@` and a KV cache dtype. Each is started once and runs
every setting: prompts x input / output tokens @ load, which is `inf` (all at once), requests/s
(Poisson), or `c8` (8 users). Prompts are vLLM's random ones of `--seed`, the same for all servers.
With `--layout POLICY...` a server with a policy has room for these, too, and runs every setting
once more for each of them, which its requests then name: several policies for one start.

The file is rewritten after every setting. What it has without an error is not measured again, so
the same command goes on where it was stopped. In it: what `vllm bench serve` wrote, the most
requests that ran at once and preemptions by the server's metrics, and its pool by its log.

A shape of random weights gets a tokenizer of as many words as it has tokens: a prompt's text is
tokenised to the very tokens that it was made of.
"""

import argparse
import contextlib
import json
import shlex
import signal
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, check_plugin, command_line, gpu
from benchmarks.common.files import write_json
from benchmarks.common.names import STOCK, file_name, served, split_name
from benchmarks.common.server import ServerError, serving
from benchmarks.common.word_tokenizer import write_tokenizer
from benchmarks.engine.compare import prepare_model
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving.client import MODEL, VLLM, bench, environment, get, wait_until_idle
from benchmarks.serving.figures import PRESETS, Setting, figures, is_whole, pool_of_log
from vllm_kvx.tools.ideal.shape import Shape

_START_S = 400.0
# In less no server is up and has measured anything.
_LEAST_S = 60.0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--settings", nargs="+", default=[], help="PROMPTSxINPUT/OUTPUT@LOAD, 64x8192/1024@1.5")
    add("--preset", nargs="+", choices=PRESETS, default=[], help="settings by name")
    add("--setting-limit", type=float, default=420, help="seconds for one setting")
    add_server_options(parser)
    args = parser.parse_args(argv)
    texts = [*args.settings, *(text for name in args.preset for text in PRESETS[name])]
    try:
        args.settings = list(dict.fromkeys(Setting.parse(text) for text in texts))
        check_names([*args.servers, *args.layout])
    except ValueError as error:
        parser.error(str(error))
    if not args.settings:
        parser.error("give --settings or --preset")
    return args


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """What servers there are, with which flags, and where their results go."""
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(SHAPES)} (dummy weights), or a checkpoint")
    add("--servers", nargs="+", required=True, help=f"{STOCK}, policies; @fp8: with such a cache")
    add("--layout", nargs="+", default=[], help="policies that servers with one are asked for, too")
    add("--out", type=Path, required=True, help="results; what it has is not measured again")
    add("--logs", type=Path, help="folder of the servers' and clients' logs; default: beside --out")
    add("--seed", type=int, default=0)
    add("--time-limit", type=float, help="seconds, after which the server is stopped")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--dtype", default="bfloat16")
    add("--max-num-batched-tokens", type=int, default=8192, help="prefill chunk")
    add("--max-num-seqs", type=int, default=256)
    add("--max-model-len", type=int, help="default: the model's, at most 131072")
    add("--server-args", default="", metavar="FLAGS", help="further flags of vllm serve, quoted")


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a server or a policy of the layout whose name is none."""
    for name in names:
        policy, _ = split_name(name)
        if policy is not None:
            served(policy)


def common_flags(args: argparse.Namespace, shape: Shape, dummy: bool) -> list[str]:
    """The flags of every server of this run, without the model."""
    return [
        *(["--load-format", "dummy"] if dummy else []),
        *("--dtype", args.dtype),
        *("--seed", str(args.seed)),
        *("--max-model-len", str(args.max_model_len or min(131072, shape.max_position))),
        *("--max-num-batched-tokens", str(args.max_num_batched_tokens)),
        *("--max-num-seqs", str(args.max_num_seqs)),
        "--no-enable-prefix-caching",
        *shlex.split(args.server_args),
    ]


def own_flags(name: str, layout: Sequence[str] = ()) -> list[str]:
    """The flags that tell one server from the others."""
    policy, dtype = split_name(name)
    flags = ["--kv-policy", served(policy)] if policy else []
    if policy and layout:
        room = {"kv_layout": list(map(served, layout))}
        flags += ["--additional-config", json.dumps(room)]
    return [*flags, "--kv-cache-dtype", dtype] if dtype else flags


def asked_of(name: str, layout: Sequence[str]) -> dict[str, str | None]:
    """What a server's requests name, by the name of the results: None for the server's own."""
    policy, dtype = split_name(name)
    others = {f"{each}@{dtype}" if dtype else each: each for each in layout if policy}
    return {name: None, **others}


def pool(url: str, log: Path) -> dict[str, Any]:
    """The KV pool by vLLM's log and, under a policy, by what vllm-kvx says of it."""
    found = pool_of_log(log.read_text(errors="replace"))
    with contextlib.suppress(urllib.error.HTTPError):
        layout = json.loads(get(f"{url}/v1/kv_policy"))["layout"]
        wanted = ("num_blocks", "pool_prompt_tokens", "stock_pool_tokens")
        found.update({key: layout[key] for key in wanted if key in layout})
    return found


class Results:
    """The results file; rewritten on every change, so that a stopped run keeps what it measured."""

    def __init__(
        self,
        args: argparse.Namespace,
        argv: list[str],
        shape: Shape,
        dummy: bool,
        module: str = "benchmarks.serving",
        subject: str = "Servers with and without policies under load",
        **asked: Any,
    ):
        """asked: further settings, which a file has to have in common with all its runs."""
        self.path: Path = args.out
        self.shape = shape
        info = {"name": args.model if dummy else Path(args.model).name, "dummy_weights": dummy}
        model = {**info, **shape.as_dict()}
        settings = {"seed": args.seed, "flags": common_flags(args, shape, dummy), **asked}
        command = command_line(module, argv)
        name = f"{info['name']}{' with random weights' if dummy else ''}"
        what = f"{subject}, {name}."
        self.head = about(what, command, args.commit)
        self.content: dict[str, Any] = {"about": self.head, "model": model, "settings": settings}
        self.content.update(runs=[], servers={})
        machine = gpu()
        if self.path.exists():
            self.content = json.loads(self.path.read_text())
            if self.content["model"] != model or self.content["settings"] != settings:
                raise SystemExit(f"{self.path} has another model or other settings")
            if any(run["gpu"] != machine for run in self.content["runs"]):
                raise SystemExit(f"{self.path} was measured on another GPU or driver")
        self.run = {key: self.head[key] for key in ("command", "date", "commit")}
        self.run["gpu"] = machine
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def missing(self, name: str, settings: list[Setting]) -> list[Setting]:
        """The settings of a server that are not there, or failed."""
        there = self.content["servers"].get(name, {}).get("settings", {})
        return [s for s in settings if str(s) not in there or not is_whole(there[str(s)], s)]

    def add(self, name: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Adds facts of a server, and settings that it ran."""
        # Identity: a run of the same second is another one.
        if not any(run is self.run for run in self.content["runs"]):
            self.content["runs"].append(self.run)
            # A file's head is that of its last run.
            self.content["about"] = {**self.head, "what": self.content["about"]["what"]}
        entry = self.content["servers"].setdefault(name, {"settings": {}})
        run = len(self.content["runs"]) - 1
        entry.update(facts)
        entry["settings"].update({key: {**value, "run": run} for key, value in settings.items()})
        write_json(self.path, self.content)


def measure(args: argparse.Namespace, results: Results, name: str, model: str, end: float) -> bool:
    """Starts one server and runs what its results lack; whether all went well."""
    asked = asked_of(name, args.layout)
    # A setting of all policies before the next setting.
    wanted = [
        (label, setting)
        for setting in args.settings
        for label in asked
        if setting in results.missing(label, [setting])
    ]
    if not wanted:
        print(f"{name}: measured before", flush=True)
        return True
    well = True
    try:
        with up(args, results, name, model, end, f"{len(wanted)} settings") as (url, log):
            for index, (label, setting) in enumerate(wanted):
                left = end - time.monotonic()
                if left < 1:
                    print(f"{label}: no time left for {setting}", flush=True)
                    return False
                limit = min(args.setting_limit, left)
                policy = asked[label]
                first = index == 0
                found = bench(url, model, setting, args.seed, limit, log, policy, first)
                results.add(label, {"asked_of": name} if policy else {}, {str(setting): found})
                well &= is_whole(found, setting)
                print(f"{label} {setting}: {line_of(found)}", flush=True)
                if "error" in found:
                    wait_until_idle(url, end)
    except ServerError as error:
        print(f"{name}: {error}", flush=True)
        return False
    return well


@contextlib.contextmanager
def up(
    args: argparse.Namespace, results: Results, name: str, model: str, end: float, work: str
) -> Iterator[tuple[str, Path]]:
    """A server, whose facts the results get; yields its address and a file for its clients' logs.

    work: what it is started for, in words.

    Raises:
        ServerError: no time is left; or it did not come up, which the results say, too, as they do
            of one that is raised while it is up.
    """
    if time.monotonic() > end - _LEAST_S:
        raise ServerError("no time left")
    began = time.monotonic()
    logs = args.logs or results.path.parent
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{results.path.stem}.{file_name(name)}.log"
    flags = [*results.content["settings"]["flags"], *own_flags(name, args.layout)]
    arguments = [model, "--served-model-name", MODEL, *flags]
    start = min(_START_S, end - time.monotonic())
    print(f"{name}: starting, {work}", flush=True)
    try:
        with serving(arguments, log, environment(), start, VLLM) as url:
            seconds = round(time.monotonic() - began, 1)
            facts = {"start_s": seconds, "pool": pool(url, log)}
            if len(asked_of(name, args.layout)) > 1:
                facts["room_for"] = list(args.layout)
            results.add(name, {**facts, "error": None}, {})
            print(f"{name}: up after {seconds:.0f} s", flush=True)
            yield url, log.with_suffix(".bench.log")
    except ServerError as error:
        results.add(name, {"error": str(error).splitlines()[-20:]}, {})
        raise


def line_of(found: Mapping[str, Any]) -> str:
    """What was measured, for whoever watches."""
    if "error" in found:
        return f"ERROR {found['error'][0]}, {found['took_s']:.0f} s"
    numbers = figures(found)
    return (
        f"{numbers['requests_per_s']:.3f} requests/s, {numbers['output_tokens_per_s']:.1f} tok/s, "
        f"p50 TTFT {numbers['p50_ttft']:.0f} ms, p50 TPOT {numbers['p50_tpot']:.1f} ms, "
        f"{numbers['most_running']} at once, {found['took_s']:.0f} s"
    )


def run_servers(
    args: argparse.Namespace,
    results_of: Callable[[Shape, bool], Results],
    measure: Callable[[argparse.Namespace, Results, str, str, float], bool],
) -> int:
    """Measures every server of a command in turn; the exit status, 0 if all went well.

    results_of: takes the model's shape, and whether its weights are random.
    """
    end = time.monotonic() + (args.time_limit or float("inf"))
    if any(split_name(name)[0] for name in args.servers):
        check_plugin()
    # Ending by a signal must end the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        shape, options = prepare_model(args.model, Path(folder))
        dummy = "load_format" in options
        if dummy:
            write_tokenizer(Path(folder), shape.vocab)
        results = results_of(shape, dummy)
        well = [measure(args, results, name, options["model"], end) for name in args.servers]
    return 0 if all(well) else 1


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    return run_servers(args, lambda shape, dummy: Results(args, argv, shape, dummy), measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
