"""Measures on a machine that is there for a limited time: a queue of commands over its GPUs.

    python -m benchmarks.common.node turns tuning --gpus 0 1 --minutes 28 --out OUT --models MODELS

Arguments are plans: names of benchmarks/plans/NAME.toml, or files. A plan is a list of steps, each
a command that takes one GPU, several, or none; `take = "PLAN/NAME"` is a step of another plan, with
what else the row says. Steps begin in the order of the plans, as soon as their GPUs are free, what
they need is there and those that they come after have ended, if the minutes that they need are
left. What still runs at the end is stopped. OUT has a log of each, and node.json, which says what
became of them; the same command again leaves out what ended well.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.files import ROOT
from benchmarks.common.processes import start, stop

PLANS = ROOT / "benchmarks" / "plans"
# Steps without a GPU that run at once.
WITHOUT_GPU = 2
TICK = 0.5


@dataclass(frozen=True)
class Step:
    """A command of a plan.

    Attributes:
        name: of its log. minutes: it needs so many at least to be of use.
        command: split as a shell would; {out}, {models}, {commit} and the {seconds} or {minutes}
            that it has are filled in. A leading `python` is the one that runs this.
        environment: further variables.
        after: names of steps that have to have ended, well or not.
        gpus: how many it takes, each of them whole if more than one.
        alone: one GPU, too, is taken whole: for times.
        most: minutes after which it is stopped, 0 if there is no limit.
        needs: paths, filled in as a command is, without which it does not begin: checkpoints may
            still be on their way to the machine.
    """

    name: str
    command: str
    minutes: float = 0.0
    after: tuple[str, ...] = ()
    gpus: int = 1
    alone: bool = False
    most: float = 0.0
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether it has each of its GPUs for itself."""
        return self.gpus > 1 or self.alone

    def words(self, seconds: float, values: Mapping[str, str]) -> list[str]:
        """The command, of which so many seconds are left; raises SystemExit if it is malformed."""
        more = {"seconds": int(seconds), "minutes": round(seconds / 60, 2)}
        try:
            words = shlex.split(self.command.format(**values, **more))
        except (KeyError, IndexError, ValueError) as error:
            problem = f"{self.name}: {error!r} in its command; a brace of its own is written twice"
            raise SystemExit(problem) from error
        return [sys.executable, *words[1:]] if words[:1] == ["python"] else words

    def paths(self, values: Mapping[str, str]) -> list[Path]:
        """What it needs; raises SystemExit if a path is malformed."""
        try:
            return [Path(path.format(**values)) for path in self.needs]
        except (KeyError, IndexError, ValueError) as error:
            raise SystemExit(f"{self.name}: {error!r} in what it needs") from error

    def ready(self, ended: Container[str], values: Mapping[str, str]) -> bool:
        """Whether what it comes after has ended and what it needs is there."""
        there = [path.exists() for path in self.paths(values)]
        return all(there) and all(name in ended for name in self.after)


def read_plan(name: str, takers: Sequence[str] = ()) -> list[Step]:
    """The steps of a plan; raises SystemExit with what is wrong with its file.

    takers: plans that take a step of it, directly or not.
    """
    path = Path(name) if name.endswith(".toml") else PLANS / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = content.pop("step")
        if content:
            raise TypeError(f"what is not in a [[step]]: {', '.join(content)}")
        if not isinstance(rows, list):
            raise TypeError("a step begins with [[step]]")
        if name in takers:
            raise TypeError(f"it takes a step of itself, by {' and '.join(takers)}")
        return [_step(row, [*takers, name]) for row in rows]
    except OSError as error:
        names = ", ".join(sorted(file.stem for file in PLANS.glob("*.toml")))
        raise SystemExit(f"no plan {name!r}: give one of {names}, or a file") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no plan: {error}") from error


def _step(row: Mapping[str, Any], plans: Sequence[str]) -> Step:
    """One step of a plan's file; raises TypeError if it says what a step does not have.

    plans: the file's own name last, and before it those that take a step of it.
    """
    for key in ("after", "needs"):
        if isinstance(row.get(key), str):
            raise TypeError(f"{key} = {row[key]!r}: write a list")
    lists = {key: tuple(row[key]) for key in ("after", "needs") if key in row}
    fields = {key: value for key, value in row.items() if key != "take"} | lists
    if "take" not in row:
        return Step(**fields)
    plan, _, name = str(row["take"]).rpartition("/")
    taken = [step for step in read_plan(plan, plans) if step.name == name]
    if not taken:
        raise TypeError(f"take = {row['take']!r}: plan {plan!r} has no such step")
    return replace(taken[0], **fields)


def check(steps: Sequence[Step], gpus: int) -> None:
    """Raises SystemExit if a step could never begin: see its messages. gpus: of the machine."""
    seen: set[str] = set()
    for step in steps:
        if step.name in seen:
            raise SystemExit(f"two steps are called {step.name!r}")
        if step.gpus > gpus:
            raise SystemExit(f"{step.name!r} takes {step.gpus} GPUs, and --gpus names {gpus}")
        for name in step.after:
            if name not in seen:
                raise SystemExit(f"{step.name!r} comes after {name!r}, which no step before it is")
        if step.alone and not step.gpus:
            raise SystemExit(f"{step.name!r} takes no GPU, so drop alone")
        seen.add(step.name)


@dataclass
class Running:
    """A step at work on `gpus`. began, end: seconds of the monotonic clock."""

    step: Step
    process: "subprocess.Popen[bytes]"
    gpus: tuple[str, ...]
    began: float
    end: float


