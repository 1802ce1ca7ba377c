"""Changes one place of the package at a time, and says which tests notice.

    KVX_CPU=1 .venv/bin/python tests/mutants.py --count 40 --seed 0 --output FILE

Places of policy/, cache/ and worker/ are drawn from a seed. Each is changed in a copy of the
checkout, where the rooms of tests run one after another until one fails: what is quick first, then
the engines, and then, for what survived, the tests of the night. A mutant that only the night kills
is one that the suite of every day lets through.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("policy", "cache", "worker")
QUICK = ("tests/policy", "tests/cache", "tests/worker", "tests/scores", "tests/indexes")
SLOW = ("tests/simulation", "tests/server", "tests/engine")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutate(ast.NodeTransformer):
    """Changes the place of number `chosen`; without one it counts them."""

    def __init__(self, chosen: int = -1) -> None:
        self.chosen, self.count, self.what = chosen, 0, ""

    def _is_it(self, node: ast.AST, what: str) -> bool:
        self.count += 1
        if self.count - 1 != self.chosen:
            return False
        self.what = f"line {getattr(node, 'lineno', 0)}: {what}"
        return True

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if type(node.ops[0]) in SWAPS and self._is_it(node, f"operator of {ast.unparse(node)}"):
            node.ops[0] = SWAPS[type(node.ops[0])]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in SWAPS and self._is_it(node, f"operator of {ast.unparse(node)}"):
            node.op = SWAPS[type(node.op)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node, f"operator of {ast.unparse(node)}"):
            node.op = SWAPS[type(node.op)]()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._is_it(node, f"{node.value} + 1"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        if type(node.value) is bool and self._is_it(node, f"not {node.value}"):
            return ast.copy_location(ast.Constant(not node.value), node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node, f"not ({ast.unparse(node.test)})"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node


def places() -> Iterator[tuple[Path, int]]:
    """Every file and number of a place that can be changed."""
    for room in ROOMS:
        for path in sorted((ROOT / "vllm_kvx" / room).rglob("*.py")):
            counter = Mutate()
            counter.visit(ast.parse(path.read_text()))
            yield from ((path.relative_to(ROOT), number) for number in range(counter.count))


def fails(tree: Path, tests: tuple[str, ...], *options: str) -> str:
    """The first of `tests` that fails in `tree`; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    found = [each for each in tests if (tree / each).exists()]
    try:
        done = subprocess.run(
            [*command, *found, *options],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=3600,
        )
    except subprocess.TimeoutExpired:
        return "a test hangs"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else f"exit code {done.returncode}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="tests/mutants.py")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    drawn = random.Random(args.seed).sample(list(places()), args.count)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        no_more = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=no_more)
        for path, number in drawn:
            source, began = (ROOT / path).read_text(), time.monotonic()
            change = Mutate(number)
            changed = ast.unparse(ast.fix_missing_locations(change.visit(ast.parse(source))))
            (tree / path).write_text(changed + "\n")
            result = {"file": str(path), "change": change.what, "killed": None, "by": ""}
            for when, tests, options in (
                ("day", QUICK, ()),
                ("day", SLOW, ()),
                ("night", (*QUICK, *SLOW), ("--nightly",)),
            ):
                if by := fails(tree, tests, *options):
                    result |= {"killed": when, "by": by}
                    break
            (tree / path).write_text(source)
            result["seconds"] = round(time.monotonic() - began)
            results.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
            if args.output:
                args.output.write_text(json.dumps(results, indent=1) + "\n")
    for when in ("day", "night", None):
        print(f"killed by {when}: {sum(each['killed'] == when for each in results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
