"""The night's command: what it runs, and that a failure of any part is seen at its end."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# In the place of the parts: they say what they were called with, and end as they are told.
SETUP = f"""
kvx_root="$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)"
kvx_python="{sys.executable}"
kvx_setup() {{ echo "set up: $1"; }}
kvx_has() {{ true; }}
"""
RUN = """
echo "$*" >>called
case "$*" in
*--soak-output*) echo "FAILED tests/soak/test_x.py::test_y - blocks"; exit "${SOAK:-0}" ;;
*) echo "FAILED tests/a.py::test_b"; exit "${TESTS_END:-0}" ;;
esac
"""
FUZZ = """
import os, sys
print("\\rspeed: 1 of 2 seeds, 0 s", end="")
print("\\nspeed, seed 7: a case")
open("../called", "a").write(" ".join(["fuzz", *sys.argv[1:]]) + "\\n")
sys.exit(int(os.environ.get("FUZZ", "0")))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("deploy", "tests/simulation"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "deploy/setup.sh").write_text(SETUP)
    (tmp_path / "tests/run.sh").write_text(RUN)
    (tmp_path / "tests/simulation/__init__.py").touch()
    (tmp_path / "tests/simulation/fuzz.py").write_text(FUZZ)
    shutil.copy(ROOT / "tests/nightly.sh", tmp_path / "tests")
    return tmp_path


def night(clone: Path, *args: str, **variables: Any) -> tuple[int, str, list[str]]:
    """Its exit status, what it prints, and the calls of its parts."""
    env = {"PATH": "/usr/bin:/bin", **{name: str(value) for name, value in variables.items()}}
    command = ["bash", str(clone / "tests/nightly.sh"), *args]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout, (clone / "called").read_text().splitlines()


def test_a_good_night(clone: Path) -> None:
    status, said, called = night(clone)
    (folder,) = (clone / "build/nightly").iterdir()
    assert status == 0 and said.startswith("set up: test\n") and "FAILED" not in said
    tests, soak, fuzz = called
    assert tests == "--nightly tests --ignore=tests/soak"
    soaks = f"--requests 1000 --soak-output {folder}/soak.json tests/soak"
    assert soak == f"-n 0 --nightly {soaks}"
    today = time.time() // 86400
    _, servers, seeds, first, out = fuzz.split()
    assert (servers, seeds, out) == ("all", "50", f"{folder}/fuzz.json")
    assert int(first) // 50 in (today, today - 1)
    assert {path.name for path in folder.iterdir()} == {"tests.log", "soak.log", "fuzz.log"}


@pytest.mark.parametrize("part", ["TESTS_END", "SOAK", "FUZZ"])
def test_each_part_may_fail(clone: Path, part: str) -> None:
    """The others run none the less, and what failed is named last."""
    status, said, called = night(clone, **{part: 3})
    assert status == 1 and len(called) == 3 and said.count("passed after") == 2
    end = said[said.rindex("== ") :].splitlines()
    assert (
        end
        == {
            "TESTS_END": ["== tests FAILED", "FAILED tests/a.py::test_b"],
            "SOAK": ["== soak FAILED", "FAILED tests/soak/test_x.py::test_y - blocks"],
            "FUZZ": ["== fuzz FAILED", "speed, seed 7: a case"],
        }[part]
    )


def test_all_parts_may_fail(clone: Path) -> None:
    status, said, _ = night(clone, TESTS_END=1, SOAK=1, FUZZ=1)
    assert status == 1
    assert [line for line in said.splitlines() if line.endswith(" FAILED")] == [
        "== tests FAILED",
        "== soak FAILED",
        "== fuzz FAILED",
    ]


def test_a_part_that_names_nothing_shows_its_end(clone: Path) -> None:
    (clone / "tests/run.sh").write_text("seq 1 100; exit 4")
    (clone / "called").touch()
    status, said, _ = night(clone)
    assert status == 1 and "\n100\n" in said and "\n81\n" in said and "\n80\n" not in said


def test_a_small_night(clone: Path) -> None:
    folder = clone / "night"
    sizes = ["--requests", "8", "--servers", "fastkv", "--seeds", "2", "--first", "11"]
    tests = "-n 0 tests/policy -k spec"
    status, _, called = night(clone, *sizes, str(folder), "--", *tests.split())
    assert status == 0
    assert called[0] == f"--nightly {tests}"
    assert f"--requests 8 --soak-output {folder}/soak.json" in called[1]
    assert called[2] == f"fuzz fastkv 2 11 {folder}/fuzz.json"


def test_the_options_it_gives_are_those_of_the_tests() -> None:
    """And every option that its head explains is one that it reads."""
    text = (ROOT / "tests/nightly.sh").read_text()
    for name in ("requests", "servers", "seeds", "first"):
        assert f"#   --{name} " in text
        assert f"--{name} |" in text or f"--{name})" in text
    for name in ("--nightly", "--requests", "--soak-output"):
        assert f'"{name}"' in (ROOT / "tests/support/options.py").read_text()
