"""What works where neither vLLM nor what comes with it is installed: names, counts and the help."""

import subprocess
import sys
from importlib import metadata

# In front of all other finders: the packages are not there.
GONE = """
import sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "vllm", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
"""


def run(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", GONE + code]
    return subprocess.run(command, capture_output=True, text=True)


def test_they_are_gone() -> None:
    for package in ("torch", "transformers", "vllm"):
        done = run(f"import {package}")
        assert done.returncode == 1 and f"No module named '{package}'" in done.stderr


def test_policies_are_read_and_counted() -> None:
    done = run(
        """
import vllm_kvx.cli, vllm_kvx.config.settings
import vllm_kvx.records.layers, vllm_kvx.records.tuned_weights
from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of

policy = parse_policy("speed-4+snapkv:kv_rate=0.5,kv_floor=0")
policy.check_composition()
kept = storage_of(policy, 100, 0, 16, 8).kept
print(layout_of([policy], 8).later_starts, kept, "snapkv" in METHODS)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(4,) 50 True\n", "")


def test_tasks_are_made_and_scored() -> None:
    done = run(
        """
import random
from vllm_kvx.tools.tasks.table import tasks_named

(task,) = tasks_named(["niah_single_1"])
sample = task.make(random.Random(0), 3)
print(task.score(f"It is {sample.references[0]}.", sample))
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0\n", "")


def test_help_is_there() -> None:
    commands = ("calibrate", "diagnose", "evaluate", "tune-speed", "build-ops", "doctor")
    commands += ("policies", "recommend")
    for argv in (["--help"], *([command, "--help"] for command in commands)):
        done = run(f"from vllm_kvx.cli import main\nmain({argv!r})")
        assert done.returncode == 0 and done.stdout.startswith("usage: vllm-kvx"), done.stderr
        assert not done.stderr


def test_the_version_is_the_packages() -> None:
    done = run("from vllm_kvx.cli import main\nmain(['--version'])")
    assert (done.returncode, done.stdout) == (0, f"vllm-kvx {metadata.version('vllm-kvx')}\n")


def test_tools_say_what_to_install() -> None:
    for argv in (
        ["calibrate", "m", "--prompts", "f"],
        ["calibrate", "m", "--method", "structkv"],
        ["diagnose", "m"],
        ["diagnose", "m", "--method", "speed"],
        ["serve", "m", "--kv-policy", "speed-4"],
    ):
        done = run(f"from vllm_kvx.cli import main\nsys.exit(main({argv!r}))")
        (line,) = done.stderr.splitlines()
        package = "vllm" if argv[0] == "serve" else "torch"
        assert line.startswith(f"vllm-kvx {argv[0]}: error: {package} is missing"), line
        assert line.endswith("pip install 'vllm-kvx[cuda]' or [cpu]"), line
        assert done.returncode == 2 and not done.stdout
