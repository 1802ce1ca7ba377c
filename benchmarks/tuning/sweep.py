"""SPEED by cutoff: tunes a model for each, and holds tuned and untuned weights against full depth.

    python -m benchmarks.tuning.sweep MODEL DIR --cutoffs 12 16 18 21 --gpus 0 1 2 3 \
        --data "--count 4000" --tune "--lr 2e-4" \
        --evaluate "--tasks lookups,short --lengths 4096,16384"

Every cutoff runs `vllm-kvx tune-speed` and `vllm-kvx evaluate --original` on a GPU of its own, with
the same examples, and the original is asked once for all; --at-once runs several on each GPU, and
without --gpus they take the one that is visible, or the CPU. --trial adds a run with options of its
own, such as `--trial full-18 18 "--method full"`. Each is evaluated under the policy that it tunes
for. What is there already is taken up again. `--summary NAME` writes
benchmarks/results/tuning/NAME.json and .png of what DIR holds.
"""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Event, Lock
from typing import Any

from benchmarks.common import processes
from benchmarks.common.about import about
from benchmarks.common.files import RESULTS
from vllm_kvx.config.arguments import positive
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import ANSWERS_FILE
from vllm_kvx.tools.plots import draw
from vllm_kvx.tools.tune_speed.options import add_tune_speed

COMMAND = [sys.executable, "-m", "vllm_kvx.cli"]


def start(command: Sequence[str], log: Path, gpu: str | None) -> "subprocess.Popen[bytes]":
    """Starts a command of vllm-kvx; see ``processes.start``."""
    return processes.start([*COMMAND, *command], log, gpu)


def run(command: Sequence[str], log: Path, gpu: str | None) -> int:
    """The exit code of a command of vllm-kvx, with its output in `log`."""
    return processes.run([*COMMAND, *command], log, gpu)


def runs_of(args: argparse.Namespace) -> list[tuple[str, int, list[str]]]:
    """Names, cutoffs and options of what is tuned: the cutoffs first, then the trials."""
    plain = [(f"speed-{cutoff}", cutoff, "") for cutoff in args.cutoffs]
    trials = [(name, int(cutoff), options) for name, cutoff, options in args.trial]
    return [(name, cutoff, shlex.split(options)) for name, cutoff, options in plain + trials]


def options_of(model: str, cutoff: int, out: Path, options: Sequence[str]) -> Any:
    """What `vllm-kvx tune-speed` makes of its options, defaults included."""
    parser = argparse.ArgumentParser()
    add_tune_speed(parser.add_subparsers())
    return parser.parse_args(
        ["tune-speed", model, "--cutoff", str(cutoff), "--out", str(out), *options]
    )


def policies_of(cutoff: int, tune: Sequence[str], policies: Sequence[str] | None) -> list[str]:
    """What a run is evaluated under: `policies`, or what these options of tune-speed tune for."""
    if policies:
        return [each.format(K=cutoff) for each in policies]
    wanted = options_of("MODEL", cutoff, Path("OUT"), tune)
    return [str(Speed(wanted.cutoff, wanted.anchors, wanted.tail))]


def seed(original: Path, evaluation: Path) -> None:
    """What the original answered, as `evaluate --original` would have stored it."""
    if (evaluation / ANSWERS_FILE).exists():
        return
    evaluation.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in (original / ANSWERS_FILE).read_text(encoding="utf-8").split("\n")[:-1]:
        answer = json.loads(line)
        row = Row.parse(answer["question"]["policy"])
        answer["question"]["policy"] = str(row.of_original())
        lines.append(json.dumps(answer, ensure_ascii=False) + "\n")
    (evaluation / ANSWERS_FILE).write_text("".join(lines), encoding="utf-8")


