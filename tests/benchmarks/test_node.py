"""A queue of commands over the GPUs of a machine, with commands of no weight."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.answers import kvpress_yardstick, reuse, reuse_answers, sparse_prefill
from benchmarks.common import node
from benchmarks.common.node import PLANS, Step, check, main, read_plan
from benchmarks.engine import compare, own_drafts, ranks
from benchmarks.ops import int8_cache, retrieval_step
from benchmarks.serving import disaggregated, offloading, turns, within
from benchmarks.serving import load as serving
from benchmarks.tuning import sweep as speed_sweep
from benchmarks.tuning.trials import options_of
from vllm_kvx import cli

ROOT = PLANS.parent.parent
NAMES = sorted(file.stem for file in PLANS.glob("*.toml"))
VALUES = {"out": "OUT", "models": "MODELS", "commit": "c"}
WRITE = (
    'python -c "import os, sys, pathlib; pathlib.Path(sys.argv[1]).write_text('
    "os.environ.get('CUDA_VISIBLE_DEVICES', '') + os.environ.get('MORE', ''))\" {out}/NAME"
)


def plan(folder: Path, *steps: dict[str, Any]) -> str:
    lines = []
    for step in steps:
        lines += ["[[step]]", *(f"{key} = {json.dumps(value)}" for key, value in step.items())]
    file = folder / "plan.toml"
    file.write_text("\n".join(lines).replace('{"MORE": "1"}', '{ MORE = "1" }'))
    return str(file)


def states(out: Path) -> dict[str, str]:
    found = json.loads((out / "node.json").read_text())
    return {name: each["state"] for name, each in found.items()}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "TICK", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_steps_run_in_order_on_their_gpus(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = plan(
        tmp_path,
        {"name": "a", "command": WRITE.replace("NAME", "a")},
        {"name": "fails", "command": "python -c 'raise SystemExit(3)'"},
        {"name": "long", "command": WRITE.replace("NAME", "long"), "minutes": 99},
        {
            "name": "sums up",
            "command": WRITE.replace("NAME", "sum"),
            "after": ["a", "fails", "long"],
            "gpus": 0,
            "environment": {"MORE": "1"},
        },
    )
    assert main([file, "--gpus", "5", "--minutes", "1", "--out", str(out)]) == 1
    assert states(out) == {"a": "done", "fails": "failed", "long": "left out", "sums up": "done"}
    assert (out / "a").read_text() == "5" and (out / "sum").read_text() == "1"
    assert not (out / "long").exists()
    # What ended well is not done again.
    (out / "a").unlink()
    main([file, "--gpus", "5", "--minutes", "1", "--out", str(out)])
    assert not (out / "a").exists() and states(out)["fails"] == "failed"


def test_the_end_stops_what_runs_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    out = tmp_path / "out"
    pid = out / "pid"

    def clock() -> float:
        """The end comes once the child is there."""
        return time.monotonic() + 3600 * (pid.exists() and bool(pid.read_text()))

    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    file = plan(tmp_path, {"name": "waits", "command": f"python {script} {{out}}/pid"})
    assert main([file, "--minutes", "60", "--out", str(out)]) == 1
    assert states(out) == {"waits": "stopped"}
    child = Path("/proc") / pid.read_text()
    until = time.monotonic() + 60
    while child.exists() and " Z " not in (child / "stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_gpu_named_twice_takes_two(tmp_path: Path) -> None:
    """Each waits for the other's file: one at a time they would never end."""
    script = tmp_path / "meet.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:])\n"
        "mine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
    )
    steps = [
        {"name": a, "command": f"python {script} {{out}}/{a} {{out}}/{b}"} for a, b in ("xy", "yx")
    ]
    out = tmp_path / "out"
    arguments = [plan(tmp_path, *steps), "--gpus", "0", "0", "--minutes", "2", "--out", str(out)]
    assert main(arguments) == 0


def test_a_step_of_two_gpus_waits_for_both_and_is_not_overtaken(tmp_path: Path) -> None:
    script = tmp_path / "in_turn.py"
    script.write_text(
        "import os, sys, time\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    print(sys.argv[2], os.environ['CUDA_VISIBLE_DEVICES'], file=file, flush=True)\n"
        "    time.sleep(float(sys.argv[3]))\n"
        "    print('end', sys.argv[2], file=file, flush=True)\n"
    )
    lasts = {"short": 0, "long": 1.5, "both": 0, "later": 0}
    steps: list[dict[str, Any]] = [
        {"name": name, "command": f"python {script} {{out}}/log {name} {seconds}"}
        for name, seconds in lasts.items()
    ]
    steps[2]["gpus"] = 2
    out = tmp_path / "out"
    arguments = ["--gpus", "3", "4", "--minutes", "2", "--out", str(out)]
    assert main([plan(tmp_path, *steps), *arguments]) == 0
    lines = (out / "log").read_text().splitlines()
    assert lines[-4:] == ["both 3,4", "end both", "later 3", "end later"]
    assert json.loads((out / "node.json").read_text())["both"]["gpus"] == ["3", "4"]