@dataclass
class Node:
    """The queue over a machine's GPUs.

    Attributes:
        gpus: as CUDA_VISIBLE_DEVICES has them, one that is named twice takes two steps at a time.
        end: when all stops, by the monotonic clock. values: what commands are filled with.
        states: by step, `done`, `failed`, `stopped` or `left out`, and how long it took.
    """

    steps: Sequence[Step]
    gpus: Sequence[str]
    out: Path
    end: float
    values: Mapping[str, str]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    def run(self) -> bool:
        """Whether every step ended well."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "node.json"
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            self.states = {k: v for k, v in before.items() if v["state"] == "done"}
        waiting = [step for step in self.steps if step.name not in self.states]
        try:
            while waiting or self.running:
                waiting = self._begin(waiting)
                time.sleep(TICK)
                self._look()
        finally:
            for each in self.running:
                stop(each.process)
                self._end(each, "stopped")
        return all(self.states[step.name]["state"] == "done" for step in self.steps)

    def _begin(self, waiting: Sequence[Step]) -> list[Step]:
        """Starts what can be started; returns the others that may still begin."""
        others = []
        # For steps that wait for whole ones: later steps would take a GPU each for ever.
        kept = list[str]()
        for step in waiting:
            left = self.end - time.monotonic()
            if left < 60 * step.minutes or left <= 0:
                self._note(step, {"state": "left out", "minutes_left": round(left / 60, 1)})
                continue
            ready = step.ready(self.states, self.values)
            taken = self._free(step, kept)
            if ready and taken is not None:
                self._start(step, taken, left)
            else:
                others.append(step)
                if ready and step.whole:
                    kept += self._distinct(kept)[: step.gpus]
        return others

    def _distinct(self, kept: Sequence[str]) -> list[str]:
        """GPUs but for those that are kept free, in the order in which whole ones are taken."""
        used = {gpu for each in self.running for gpu in each.gpus}
        left = (gpu for gpu in dict.fromkeys(self.gpus) if gpu not in kept)
        return sorted(left, key=lambda gpu: (gpu in used, self.gpus.count(gpu)))

    def _free(self, step: Step, kept: Sequence[str]) -> tuple[str, ...] | None:
        """The GPUs that the step can have now, of those not kept free; None if it has to wait."""
        used = [gpu for each in self.running for gpu in each.gpus]
        if not step.gpus:
            idle = sum(not each.gpus for each in self.running) < WITHOUT_GPU
            return () if idle else None
        distinct = self._distinct(kept)
        if step.whole:
            unused = [gpu for gpu in distinct if gpu not in used]
            return tuple(unused[: step.gpus]) if len(unused) >= step.gpus else None
        taken_whole = {gpu for each in self.running if each.step.whole for gpu in each.gpus}
        room = {gpu: self.gpus.count(gpu) - used.count(gpu) for gpu in distinct}
        free = [gpu for gpu in distinct if room[gpu] and gpu not in taken_whole]
        # Where there is most room: a GPU named once is left to steps that want one whole.
        most = max(free, key=lambda gpu: (room[gpu], self.gpus.count(gpu)), default=None)
        return None if most is None else (most,)

    def _start(self, step: Step, gpus: tuple[str, ...], left: float) -> None:
        seconds = min(left, 60 * step.most) if step.most else left
        now = time.monotonic()
        words = step.words(seconds, self.values)
        names = ",".join(gpus) or None
        try:
            process = start(words, self.out / f"{step.name}.log", names, step.environment)
        except OSError as error:  # A profiler that is not here, say: other steps go on.
            self._note(step, {"state": "failed", "error": f"{words[0]}: {error.strerror}"})
            return
        self.running.append(Running(step, process, gpus, now, now + seconds))
        where = "no GPU" if names is None else f"GPU {names}"
        print(f"{step.name} begins on {where}, {left / 60:.1f} minutes are left", flush=True)

    def _look(self) -> None:
        """Notes what has ended, and stops what is over its time."""
        now = time.monotonic()
        for each in list(self.running):
            code = each.process.poll()
            if code is None and now < each.end:
                continue
            self.running.remove(each)
            stop(each.process)
            self._end(each, "stopped" if code is None else "failed" if code else "done")

    def _end(self, each: Running, state: str) -> None:
        seconds = round(time.monotonic() - each.began, 1)
        found = {"state": state, "seconds": seconds, "exit": each.process.poll()}
        self._note(each.step, found | {"gpus": each.gpus})

    def _note(self, step: Step, found: dict[str, Any]) -> None:
        self.states[step.name] = found | {"command": step.command}
        took = f" after {found['seconds']:.0f} s" if "seconds" in found else ""
        why = f", {found['error']}" if "error" in found else ""
        print(f"{step.name} {found['state']}{took}{why}", flush=True)
        text = json.dumps(self.states, indent=1) + "\n"
        (self.out / "node.json").write_text(text, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="benchmarks.common.node", description=__doc__.split("\n")[0]
    )
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--minutes", type=float, required=True, help="from now, for all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="models", help="the checkpoints' folder")
    parser.add_argument("--commit", default="unknown", help="what is measured")
    args = parser.parse_args(argv)
    steps = [step for plan in args.plans for step in read_plan(plan)]
    check(steps, len(set(args.gpus)))
    values = {"out": str(args.out), "models": args.models, "commit": args.commit}
    for step in steps:
        step.words(0, values)
        step.paths(values)
    node = Node(steps, args.gpus, args.out, began + 60 * args.minutes, values)
    return 0 if node.run() else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
