"""Host time of scheduler and worker per step, of stock vLLM and of policy servers, on a CPU.

    python -m benchmarks.engine.host_time --out benchmarks/results/engine/cpu-host-time.json

Every engine is a process of its own, and all are alive at once: they take turns of a few steps
each, so that other work on the machine shows in all of them. Times are CPU time of the engine's
thread, not wall time: what else runs here does not count, other than through the caches it empties.
A ratio is held against stock's in the same turn; the median over turns is reported, with its
quartiles. See ``host_time_engine`` for what is left out.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.common.names import STOCK
from benchmarks.engine.host_time_engine import serve, set_environment

# `REQUESTS@SERVER`: requests that name a policy of their own, on a server of another.
ENGINES = (
    STOCK,
    "full@speed-24",
    "full@snapkv:kv_rate=0.1",
    "speed-24",
    "fastkv:tsp_layer=15",
    "snapkv:kv_rate=0.1",
    "structkv:pivot=15",
    "fier-512:dense_below=0",
)
PARTS = ("schedule", "update", "worker")
LONG = 65536  # Tokens of the prompt that comes in beside the running requests.
PROMPT = 544  # And of theirs: above FIER's budget.

# By engine, its samples in turns.
Turns = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine.host_time", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--engines", nargs="+", default=list(ENGINES), help="stock, POLICY, REQUESTS@SERVER")
    add("--running", nargs="+", type=int, default=[1, 16, 64, 256], help="requests that decode")
    add("--turns", type=int, default=15)
    add("--steps", type=int, default=16, help="of each turn")
    add("--kv-gib", type=float, default=3.0, help="KV cache of each engine, which nobody touches")
    add("--label", default="after", help="under which the result file keeps this run")
    add("--commit", help="what is measured, where it is not this checkout")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if STOCK not in args.engines:
        parser.error(f"--engines: ratios need {STOCK}")
    if args.turns < 1 or args.steps < 1:
        parser.error("--turns and --steps must be at least 1")
    args.running = sorted(set(args.running))
    return args


def split_engine(name: str) -> tuple[str | None, str | None]:
    """The server's policy and that of its requests; None is stock's and the server's own."""
    requests, _, server = name.rpartition("@")
    return None if server == STOCK else server, requests or None


def total(sample: Mapping[str, Any]) -> float:
    """Microseconds of a step."""
    return sum(sample[part] for part in PARTS)


def figures(turns: Turns) -> dict[str, dict[str, Any]]:
    """By engine, medians in us over all steps, and the ratio to stock, turn by turn.

    turns: of every engine as many, none of them empty, stock's among them.
    """
    found = {}
    for name, of_engine in turns.items():
        samples = [sample for turn in of_engine for sample in turn]
        entry: dict[str, Any] = {"steps": len(samples)}
        for part in PARTS:
            entry[f"{part}_us"] = round(statistics.median(s[part] for s in samples), 1)
        totals = sorted(map(total, samples))
        entry["total_us"] = round(statistics.median(totals), 1)
        entry["quartiles_us"] = [round(quantile(totals, q), 1) for q in (0.25, 0.75)]
        entry["mean_us"] = round(statistics.fmean(totals), 1)
        entry["launches"] = round(statistics.fmean(s["launches"] for s in samples), 2)
        if name != STOCK:
            ratios = sorted(
                statistics.median(map(total, mine)) / statistics.median(map(total, stock))
                for mine, stock in zip(of_engine, turns[STOCK], strict=True)
            )
            entry["ratio"] = round(statistics.median(ratios), 3)
            entry["ratio_quartiles"] = [round(quantile(ratios, q), 3) for q in (0.25, 0.75)]
        found[name] = entry
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of these lie; ordered, and at least one."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(content: Mapping[str, Any]) -> str:
    """Ratios to stock of every run, by engine and case; stock's own time in us."""
    lines = []
    for label, run in content["runs"].items():
        cases = list(run["cases"])
        lines += [f"{label}: {run['commit']}", "", "| engine | " + " | ".join(cases) + " |"]
        lines.append("|---" * (len(cases) + 1) + "|")
        for name in run["cases"][cases[0]]:
            cells = [run["cases"][case][name] for case in cases]
            shown = [
                f"{c['ratio']:.2f}" if "ratio" in c else f"{c['total_us']:,.0f} us" for c in cells
            ]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


class Child:
    """An engine in a process of its own."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace) -> None:
        self.name = name
        server, self.requests = split_engine(name)
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        size = int(args.kv_gib * (1 << 30))
        what = theirs, str(folder), server, self.requests, max(args.running), size
        self._process = context.Process(target=serve, args=what, daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def ask(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            status, answer = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process ended") from None
        if status != "ok":
            raise SystemExit(f"{self.name}: {answer}")
        return answer

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join(timeout=60)


def measure(children: Sequence[Child], args: argparse.Namespace) -> dict[str, Any]:
    """By case, the figures of every engine."""
    cases: dict[str, Any] = {}
    for running in args.running:
        for child in children:
            child.ask("run", running, PROMPT)
        decodes: dict[str, list[Any]] = {child.name: [] for child in children}
        chunks: dict[str, list[Any]] = {child.name: [] for child in children}
        for turn in range(args.turns):
            # Whoever comes first finds the caches as others left them.
            for child in [*children[turn % len(children) :], *children[: turn % len(children)]]:
                decodes[child.name].append(child.ask("decode", args.steps))
        for turn in range(max(args.turns // 4, 1)):
            for child in children:
                steps = child.ask("chunks", LONG, 1000 * running + turn)
                between = [step for step in steps if step["kind"] == "between"]
                if not between:
                    raise SystemExit(f"{child.name}: the long prompt has no room; more --kv-gib")
                chunks[child.name].append(between)
        cases[f"{running} decode"] = figures(decodes)
        cases[f"{running} decode, chunk"] = figures(chunks)
        print(f"{running} running: measured", file=sys.stderr, flush=True)
    return cases


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    set_environment()
    content: dict[str, Any] = {"about": {}, "runs": {}}
    if args.out.exists():
        content = json.loads(args.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        children = [Child(name, Path(folder) / str(i), args) for i, name in enumerate(args.engines)]
        cases = measure(children, args)
        for child in children:
            child.end()
    head = about(
        "The host's time for a step, scheduler and worker, of stock vLLM and policies in turns.",
        command_line("benchmarks.engine.host_time", argv),
        args.commit,
    )
    head["device"] += ", shared with other work: ratios count, microseconds do not"
    # The file's head is that of its last run.
    content["about"] = head
    run = {key: value for key, value in head.items() if key != "what"}
    content["runs"][args.label] = {**run, "cases": cases}
    write_json(args.out, content)
    print(table(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