def sweep(args: argparse.Namespace) -> list[str]:
    """Tunes and evaluates; what failed."""
    args.directory.mkdir(parents=True, exist_ok=True)
    examples, original = args.directory / "examples", args.directory / "original"
    tune, ask = shlex.split(args.tune), [*shlex.split(args.evaluate), "--no-plot"]
    runs = runs_of(args)
    policies = {
        name: policies_of(cutoff, [*tune, *options], args.policies)
        for name, cutoff, options in runs
    }
    slots = (args.gpus or [None]) * args.at_once
    gpus: Queue[str | None] = Queue()
    for gpu in slots:
        gpus.put(gpu)

    @contextmanager
    def taken() -> Iterator[str | None]:
        gpu = gpus.get()
        try:
            yield gpu
        finally:
            gpus.put(gpu)

    # With --overlap evaluations have no slot of their own: engines start slowly, and need little of
    # a GPU while they do. Each GPU has one at a time, the original's aside.
    beside = {gpu: Lock() for gpu in slots}
    running: set[subprocess.Popen[bytes]] = set()
    stopping = Event()

    def code_of(command: Sequence[str], log: Path, gpu: str | None) -> int:
        if stopping.is_set():
            return 1
        process = start(command, log, gpu)
        running.add(process)
        code = process.wait()
        running.discard(process)
        processes.stop(process)
        return code

    def answered() -> int:
        if (examples / "tuning" / "examples.jsonl").exists():
            return 0
        first = ["tune-speed", args.model, "--cutoff", str(args.cutoffs[0]), *tune]
        more = [*shlex.split(args.data), "--out", str(examples), "--only-examples"]
        with taken() as gpu:
            return code_of([*first, *more], args.directory / "examples.log", gpu)

    def asked(gpu: str | None) -> int:
        command = ["evaluate", args.model, "--output", str(original), *ask, "--policies"]
        names = dict.fromkeys(name for wanted in policies.values() for name in wanted)
        return code_of([*command, *names], args.directory / "original.log", gpu)

    def tuned(name: str, cutoff: int, options: Sequence[str], gpu: str | None) -> str | None:
        command = ["tune-speed", args.model, "--cutoff", str(cutoff)]
        command += ["--out", str(args.directory / name), "--examples", str(examples)]
        code = code_of([*command, *tune, *options], args.directory / f"{name}.log", gpu)
        return f"tuning {name}" if code else None

    def evaluated(name: str, gpu: str | None) -> str | None:
        evaluation = args.directory / f"evaluate-{name}"
        if asking.result():
            return "the original"
        seed(original, evaluation)
        command = ["evaluate", str(args.directory / name), "--original", args.model, "--policies"]
        command += policies[name]
        command += ["--output", str(evaluation), *ask]
        code = code_of(command, args.directory / f"{name}.log", gpu)
        return f"evaluating {name}" if code else None

    def one(wanted: tuple[str, int, list[str]]) -> str | None:
        name, cutoff, options = wanted
        with taken() as gpu:
            failed = tuned(name, cutoff, options, gpu)
            if failed or not args.overlap:
                return failed or evaluated(name, gpu)
        with beside[gpu]:
            return evaluated(name, gpu)

    # A thread for each: they wait for a GPU in turn.
    with ThreadPoolExecutor(len(runs) + 2) as pool:
        # The original has its GPU before anything that waits for its answers can have it.
        first = gpus.get()
        asking = pool.submit(asked, first)
        if args.overlap:
            gpus.put(first)
        else:
            asking.add_done_callback(lambda _: gpus.put(first))
        answering = pool.submit(answered)
        try:
            if answering.result():
                return ["examples"]
            failures = list(pool.map(one, runs))
        except BaseException:
            stopping.set()
            for process in list(running):
                processes.stop(process)
            raise
    return list(dict.fromkeys(failure for failure in failures if failure))