def test_a_step_alone_has_its_gpu_whole(tmp_path: Path) -> None:
    """A GPU that is named twice takes two others at a time, none of them beside it."""
    script = tmp_path / "counts.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "running = pathlib.Path(sys.argv[1])\n"
        "running.mkdir(exist_ok=True)\n"
        "mine = running / sys.argv[2]\n"
        "mine.touch()\n"
        "time.sleep(0.3)\n"
        "print(sorted(each.name for each in running.iterdir()))\n"
        "mine.unlink()\n"
    )
    steps: list[dict[str, Any]] = [
        {"name": name, "command": f"python {script} {{out}}/running {name}"} for name in "abcd"
    ]
    steps[1]["alone"] = True
    out = tmp_path / "out"
    arguments = ["--gpus", "0", "0", "--minutes", "2", "--out", str(out)]
    assert main([plan(tmp_path, *steps), *arguments]) == 0
    said = {name: (out / f"{name}.log").read_text().splitlines()[-1] for name in "abcd"}
    assert said["a"] == "['a']" and said["b"] == "['b']"


def test_a_gpu_named_once_is_left_to_steps_alone(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"name": name, "command": WRITE.replace("NAME", name)} for name in "ab"
    ]
    steps[1]["alone"] = True
    out = tmp_path / "out"
    arguments = ["--gpus", "0", "1", "1", "--minutes", "2", "--out", str(out)]
    assert main([plan(tmp_path, *steps), *arguments]) == 0
    assert [(out / name).read_text() for name in "ab"] == ["1", "0"]


