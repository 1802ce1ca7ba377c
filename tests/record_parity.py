"""Writes which model was compared with a dense reference under which policies, in which situation.

    KVX_CPU=1 .venv/bin/python tests/record_parity.py [--out NAME.json] [-k EXPRESSION]

It runs the tests of ``SITUATIONS``, all of them with those that wait for the night, and asks each
which policies its server had room for; a test that fails stands in the table as that.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common.about import about, command_line  # noqa: E402
from benchmarks.common.files import RESULTS, write_json  # noqa: E402

# By file and test: what it stands for, and its model where that is no parameter.
SITUATIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("test_architectures.py", "test_parity"): ("chunks, mixed batches, prefix hits", ""),
    ("test_architectures.py", "test_preempted"): ("preempted", ""),
    ("test_architectures.py", "test_transformers_code_where_vllm_has_its_own"): (
        "chunks, mixed batches, run by Transformers' code",
        "glm4",
    ),
    ("test_hybrids.py", "test_parity"): ("chunks, mixed batches, prefix hits", ""),
    ("test_hybrids.py", "test_preempted"): ("preempted", ""),
    ("test_hybrids.py", "test_wrapped"): (
        "chunks, mixed batches, prefix hits, text in a wrapper",
        "",
    ),
    ("test_speed_on_hybrids.py", "test_parity"): ("chunks, mixed batches, prefix hits", ""),
    ("test_speed_on_hybrids.py", "test_preempted"): ("preempted", ""),
    ("test_selection_on_hybrids.py", "test_parity"): ("chunks, mixed batches, prefix hits", ""),
    ("test_selection_on_hybrids.py", "test_preempted"): ("preempted", ""),
    ("test_tensor_parallel.py", "test_tp2_of_other_architectures"): ("TP 2", ""),
    ("test_tensor_parallel.py", "test_tp2_of_a_hybrid"): ("TP 2, prefix hits", "gemma2"),
    ("test_wrappers.py", "test_parity"): (
        "chunks, mixed batches, prefix hits, text in a wrapper",
        "",
    ),
}


class Recorder:
    """Notes outcomes, and the policies that each test's server has room for."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._policies: list[str] = []

    def pytest_sessionstart(self) -> None:
        """Behind conftest.py, which settles what imports read, and before any test module."""
        from support import parity

        room_for = parity.room_for

        def noted(policies: Sequence[Any]) -> dict[str, Any]:
            found = room_for(policies)
            self._policies += found["kv_layout"]
            return found

        parity.room_for = noted

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = (yield).get_result()
        if call.when == "setup":
            self._policies.clear()
        if report.when != "call" and report.passed:
            return
        situation, model = SITUATIONS[item.path.name, item.originalname]
        self.rows.append(
            {
                "model": model or item.callspec.params["name"],
                "situation": situation,
                "outcome": report.outcome,
                "policies": sorted({"full", *self._policies}),
            }
        )
        row = self.rows[-1]
        done = f"{len(self.rows)}: {row['model']}, {situation}: {report.outcome}"
        print(f"\n{done}, {report.duration:.0f} s", file=sys.stderr)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "tests/cpu-parity.json")
    parser.add_argument("-k", default="", help="of these tests alone, as pytest takes it")
    parser.add_argument("--add", action="store_true", help="to the rows that --out has")
    args = parser.parse_args(argv)
    before: list[dict[str, Any]] = []
    if args.add:
        if not args.out.is_file():
            parser.error(f"--add: there is no {args.out} to add to")
        before = json.loads(args.out.read_text())["rows"]
    recorder = Recorder()
    tests = [f"{ROOT}/tests/engine/{file}::{test}" for file, test in SITUATIONS]
    chosen = ["-k", args.k] if args.k else []
    code = pytest.main(["-q", "-n", "0", "--nightly", *chosen, *tests], plugins=[recorder])
    what = (
        "Every model that is compared with a dense reference on transformers' modules, in float32 "
        "on tiny random checkpoints: the policies of its server, by situation."
    )
    if not recorder.rows:
        print(f"no test ran, and {args.out} stays as it is", file=sys.stderr)
        return int(code) or 1
    keys = [(row["model"], row["situation"], row["policies"]) for row in recorder.rows]
    before = [r for r in before if (r["model"], r["situation"], r["policies"]) not in keys]
    rows = sorted(
        [*before, *recorder.rows], key=lambda row: (row["model"], row["situation"], row["policies"])
    )
    command = command_line("tests/record_parity.py", argv)
    write_json(args.out, {"about": about(what, command, packages=("transformers",)), "rows": rows})
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
