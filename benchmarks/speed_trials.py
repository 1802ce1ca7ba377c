"""SPEED's tuning: settings tried for some steps each, and the best one's for every cutoff.

    python -m benchmarks.speed_trials MODEL DIR --cutoffs 18 21 16 12 --gpus 0 0 0 0 --minutes 20 \
        --data "--count 4000 --recitals 0.3" --tune "--max-length 16384" \
        --trial plain "--lr 3e-4" --trial hidden "--lr 3e-4 --hidden-loss 1" \
        --evaluate "--tasks generated,short --lengths 4096,16384"

The trials tune for the first cutoff, at one time, with the same examples and as many steps. The
best is that with the least KL on held-out lookups. Its options then tune for all cutoffs in what is
left of --minutes, by benchmarks.speed_sweep, in DIR/sweep; --share gives a cutoff more or less of
the tokens than its layers ask for. DIR/trials.json says what was tried, and what came of it; the
same command goes on from there.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed_sweep import COMMAND, sweep
from vllm_kvx.tuning import packs
from vllm_kvx.tuning.lookups import KINDS
from vllm_kvx.tuning.options import add_tune_speed
from vllm_kvx.tuning.sources import FOLDER
from vllm_kvx.tuning.train import EXAMPLES, LOSSES

# Of the time that is left when a run's tokens are counted out: the rest is for its start, and for
# merging and measuring.
USED = 0.85
# Of the minutes from the start, those after which trials that still run are stopped.
TRIED_UNTIL = 0.5


def options_of(model: str, cutoff: int, out: Path, options: Sequence[str]) -> Any:
    """What `vllm-kvx tune-speed` makes of its options, defaults included."""
    parser = argparse.ArgumentParser()
    add_tune_speed(parser.add_subparsers())
    return parser.parse_args(
        ["tune-speed", model, "--cutoff", str(cutoff), "--out", str(out), *options]
    )


def lookups(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """KL and the share of same answers over held-out lookups, recitals and other prompts left out.

    found: agreement by kind of prompt, as `losses.json` has it.
    """
    kinds = [each for kind, each in found.items() if kind in KINDS]
    tokens = sum(each["tokens"] for each in kinds)
    answers = sum(each["answers"] for each in kinds)
    return {
        "kl": sum(each["kl"] * each["tokens"] for each in kinds) / max(tokens, 1),
        "same": sum(each["same"] * each["answers"] for each in kinds) / max(answers, 1),
        "answers": answers,
    }


def start(command: Sequence[str], log: Path, gpu: str | None) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ vllm-kvx {shlex.join(command)}\n")
        file.flush()
        return subprocess.Popen(
            [*COMMAND, *command], env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def tried(args: argparse.Namespace, examples: Path, until: float) -> dict[str, dict[str, Any]]:
    """The trials by name, and what came of each that ended.

    until: when the others are stopped, by the monotonic clock.
    """
    common = shlex.split(args.tune)
    cutoff = args.cutoffs[0]
    settings = options_of(args.model, cutoff, examples, common)
    learned = packs.read(examples / FOLDER / EXAMPLES)[settings.held_out :]
    batches = len(packs.packs(learned, settings.batch_tokens, settings.seed))
    epochs = args.steps * settings.accumulate / batches
    running = []
    for index, (name, options) in enumerate(args.trial):
        out = args.directory / f"trial-{name}"
        command = ["tune-speed", args.model, "--cutoff", str(cutoff), "--out", str(out), *common]
        command += ["--epochs", f"{epochs:.5f}", "--examples", str(examples), *shlex.split(options)]
        gpu = args.gpus[index % len(args.gpus)] if args.gpus else None
        running.append((name, options, out, start(command, out.with_suffix(".log"), gpu)))
    found: dict[str, dict[str, Any]] = {}
    for name, options, out, process in running:
        try:
            code: int | None = process.wait(max(until - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = None
        found[name] = {"options": options, "exit": code}
        if (file := out / FOLDER / LOSSES).exists():
            losses = json.loads(file.read_text(encoding="utf-8"))
            tokens = sum(map(len, learned)) * epochs
            found[name] |= {
                "before": lookups(losses["before"]),
                "after": lookups(losses["after"]),
                "by_kind": losses["after"],
                "steps": losses["steps"],
                "seconds": losses["seconds"],
                "tokens_per_second": tokens / losses["seconds"],
            }
    return found


def best_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The trial with the least KL; raises SystemExit if none ended."""
    ended = {name: each["after"]["kl"] for name, each in found.items() if "after" in each}
    ended = {name: kl for name, kl in ended.items() if math.isfinite(kl)}
    if not ended:
        raise SystemExit("no trial ended, see the logs trial-*.log")
    return min(ended, key=lambda name: ended[name])