def test_a_step_that_waits_for_a_whole_gpu_leaves_the_others(tmp_path: Path) -> None:
    """Those behind it go on where it does not wait: at the GPU that has more names."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "for name in sys.argv[2:]:\n"
        "    while not pathlib.Path(name).exists(): time.sleep(0.01)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
    )
    # Before the first step ends, those behind the second one have to have ended.
    after = {"a": "xy", "held": "b", "b": "", "x": "", "y": ""}
    steps: list[dict[str, Any]] = []
    for name, others in after.items():
        files = " ".join(f"{{out}}/{each}" for each in (name, *others))
        steps.append({"name": name, "command": f"python {script} {files}", "alone": name in "ab"})
    out = tmp_path / "out"
    arguments = ["--gpus", "1", "1", "0", "--minutes", "1", "--out", str(out)]
    assert main([plan(tmp_path, *steps), *arguments]) == 0
    found = json.loads((out / "node.json").read_text())
    gpus = {"a": ["0"], "held": ["1"], "b": ["0"], "x": ["1"], "y": ["1"]}
    assert {name: each["gpus"] for name, each in found.items()} == gpus


def test_what_a_step_needs_may_come_later(tmp_path: Path) -> None:
    steps = [
        {"name": "asks", "command": "true", "needs": ["{models}/late"]},
        {"name": "brings", "command": f"python -c \"open('{tmp_path}/late', 'w')\""},
        {"name": "in vain", "command": "true", "needs": ["{models}/never"], "minutes": 0.03},
    ]
    out = tmp_path / "out"
    arguments = ["--minutes", "0.05", "--out", str(out), "--models", str(tmp_path)]
    assert main([plan(tmp_path, *steps), *arguments]) == 1
    assert states(out) == {"brings": "done", "asks": "done", "in vain": "left out"}


def test_a_step_of_another_plan(tmp_path: Path) -> None:
    more = {"alone": True, "needs": ["{models}/x"], "most": 3}
    (step,) = read_plan(plan(tmp_path, {"take": "quantized/int8-engine", **more}))
    (taken,) = [each for each in read_plan("quantized") if each.name == "int8-engine"]
    assert (step.command, step.minutes) == (taken.command, taken.minutes)
    assert step.alone and step.needs == ("{models}/x",) and step.most == 3


def test_a_program_that_is_not_there_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        {"name": "profile", "command": "no-such-profiler python3 -m x"},
        {"name": "later", "command": "true", "after": ["profile"]},
    ]
    out = tmp_path / "out"
    assert main([plan(tmp_path, *steps), "--minutes", "1", "--out", str(out)]) == 1
    states = json.loads((out / "node.json").read_text())
    assert {name: each["state"] for name, each in states.items()} == {
        "profile": "failed",
        "later": "done",
    }
    assert "profile failed, no-such-profiler: No such file" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_sound(name: str) -> None:
    """Every command can be filled in, and its module is there."""
    steps = read_plan(name)
    check(steps, 2)
    for step in steps:
        words = step.words(1200, VALUES)
        assert words[:2] == [sys.executable, "-m"], step.name
        module = words[2].replace(".", "/")
        paths = (ROOT / f"{module}.py", ROOT / module / "__main__.py")
        assert module == "pytest" or any(path.exists() for path in paths), step.name
        assert not [word for word in words if "{{" in word or "}}" in word]
        for word in words:
            if word.startswith("{"):
                json.loads(word)


# Without a parser that is called alone.
PLAIN = ("benchmarks.checkpoint.yarn", "benchmarks.ops.retrieval", "benchmarks.ops.saliency")
# What reads the command line of a step's module.
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "benchmarks.answers.kvpress_yardstick": kvpress_yardstick.parse_args,
    "benchmarks.answers.reuse": reuse.parse_args,
    "benchmarks.answers.reuse_answers": reuse_answers.parse_args,
    "benchmarks.answers.sparse_prefill": sparse_prefill.parse_args,
    "benchmarks.engine.compare": compare.parse_args,
    "benchmarks.engine.own_drafts": own_drafts.parse_args,
    "benchmarks.engine.ranks": ranks.parse_args,
    "benchmarks.ops.int8_cache": int8_cache.parse_args,
    "benchmarks.ops.retrieval_step": retrieval_step.parse_args,
    "benchmarks.serving": serving.parse_args,
    "benchmarks.serving.disaggregated": disaggregated.parse_args,
    "benchmarks.serving.offloading": offloading.parse_args,
    "benchmarks.serving.turns": turns.parse_args,
    "benchmarks.serving.within": within.parse_args,
}


@pytest.mark.parametrize("name", NAMES)
def test_plans_name_options_that_there_are(name: str) -> None:
    for step in read_plan(name):
        module, *arguments = step.words(1200, VALUES)[2:]
        if module in PARSERS:
            PARSERS[module](arguments)
        elif module == "benchmarks.tuning.sweep":
            args = speed_sweep.parse_args(arguments)
            runs = speed_sweep.runs_of(args)
            assert len({name for name, *_ in runs}) == len(runs) > 1
            for name, cutoff, options in runs:
                assert name.endswith(f"-{cutoff}")
                given = [*shlex.split(args.data), *shlex.split(args.tune), *options]
                options_of("MODEL", cutoff, Path("OUT"), given)
        elif module == "vllm_kvx.cli":
            cli.parser().parse_args(arguments)
        elif module == "pytest":
            paths = [word for word in arguments if word.startswith("tests/")]
            assert paths and all((ROOT / path).exists() for path in paths), step.name
        else:
            assert module in PLAIN, module


def test_clear_errors(tmp_path: Path) -> None:
    step = Step("a", "python -m x")
    with pytest.raises(SystemExit, match="two steps are called 'a'"):
        check([step, step], 1)
    with pytest.raises(SystemExit, match="'a' comes after 'b', which no step before it is"):
        check([Step("a", "true", after=("b",)), Step("b", "true")], 1)
    with pytest.raises(SystemExit, match=r"no plan 'all': give one of .*turns"):
        read_plan("all")
    with pytest.raises(SystemExit, match=r"is no plan: .*'gpu'"):
        read_plan(plan(tmp_path, {"name": "a", "command": "true", "gpu": True}))
    stray = tmp_path / "stray.toml"
    stray.write_text('name = "lost"\n[[step]]\nname = "a"\ncommand = "true"\n')
    with pytest.raises(SystemExit, match=r"is no plan: what is not in a \[\[step\]\]: name"):
        read_plan(str(stray))
    stray.write_text('[step]\nname = "a"\ncommand = "true"\n')
    with pytest.raises(SystemExit, match=r"is no plan: a step begins with \[\[step\]\]"):
        read_plan(str(stray))
    with pytest.raises(SystemExit, match="'a' takes 2 GPUs, and --gpus names 1"):
        check([Step("a", "true", gpus=2)], 1)
    with pytest.raises(SystemExit, match=r"is no plan: .*plan 'quantized' has no such step"):
        read_plan(plan(tmp_path, {"take": "quantized/int9"}))
    with pytest.raises(SystemExit, match=r"is no plan: needs = 'x': write a list"):
        read_plan(plan(tmp_path, {"name": "a", "command": "true", "needs": "x"}))
    itself = plan(tmp_path, {"take": f"{tmp_path}/plan.toml/a"})
    with pytest.raises(SystemExit, match=r"is no plan: it takes a step of itself"):
        read_plan(itself)
    of_none = plan(tmp_path, {"name": "a", "command": "true", "needs": ["{model}/x"]})
    with pytest.raises(SystemExit, match=r"a: KeyError.'model'. in what it needs"):
        main([of_none, "--minutes", "1", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="'a' takes no GPU, so drop alone"):
        check([Step("a", "true", gpus=0, alone=True)], 1)
    with pytest.raises(SystemExit, match=r"a: KeyError.'model'. in its command"):
        Step("a", "python -m x {model}").words(1, {})
