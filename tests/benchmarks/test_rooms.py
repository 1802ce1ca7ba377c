"""The rooms of benchmarks/: which may use which."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# From the ground up: each room may use those before it.
FLOORS = [{"common"}, {"checkpoint"}, {"engine"}, {"serving"}, {"report"}, {"ops"}, {"answers"}]
FLOORS += [{"tuning"}]
APART = {("ops", "engine"), ("ops", "serving"), ("tuning", "engine"), ("answers", "engine")}


def modules(folder: Path) -> dict[Path, set[str]]:
    """By file the modules of this repository that it imports."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
        found[path] = names
    return found


def test_rooms_use_rooms_below_them() -> None:
    """So there is no circle; and only the report looks at several rooms' results."""
    order = [room for floor in FLOORS for room in floor]
    folders = {path.name for path in (ROOT / "benchmarks").iterdir() if list(path.glob("*.py"))}
    assert folders - {"__pycache__"} == set(order)
    used = set()
    for path, names in modules(ROOT / "benchmarks").items():
        room = path.relative_to(ROOT / "benchmarks").parts[0]
        parts = [name.split(".") for name in names if name.startswith("benchmarks.")]
        used |= {(room, part[1]) for part in parts if part[1] in order and part[1] != room}
    assert {pair for pair in used if order.index(pair[0]) < order.index(pair[1])} == set()
    assert used & APART == set()


def test_deploy_may_use_benchmarks_and_not_the_other_way_round() -> None:
    for path, names in modules(ROOT / "benchmarks").items():
        assert not any(name.split(".")[0] in ("deploy", "tests") for name in names), path
