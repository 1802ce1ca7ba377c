"""SPEED's tuning: settings tried for some steps each, and the best one's for every cutoff.

    python -m benchmarks.tuning.trials MODEL DIR --cutoffs 18 21 16 12 --gpu 0 --at-once 4 \
        --minutes 20 --data "--count 4000 --recitals 0.3" --tune "--max-length 16384" \
        --trial plain "--lr 3e-4" --trial hidden "--lr 3e-4 --hidden-loss 1" \
        --evaluate "--tasks generated,short --lengths 4096,16384"

The original is asked while the examples are made: give --data and --evaluate engine arguments
that fit beside each other. The trials tune for the first cutoff, on one GPU, with the same examples
and for as many batches.
The best is that with the least KL on held-out lookups. Its options then tune for all cutoffs in
what is left of --minutes, by benchmarks.tuning.sweep, in DIR/sweep; --share gives a cutoff more or
fewer of the tokens. DIR/trials.json says what was tried, and what came of it; the same command goes
on from there, and `benchmarks.tuning.sweep MODEL DIR/sweep --cutoffs ... --summary NAME` shows it.
"""

import argparse
import json
import math
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.processes import stop
from benchmarks.tuning.sweep import options_of, policies_of, run, start, sweep
from vllm_kvx.tools.tune_speed import packs
from vllm_kvx.tools.tune_speed.lookups import KINDS
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.sources import FOLDER
from vllm_kvx.tools.tune_speed.train import EXAMPLES, LOSSES

# Of the time that is left when a run's tokens are counted out: the rest is for its start, and for
# merging and measuring.
USED = 0.85
# Of the time that is left when the trials start, that after which those that still run are stopped.
TRIED_UNTIL = 0.5