def summary(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """Records, losses and reports of a directory: by cutoff, and of trials by their names."""
    found: dict[str, Any] = {}
    for name in names:
        files = {
            "record": directory / name / "kvx_tuned.json",
            "losses": directory / name / "tuning" / "losses.json",
            "report": directory / f"evaluate-{name}" / "report.json",
        }
        entry = {
            name: json.loads(path.read_text(encoding="utf-8"))
            for name, path in files.items()
            if path.exists()
        }
        if "losses" in entry:
            # Kinds of examples are many, and the record has the sum; what else is logged of every
            # step follows from the options.
            for logged in entry["losses"]["log"]:
                for key in ("by", "grad_norm", "learning_rate", "epoch"):
                    logged.pop(key, None)
        if entry:
            found[name.removeprefix("speed-")] = entry
    return {"cutoffs": found}


def head_of(result: dict[str, Any]) -> dict[str, Any]:
    """The head of a summary: commands, date, device and versions are those of its runs."""
    records = [entry["record"] for entry in result["cutoffs"].values() if "record" in entry]
    reports = [entry["report"] for entry in result["cutoffs"].values() if "report" in entry]
    last: dict[str, Any] = max(records, key=lambda record: str(record["date"]), default={})
    return about(
        f"{last.get('original', 'A model')} tuned for SPEED by cutoff, and its answers.",
        [record["command"] for record in records],
        date=last.get("date"),
        versions=last.get("versions"),
        device=reports[-1].get("device") if reports else None,
    )


def curves(pyplot: Any, result: dict[str, Any]) -> Any:
    """Losses over steps, and right answers over cutoffs, before and after tuning."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for cutoff, entry in result["cutoffs"].items():
        logged = [e for e in entry.get("losses", {}).get("log", ()) if "loss" in e]
        label = f"K = {cutoff}" if cutoff.isdecimal() else cutoff
        left.plot([e["step"] for e in logged], [e["loss"] for e in logged], label=label, lw=1)
    left.set(xlabel="step", ylabel="loss", yscale="log", title="tuning")
    left.legend()
    lines: dict[str, list[tuple[int, float]]] = {}
    for cutoff, entry in result["cutoffs"].items():
        tuned_for = entry.get("record", {}).get("policy")
        for each in entry.get("report", {}).get("recovery", ()):
            # Trials have names, and are not in the lines.
            if cutoff.isdecimal() and each["policy"] == tuned_for and each["over"] == "all":
                for name in ("full", "cut", "tuned"):
                    lines.setdefault(name, []).append((int(cutoff), 100 * each[name]))
    for name, label in (("full", "full depth"), ("cut", "cut, not tuned"), ("tuned", "tuned")):
        if name in lines:
            right.plot(*zip(*sorted(lines[name]), strict=True), marker="o", label=label)
    right.set(xlabel="cutoff K", ylabel="right answers (%)", title="answers")
    right.legend()
    figure.tight_layout()
    return figure


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cutoffs", type=int, nargs="+", required=True)
    parser.add_argument("--gpus", nargs="+")
    parser.add_argument("--data", default="", metavar="OPTIONS", help="of making the examples")
    parser.add_argument("--tune", default="", metavar="OPTIONS", help="of all tune-speed commands")
    parser.add_argument("--evaluate", default="", metavar="OPTIONS")
    parser.add_argument(
        "--policies",
        nargs="+",
        help="in place of the one that a run tunes for; {K} stands for the cutoff",
    )
    parser.add_argument(
        "--trial",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "K", "OPTIONS"),
        help="another run of tune-speed",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="evaluate beside the tuning, on a GPU that has room for both",
    )
    parser.add_argument(
        "--at-once", type=positive, default=1, metavar="N", help="runs at a time on each GPU"
    )
    parser.add_argument("--summary", metavar="NAME", help="only write results of what is there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.summary:
        result = summary(args.directory, [name for name, *_ in runs_of(args)])
        path = RESULTS / "tuning" / f"{args.summary}.json"
        text = json.dumps({"about": head_of(result), **result}, indent=1)
        # An interval is a line, not four.
        text = re.sub(r"\[[-\d.,\s]+\]", lambda found: " ".join(found[0].split()), text)
        path.write_text(text + "\n", encoding="utf-8")
        print(draw(path.with_suffix(".png"), curves, result))
        return
    # Ending by a signal must end what runs too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if failed := sweep(args):
        raise SystemExit("failed, see the logs: " + ", ".join(failed))


if __name__ == "__main__":
    main()
