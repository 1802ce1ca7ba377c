"""What may import what, how large a file may be, and who may know a method by its class.

Read from the source, without importing it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_kvx.policy.methods.table import METHODS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm_kvx"
MAX_LINES = 400


class Rule(NamedTuple):
    """What a part of the package may import beside its own modules, and why no more."""

    may: tuple[str, ...]
    why: str


# By part: a folder of the package, or a module at its top. An entry of `may` is a part, or a
# module of one with all below it.
RULES = {
    "errors": Rule((), "the ground floor: an exception"),
    "arguments": Rule((), "types of arguments that several commands have"),
    "cache_folder": Rule(("errors",), "where measurements are kept, for tools and servers alike"),
    "policy": Rule((), "the ground floor: counts and names, which both sides of the engine ask"),
    "settings": Rule(("policy", "spelling"), "what additional_config means, read in every process"),
    "equations": Rule(("policy",), "the papers' math in plain torch, for tools and operators"),
    "ops": Rule(
        ("equations", "errors", "cache_folder", "arguments"),
        "kernels take tensors and numbers, not requests",
    ),
    "scores": Rule(("ops", "equations", "policy"), "the device half of propagate and retain"),
    "indexes": Rule(("ops", "equations", "policy"), "the device half of retrieve"),
    "models": Rule(
        ("environment",), "a model runs passes and knows no policy; the worker tells it what to run"
    ),
    "cache": Rule(
        ("policy", "indexes", "ops.paged", "settings", "quoting"),
        "the scheduler counts blocks; an index says how many bytes of a page are its own",
    ),
    "worker": Rule(
        (
            *("models", "cache", "policy", "scores", "indexes", "ops", "equations", "settings"),
            *("seams", "environment"),
        ),
        "the device's side of a step, above all that it drives",
    ),
    "calibration": Rule(
        (
            *("policy", "equations", "settings", "errors", "cache_folder"),
            *("evaluation.tasks", "evaluation.prompts", "arguments"),
        ),
        "tools measure models without an engine, by lookups whose answers are known",
    ),
    "evaluation": Rule(
        ("policy", "calibration", "settings", "errors", "cache_folder", "cpu_mode", "arguments"),
        "asks engines from outside, as a user does; the rest is counting",
    ),
    "tuning": Rule(
        (
            *("policy", "settings", "equations", "calibration", "errors", "cache_folder"),
            "arguments",
            *("evaluation.engine", "evaluation.options"),
        ),
        "makes weights for a policy, with transformers; a record beside them says which",
    ),
    "server": Rule(
        (
            *("policy", "calibration", "cache", "settings", "errors", "models.registry"),
            *("spelling", "evaluation.records", "tuning.record", "environment"),
            *("quoting", "wording", "wrapping"),
            *("ops.retrieval.backends", "ops.retrieval.cuda", "ops.paged"),
        ),
        "says at start what runs: architectures by name, and which operators there are",
    ),
    "plugin": Rule(
        ("policy", "settings", "server", "seams", "errors", "cpu_mode", "wording", "wrapping"),
        "what vLLM loads: it only wires",
    ),
    "batch": Rule(
        ("errors", "arguments", "serve", "policy", "spelling"),
        "asks a server over HTTP; of a policy it reads the name alone",
    ),
    "serve": Rule(
        ("cpu_mode", "environment", "errors"), "becomes vLLM's command, and imports nothing of it"
    ),
    "schema": Rule(
        ("policy", "settings", "spelling", "batch.lines"),
        "what users write, as JSON schemas of what reads it",
    ),
    "policies": Rule(("policy", "schema"), "shows what policies there are"),
    "doctor": Rule(
        (
            *("policy", "settings", "spelling", "cpu_mode", "plugin", "seams", "cache_folder"),
            *("calibration", "server", "cache.group_size", "indexes", "models.registry"),
            *(
                "ops.retrieval.backends",
                "ops.retrieval.costs",
                "ops.retrieval.crossover",
                "arguments",
                "environment",
            ),
        ),
        "asks what servers and tools ask, before either runs; nothing asks it",
    ),
    "cli": Rule(
        (
            *("policy", "errors", "calibration"),
            *("evaluation.options", "tuning.options", "doctor.options", "batch.options"),
            *("ops.build", "policies", "serve"),
        ),
        "reads arguments before it imports a tool",
    ),
    "cpu_mode": Rule(("environment",), "a platform plugin, loaded before all else"),
    "seams": Rule(("environment",), "what every part needs of vLLM; finds its classes by name"),
    "environment": Rule((), "what a variable means; read in every process"),
    "quoting": Rule((), "how a client's text stands in a log and in messages"),
    "wrapping": Rule((), "how something of ours takes the place of a function of vLLM's"),
    "wording": Rule((), "messages in the words of flags, or of Python"),
    "spelling": Rule((), "which keys resemble ours, at start and in a request"),
}
# Importing these is for the modules named alone: (part, package) -> modules, or None for none.
OUTSIDE = {
    ("policy", "vllm"): (),
    ("policy", "torch"): (),
    ("policy", "numpy"): ("policy.storage",),
    ("errors", "vllm"): (),
    ("equations", "vllm"): (),
}
# Parts that import these in functions alone: at import time they cost seconds, or a circle.
LATE = {"plugin": ("policy", "settings", "server", "seams"), "cli": ("calibration",)}
# Modules of these that cost nothing: they read options.
LIGHT = ("calibration.options",)

# What is not yet so: an entry goes when its cause does, and none comes.
KNOWN: dict[str, dict[str, str]] = {"arrows": {}, "cycles": {}, "methods": {}, "lines": {}}


class Import(NamedTuple):
    """`module` imports `target`: names without the package's own; late: within a function."""

    module: str
    target: str
    late: bool


FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def name_of(path: Path) -> str:
    """`worker.prefill.chunks`; a package is its folder, the top one empty."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(tree: ast.AST, late: bool = False) -> Iterator[tuple[str, bool]]:
    """Every dotted name that a module imports, types included, and whether in a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", late) for alias in node.names)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imported(node, late or function)
    if isinstance(tree, ast.Call) and ast.unparse(tree.func).endswith("import_module"):
        text = "".join(
            str(part.value) for part in ast.walk(tree.args[0]) if isinstance(part, ast.Constant)
        )
        yield text.rstrip("."), late


def own_imports() -> list[Import]:
    """Imports of one of the package's modules by another."""
    found = []
    for module, tree in TREES.items():
        for dotted, late in imported(tree):
            head, _, target = dotted.partition(".")
            if head != PACKAGE:
                continue
            # The last name may be a function or a class.
            while target not in MODULES:
                target = target.rpartition(".")[0]
            if target != module:
                found.append(Import(module, target, late))
    return found


def part_of(module: str) -> str:
    return module.partition(".")[0]


def is_within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


def assert_known(kind: str, found: set[str], what: str) -> None:
    """Nothing was found but what is known, and all that is known was found."""
    known = set(KNOWN[kind])
    assert not found - known, f"{what}: {sorted(found - known)}"
    assert not known - found, f"take out of KNOWN what is not so any more: {sorted(known - found)}"


def test_every_part_has_a_rule() -> None:
    parts = {part_of(module) for module in MODULES if module}
    assert parts - set(RULES) == set(), "give it a row in RULES"
    assert set(RULES) - parts == set(), "a rule of what there is not"
    assert all(rule.why for rule in RULES.values())


def test_imports_follow_the_arrows() -> None:
    wrong = set()
    for module, target, late in own_imports():
        part, aim = part_of(module), part_of(target)
        if not module or not target or aim == part:
            continue  # The package's own docstring and version; a part's own modules.
        allowed = any(is_within(target, each) for each in RULES[part].may)
        early = not late and aim in LATE.get(part, ()) and target not in LIGHT
        if not allowed or early:
            wrong.add(f"{module} -> {target}")
    assert_known("arrows", wrong, "imports that no arrow allows")


def test_what_is_light_stays_light() -> None:
    """Names are read and counted where there is neither torch nor vLLM."""
    for (part, outside), allowed in OUTSIDE.items():
        users = {
            module
            for module, tree in TREES.items()
            if part_of(module) == part
            and any(is_within(name, outside) for name, _ in imported(tree))
        }
        assert users <= set(allowed), f"{part} imports {outside}"


def test_no_module_imports_itself_in_the_end() -> None:
    """Modules form no circle, imports within functions included."""
    targets: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, target, _ in own_imports():
        targets[module].add(target)

    def reached(module: str) -> set[str]:
        seen: set[str] = set()
        left = [module]
        while left:
            new = targets[left.pop()] - seen
            seen |= new
            left += new
        return seen

    circular = {module for module in MODULES if module in reached(module)}
    assert_known("cycles", circular, "modules that import themselves by way of others")


ASKS = ("isinstance", "issubclass")


def test_methods_are_known_by_their_axes() -> None:
    """No isinstance on a method's class outside ``policy/methods``."""
    concrete = {method.__name__ for method in METHODS.values()}
    wrong = set()
    for module, tree in TREES.items():
        if is_within(module, "policy.methods"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                names = re.findall(r"\w+", ast.unparse(node.args[1]))
            elif isinstance(node, ast.MatchClass):
                names = re.findall(r"\w+", ast.unparse(node.cls))
            elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
                names = re.findall(r"\w+", ast.unparse(node))
            else:
                continue
            wrong |= {f"{module}: {name}" for name in concrete.intersection(names)}
    assert_known("methods", wrong, "a method's class is asked for")


def test_files_are_small() -> None:
    large = {
        str(path.relative_to(ROOT / PACKAGE))
        for path in FILES
        if len(path.read_text().splitlines()) > MAX_LINES
    }
    assert_known("lines", large, f"more than {MAX_LINES} lines")


def test_tests_reach_inside_through_world_alone() -> None:
    """What is private to the package, and what an engine is made of, stands in `support.inside`."""
    wrong = set()
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        relative = path.relative_to(tests)
        if relative.parts[0] == "world":
            continue
        tree = ast.parse(path.read_text())
        ours = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
            for alias in node.names
        }
        private = {name for name in ours if name.startswith("_")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                base = node.value.id if isinstance(node.value, ast.Name) else ""
                if base in ours and re.match(r"_[a-z]", node.attr):
                    private.add(ast.unparse(node))
                if base == "engine" and node.attr in ("runner", "core"):
                    private.add(ast.unparse(node))
                if node.attr == "admission":
                    private.add(ast.unparse(node))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr"):
                target, name = (*node.args, None, None)[:2]
                if (
                    isinstance(target, ast.Name)
                    and target.id in ours
                    and isinstance(name, ast.Constant)
                    and str(name.value).startswith("_")
                ):
                    private.add(f"{target.id}.{name.value}")
        wrong |= {f"{relative}: {name}" for name in private}
    assert not wrong, "go through tests/support/inside.py"