def epochs_of(
    found: Mapping[str, Mapping[str, Any]],
    cutoffs: Sequence[int],
    shares: Mapping[int, float],
    tokens: int,
    seconds: float,
) -> dict[int, float]:
    """Epochs of each cutoff's run, all of which together fill `seconds`.

    tokens: of an epoch. The rate is what the trials reached together, at the same time.
    """
    rate = sum(each.get("tokens_per_second", 0.0) for each in found.values())
    weights = {cutoff: shares.get(cutoff, 1.0) for cutoff in cutoffs}
    learnt = rate * max(seconds, 0.0) * USED
    return {k: learnt * w / sum(weights.values()) / tokens for k, w in weights.items()}


def decide(args: argparse.Namespace, folder: Path, began: float) -> dict[str, Any]:
    """Has the examples made and the trials run; what came of them, and how long each cutoff's run
    is to be. What is in `folder` already is used.

    began: when --minutes begin, by the monotonic clock.
    """
    examples = folder / "examples"
    if not (examples / FOLDER / EXAMPLES).exists():
        folder.mkdir(exist_ok=True)
        command = ["tune-speed", args.model, "--cutoff", str(args.cutoffs[0])]
        command += [*shlex.split(args.tune), *shlex.split(args.data), "--only-examples"]
        gpu = args.gpus[0] if args.gpus else None
        if start([*command, "--out", str(examples)], folder / "examples.log", gpu).wait():
            raise SystemExit(f"no examples, see {folder / 'examples.log'}")
    # The original is asked while the trials run; the sweep finds its answers.
    asked = ["evaluate", args.model, "--output", str(folder / "original"), "--no-plot"]
    policies = [f"speed-{cutoff}" for cutoff in args.cutoffs]
    command = [*asked, *shlex.split(args.evaluate), "--policies", *policies]
    asking = start(command, folder / "original.log", args.gpus[-1] if args.gpus else None)
    found = tried(args, examples, began + TRIED_UNTIL * 60 * args.minutes)
    best = best_of(found)
    settings = options_of(args.model, args.cutoffs[0], examples, shlex.split(args.tune))
    learned = packs.read(examples / FOLDER / EXAMPLES)[settings.held_out :]
    asking.wait()
    left = 60 * args.minutes - (time.monotonic() - began)
    shares = {int(cutoff): float(weight) for cutoff, weight in args.share}
    epochs = epochs_of(found, args.cutoffs, shares, sum(map(len, learned)), left)
    return {"best": best, "seconds_left": round(left, 1), "epochs": epochs, "trials": found}


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cutoffs", type=int, nargs="+", required=True, help="the trials' first")
    parser.add_argument("--gpus", nargs="+")
    parser.add_argument("--data", default="", metavar="OPTIONS", help="of making the examples")
    parser.add_argument("--tune", default="", metavar="OPTIONS", help="of all tune-speed commands")
    parser.add_argument("--evaluate", default="", metavar="OPTIONS")
    parser.add_argument(
        "--trial",
        nargs=2,
        action="append",
        required=True,
        metavar=("NAME", "OPTIONS"),
        help="settings to try",
    )
    parser.add_argument("--steps", type=int, default=150, help="of a trial (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, required=True, help="from now to the end of the last training"
    )
    parser.add_argument(
        "--share",
        nargs=2,
        action="append",
        default=[],
        metavar=("K", "WEIGHT"),
        help="a cutoff's weight among the others, instead of 1",
    )
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    folder = args.directory / "sweep"
    plan = argparse.Namespace(
        **{**vars(args), "directory": folder, "trial": [], "policies": ["speed-{K}"]}
    )
    decided = args.directory / "trials.json"
    if not decided.exists():
        text = json.dumps(decide(args, folder, began), indent=1) + "\n"
        decided.write_text(text, encoding="utf-8")
    chosen = json.loads(decided.read_text(encoding="utf-8"))
    epochs = {int(cutoff): count for cutoff, count in chosen["epochs"].items()}
    print(f"best: {chosen['best']}; epochs by cutoff: {epochs}", flush=True)
    if not all(epochs.values()):
        raise SystemExit("no time is left to tune for the cutoffs: give more --minutes")
    options = chosen["trials"][chosen["best"]]["options"]
    plan.tune = f"{args.tune} {options} --epochs {epochs[args.cutoffs[0]]:.4f}"
    plan.cutoffs = args.cutoffs[:1]
    plan.trial = [(f"speed-{k}", str(k), f"--epochs {epochs[k]:.4f}") for k in args.cutoffs[1:]]
    if failed := sweep(plan):
        raise SystemExit("failed, see the logs: " + ", ".join(failed))


if __name__ == "__main__":
    sys.exit(main())
