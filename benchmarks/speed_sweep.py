"""SPEED by cutoff: tunes a model for each, and holds tuned and untuned weights against full depth.

    python -m benchmarks.speed_sweep MODEL DIR --cutoffs 12 16 18 21 --gpus 0 1 2 3 \
        --data "--count 4000" --tune "--lr 2e-4" \
        --evaluate "--tasks lookups,short --lengths 4096,16384"

Every cutoff runs `vllm-kvx tune-speed` and `vllm-kvx evaluate --original` on a GPU of its own, with
the same examples; without --gpus one after the other on the CPU. What is there already is taken up
again. `--summary NAME` writes benchmarks/results/NAME.json and .png of what DIR holds.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from vllm_kvx.calibration.figures import draw

RESULTS = Path(__file__).resolve().parent / "results"
COMMAND = [sys.executable, "-m", "vllm_kvx.cli"]


def run(command: Sequence[str], log: Path, gpu: str | None) -> int:
    """Runs a command of vllm-kvx with its output in `log`; its exit code."""
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ vllm-kvx {shlex.join(command)}\n")
        file.flush()
        return subprocess.run(
            [*COMMAND, *command], env=environment, stdout=file, stderr=subprocess.STDOUT
        ).returncode


def sweep(args: argparse.Namespace) -> list[str]:
    """Tunes and evaluates; what failed."""
    args.directory.mkdir(parents=True, exist_ok=True)
    examples, tune = args.directory / "examples", shlex.split(args.tune)
    gpus: Queue[str | None] = Queue()
    for gpu in args.gpus or [None]:
        gpus.put(gpu)
    if not (examples / "tuning" / "examples.jsonl").exists():
        first = ["tune-speed", args.model, "--cutoff", str(args.cutoffs[0]), *tune]
        gpu = (args.gpus or [None])[0]
        more = [*shlex.split(args.data), "--out", str(examples), "--only-examples"]
        if run([*first, *more], args.directory / "examples.log", gpu):
            return ["examples"]

    def one(cutoff: int) -> str | None:
        gpu = gpus.get()
        try:
            out, log = args.directory / f"speed-{cutoff}", args.directory / f"speed-{cutoff}.log"
            command = ["tune-speed", args.model, "--cutoff", str(cutoff), "--out", str(out), *tune]
            if run([*command, "--examples", str(examples)], log, gpu):
                return f"tuning for speed-{cutoff}"
            policies = [name.format(K=cutoff) for name in args.policies]
            command = ["evaluate", str(out), "--original", args.model, "--policies", *policies]
            command += ["--output", str(args.directory / f"evaluate-{cutoff}"), "--no-plot"]
            if run([*command, *shlex.split(args.evaluate)], log, gpu):
                return f"evaluating speed-{cutoff}"
            return None
        finally:
            gpus.put(gpu)

    with ThreadPoolExecutor(len(args.gpus or [None])) as pool:
        return [failure for failure in pool.map(one, args.cutoffs) if failure]


def summary(directory: Path, cutoffs: Sequence[int]) -> dict[str, Any]:
    """Records, losses and reports of a sweep's directory, by cutoff."""
    found: dict[str, Any] = {}
    for cutoff in cutoffs:
        files = {
            "record": directory / f"speed-{cutoff}" / "kvx_tuned.json",
            "losses": directory / f"speed-{cutoff}" / "tuning" / "losses.json",
            "report": directory / f"evaluate-{cutoff}" / "report.json",
        }
        entry = {
            name: json.loads(path.read_text(encoding="utf-8"))
            for name, path in files.items()
            if path.exists()
        }
        if "losses" in entry:
            # Kinds of examples are many; the record has the sum.
            for logged in entry["losses"]["log"]:
                logged.pop("by", None)
        if entry:
            found[str(cutoff)] = entry
    return {"cutoffs": found}


def curves(pyplot: Any, result: dict[str, Any]) -> Any:
    """Losses over steps, and right answers over cutoffs, before and after tuning."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for cutoff, entry in result["cutoffs"].items():
        logged = [e for e in entry.get("losses", {}).get("log", ()) if "loss" in e]
        left.plot(
            [e["step"] for e in logged], [e["loss"] for e in logged], label=f"K = {cutoff}", lw=1
        )
    left.set(xlabel="step", ylabel="loss (nats a token)", yscale="log", title="tuning")
    left.legend()
    lines: dict[str, list[tuple[int, float]]] = {}
    for cutoff, entry in result["cutoffs"].items():
        for each in entry.get("report", {}).get("recovery", ()):
            if each["policy"] == f"speed-{cutoff}" and each["over"] == "all":
                for name in ("full", "cut", "tuned"):
                    lines.setdefault(name, []).append((int(cutoff), 100 * each[name]))
    for name, label in (("full", "full depth"), ("cut", "cut, not tuned"), ("tuned", "tuned")):
        if name in lines:
            right.plot(*zip(*lines[name], strict=True), marker="o", label=label)
    right.set(xlabel="cutoff K", ylabel="right answers (%)", title="answers")
    right.legend()
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cutoffs", type=int, nargs="+", required=True)
    parser.add_argument("--gpus", nargs="+")
    parser.add_argument("--data", default="", metavar="OPTIONS", help="of making the examples")
    parser.add_argument("--tune", default="", metavar="OPTIONS", help="of all tune-speed commands")
    parser.add_argument("--evaluate", default="", metavar="OPTIONS")
    parser.add_argument(
        "--policies", nargs="+", default=["speed-{K}"], help="{K} stands for the cutoff"
    )
    parser.add_argument("--summary", metavar="NAME", help="only write results of what is there")
    args = parser.parse_args()
    if args.summary:
        result = summary(args.directory, args.cutoffs)
        path = RESULTS / f"{args.summary}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(draw(path.with_suffix(".png"), curves, result))
        return
    if failed := sweep(args):
        raise SystemExit("failed, see the logs: " + ", ".join(failed))


if __name__ == "__main__":
    main()