def lookups(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """KL and the share of same answers over held-out lookups, recitals and other prompts left out.

    found: agreement by kind of prompt, as `losses.json` has it.
    """
    kinds = [each for kind, each in found.items() if kind in KINDS]
    tokens = sum(each["tokens"] for each in kinds)
    answers = sum(each["answers"] for each in kinds)
    return {
        "kl": sum(each["kl"] * each["tokens"] for each in kinds) / tokens if tokens else math.nan,
        "same": sum(each["same"] * each["answers"] for each in kinds) / max(answers, 1),
        "answers": answers,
    }


def ended(process: "subprocess.Popen[bytes]", until: float) -> int | None:
    """Its exit code; None where it still ran at `until`, a monotonic time, and was stopped."""
    try:
        return process.wait(max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop(process)


def tried(
    args: argparse.Namespace, settings: Any, learned: Sequence[Example], until: float
) -> dict[str, dict[str, Any]]:
    """The trials by name, and what came of each that ended.

    settings: of --tune, whose `out` has the examples; learned: those that are not held out.
    until: when the others are stopped, by the monotonic clock.
    """
    common = shlex.split(args.tune)
    cutoff = args.cutoffs[0]
    batches = len(packs.packs(learned, settings.batch_tokens, settings.seed))
    epochs = args.steps * settings.accumulate / batches

    def one(trial: Sequence[str]) -> dict[str, Any]:
        name, options = trial
        out = args.directory / f"trial-{name}"
        command = ["tune-speed", args.model, "--cutoff", str(cutoff), "--out", str(out), *common]
        command += ["--epochs", f"{epochs:.5f}", "--examples", settings.out, *shlex.split(options)]
        code = ended(start(command, args.directory / f"trial-{name}.log", args.gpu), until)
        found: dict[str, Any] = {"options": options, "exit": code}
        file = out / FOLDER / LOSSES
        # One that refused is another run's.
        if code not in (0, None) or not file.exists():
            return found
        losses = json.loads(file.read_text(encoding="utf-8"))
        found |= {
            "before": lookups(losses["before"]),
            "after": lookups(losses["after"]),
            "by_kind": losses["after"],
            "steps": losses["steps"],
            "seconds": losses["seconds"],
        }
        if not losses["resumed"]:
            tokens = sum(map(len, learned)) * epochs
            found["tokens_per_second"] = tokens / losses["seconds"]
        return found

    with ThreadPoolExecutor(args.at_once) as pool:
        results = list(pool.map(one, args.trial))
    return {name: result for (name, _), result in zip(args.trial, results, strict=True)}


def best_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The trial with the least KL; raises SystemExit if none can be compared."""
    kls = {name: each["after"]["kl"] for name, each in found.items() if "after" in each}
    kls = {name: kl for name, kl in kls.items() if math.isfinite(kl)}
    if not kls:
        raise SystemExit("no trial ended with held-out lookups to compare, see trial-*.log")
    return min(kls, key=lambda name: kls[name])


def rate_of(found: Mapping[str, Mapping[str, Any]], at_once: int) -> float:
    """Tokens a second of so many trials at a time; raises SystemExit if none was timed whole."""
    rates = [each["tokens_per_second"] for each in found.values() if "tokens_per_second" in each]
    if not rates:
        raise SystemExit("every trial was interrupted, and none is timed: delete trial-* of one")
    return min(at_once, len(rates)) * sum(rates) / len(rates)


def epochs_of(
    rate: float, cutoffs: Sequence[int], shares: Mapping[int, float], tokens: int, seconds: float
) -> dict[int, float]:
    """Epochs of each cutoff's run, all of which together take `seconds` on one GPU.

    rate: tokens a second of all together. tokens: of an epoch.
    """
    weights = {cutoff: shares.get(cutoff, 1.0) for cutoff in cutoffs}
    learnt = rate * seconds * USED
    return {k: learnt * w / sum(weights.values()) / tokens for k, w in weights.items()}


def decide(args: argparse.Namespace, folder: Path, began: float) -> dict[str, Any]:
    """Has the examples made and the trials run; what came of them, and how long each cutoff's run
    is to be. What is in `folder` already is used.

    began: when --minutes begin, by the monotonic clock.
    """
    end = began + 60 * args.minutes
    shares = {int(cutoff): float(weight) for cutoff, weight in args.share}
    examples = folder / "examples"
    settings = options_of(args.model, args.cutoffs[0], examples, shlex.split(args.tune))
    for _, options in args.trial:
        options_of(args.model, args.cutoffs[0], examples, shlex.split(options))
    folder.mkdir(parents=True, exist_ok=True)
    # The original is asked meanwhile; the sweep finds its answers.
    asked = ["evaluate", args.model, "--output", str(folder / "original"), "--no-plot"]
    # Any of the trials may be the one that is chosen.
    policies = [
        name
        for cutoff in args.cutoffs
        for _, options in args.trial
        for name in policies_of(cutoff, shlex.split(f"{args.tune} {options}"), None)
    ]
    command = [*asked, *shlex.split(args.evaluate), "--policies", *dict.fromkeys(policies)]
    asking = start(command, folder / "original.log", args.gpu)
    try:
        if not (examples / FOLDER / EXAMPLES).exists():
            command = ["tune-speed", args.model, "--cutoff", str(args.cutoffs[0])]
            command += [*shlex.split(args.tune), *shlex.split(args.data), "--only-examples"]
            if run([*command, "--out", str(examples)], folder / "examples.log", args.gpu):
                raise SystemExit(f"no examples, see {folder / 'examples.log'}")
        learned = packs.read(examples / FOLDER / EXAMPLES)[settings.held_out :]
        now = time.monotonic()
        found = tried(args, settings, learned, now + TRIED_UNTIL * max(end - now, 0))
        best = best_of(found)
        ended(asking, end)
    finally:
        stop(asking)
    left = end - time.monotonic()
    if left <= 0:
        raise SystemExit("no time is left to tune for the cutoffs: give more --minutes")
    rate = rate_of(found, args.at_once)
    epochs = epochs_of(rate, args.cutoffs, shares, sum(map(len, learned)), left)
    return {"best": best, "seconds_left": round(left, 1), "epochs": epochs, "trials": found}


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cutoffs", type=int, nargs="+", required=True, help="the trials' first")
    parser.add_argument("--gpu", help="the one that is used, as CUDA_VISIBLE_DEVICES has it")
    parser.add_argument(
        "--at-once", type=int, default=1, help="processes on it (default: %(default)s)"
    )
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
    names = [name for name, _ in args.trial]
    if len(set(names)) < len(names):
        parser.error("two trials have one name")
    if args.at_once < 1:
        parser.error(f"--at-once must be at least 1, got {args.at_once}")
    folder = args.directory / "sweep"
    decided = args.directory / "trials.json"
    if not decided.exists():
        text = json.dumps(decide(args, folder, began), indent=1) + "\n"
        decided.write_text(text, encoding="utf-8")
    chosen = json.loads(decided.read_text(encoding="utf-8"))
    epochs = {int(cutoff): count for cutoff, count in chosen["epochs"].items()}
    if list(epochs) != args.cutoffs or list(chosen["trials"]) != names:
        raise SystemExit(f"{decided} is of other cutoffs or trials: use another DIR")
    print(f"best: {chosen['best']}; epochs by cutoff: {epochs}", flush=True)
    options = chosen["trials"][chosen["best"]]["options"]
    plan = argparse.Namespace(
        model=args.model,
        directory=folder,
        data=args.data,
        evaluate=args.evaluate,
        gpus=[args.gpu],
        at_once=args.at_once,
        policies=None,
        overlap=False,
    )
    plan.tune = f"{args.tune} {options} --epochs {epochs[args.cutoffs[0]]:.4f}"
    plan.cutoffs = args.cutoffs[:1]
    plan.trial = [(f"speed-{k}", str(k), f"--epochs {epochs[k]:.4f}") for k in args.cutoffs[1:]]
    if failed := sweep(plan):
        raise SystemExit("failed, see the logs: " + ", ".join(failed))


if __name__ == "__main__":
    main()
