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


# By part: a folder of the package, a folder or module of `tools`, or a module at the package's top.
# An entry of `may` is a part, or a module of one with all below it.
RULES = {
    "errors": Rule((), "the ground floor: an exception"),
    "policy": Rule((), "the ground floor: counts and names, which both sides of the engine ask"),
    "config": Rule(("policy",), "what users write: keys, variables, arguments; read everywhere"),
    "compat": Rule(
        ("config", "errors"), "what every part needs of vLLM; finds its classes by name"
    ),
    "equations": Rule(("policy",), "the papers' math in plain torch, for tools and operators"),
    "records": Rule(
        ("policy", "errors"), "what tools write and servers read: it knows neither of them"
    ),
    "ops": Rule(
        ("equations", "errors", "records.folder", "config.arguments"),
        "kernels take tensors and numbers, not requests",
    ),
    "scores": Rule(("ops", "equations", "policy"), "the device half of propagate and retain"),
    "indexes": Rule(("ops", "equations", "policy"), "the device half of retrieve"),
    "models": Rule(
        ("config.environment", "config.disabled"),
        "a model runs passes and knows no policy; the worker tells it what to run",
    ),
    "cache": Rule(
        ("policy", "indexes", "ops.paged", "ops.int8.layout", "config"),
        "the scheduler counts blocks; an index says how many bytes of a page are its own",
    ),
    "worker": Rule(
        ("models", "cache", "policy", "scores", "indexes", "ops", "equations", "config", "compat"),
        "the device's side of a step, above all that it drives",
    ),
    "server": Rule(
        (
            *("policy", "records", "cache", "config", "errors"),
            *("compat.wrapping", "compat.cpu_mode"),
            *("ops.retrieval.backends", "ops.retrieval.cuda", "ops.retrieval.one_launch"),
            "ops.paged",
        ),
        "says at start what runs, and which operators there are",
    ),
    "plugin": Rule(
        ("policy", "config", "server", "compat", "errors"), "what vLLM loads: it only wires"
    ),
    "cli": Rule(
        (
            *("policy", "errors", "ops.build", "tools.policies", "tools.serve"),
            *(f"tools.{name}.options" for name in ("batch", "calibrate", "diagnose", "doctor")),
            *(f"tools.{name}.options" for name in ("evaluate", "recommend", "tune_speed")),
        ),
        "reads arguments before it imports a tool",
    ),
    # No part above but `cli` imports these.
    "tools.batch": Rule(
        ("errors", "config", "policy", "tools.serve"),
        "asks a server over HTTP; of a policy it reads the name alone",
    ),
    "tools.calibrate": Rule(
        (
            *("policy", "equations", "config", "errors", "records"),
            *("tools.checkpoint", "tools.plots", "tools.time_left"),
            *("tools.evaluate.intervals", "tools.ideal"),
        ),
        "finds layers for FastKV and StructKV, without an engine",
    ),
    "tools.checkpoint": Rule(
        ("policy", "equations", "config", "errors", "records", "tools.tasks", "tools.time_left"),
        "runs a checkpoint without an engine, on lookups whose answers are known",
    ),
    "tools.diagnose": Rule(
        (
            *("policy", "equations", "config", "errors", "records", "tools.calibrate.pivot"),
            *("tools.calibrate.figures", "tools.checkpoint", "tools.tasks", "tools.plots"),
            "tools.time_left",
        ),
        "draws where attention settles; StructKV's pivot as calibrate finds it",
    ),
    "tools.doctor": Rule(
        (
            *("policy", "config", "compat", "plugin", "records", "server", "cache.group_size"),
            *("indexes", "ops.retrieval.backends", "ops.retrieval.costs"),
            *("ops.retrieval.crossover", "ops.retrieval.one_launch"),
            *("tools.experts", "tools.kv_layers"),
        ),
        "asks what servers and tools ask, before either runs",
    ),
    "tools.engine": Rule(("compat.cpu_mode",), "what tools that start an engine share"),
    "tools.evaluate": Rule(
        (
            *("policy", "records", "config", "errors", "server.measured_layers"),
            *("tools.checkpoint.loading", "tools.engine", "tools.kv_layers"),
            *("tools.plots", "tools.tasks", "tools.time_left"),
        ),
        "asks engines from outside, as a user does; the rest is counting",
    ),
    "tools.experts": Rule((), "reads a model's configuration alone"),
    "tools.ideal": Rule(
        ("policy", "tools.experts"), "counts what a policy's work is, by what its methods answer"
    ),
    "tools.kv_layers": Rule(("config.policy_layers",), "what a policy can save of a model's KV"),
    "tools.plots": Rule(("errors",), "what the plots of several tools share"),
    "tools.policies": Rule(
        ("policy", "config", "tools.batch.lines"),
        "shows what policies there are, and what users write as JSON schemas of what reads it",
    ),
    "tools.recommend": Rule(
        (
            *("policy", "records", "config", "errors"),
            *("server.measured_layers", "server.start_checks", "tools.checkpoint.loading"),
            *("tools.doctor.model_limits", "tools.doctor.weights", "tools.engine"),
            *("tools.evaluate", "tools.ideal", "tools.tasks"),
        ),
        "asks as evaluate does, and counts what is gained; servers read its record",
    ),
    "tools.serve": Rule(
        ("compat.cpu_mode", "config.environment", "errors"),
        "becomes vLLM's command, and imports nothing of it",
    ),
    "tools.tasks": Rule(("errors",), "questions whose answers are known"),
    "tools.time_left": Rule(("records.layers",), "how long the rest of some work takes"),
    "tools.tune_speed": Rule(
        (
            *("policy", "config", "errors", "records"),
            *("tools.checkpoint.dense_decoder", "tools.checkpoint.loading"),
            *("tools.engine", "tools.plots"),
        ),
        "makes weights for a policy, with transformers; a record beside them says which",
    ),
}
# Importing these is for the modules named alone: (part, package) -> modules, or None for none.
OUTSIDE = {
    ("policy", "vllm"): (),
    ("policy", "torch"): (),
    ("policy", "numpy"): ("policy.storage",),
    ("errors", "vllm"): (),
    ("equations", "vllm"): (),
    ("records", "vllm"): (),
}
# Parts that import these in functions alone: at import time they cost seconds, or a circle.
LATE = {"plugin": ("policy", "config", "server", "compat.vllm_signatures")}
# Modules of these that cost nothing.
LIGHT = ("config.wording",)
# The top level of the checkout, which is fixed.
TOP = (
    *("benchmarks", "csrc", "deploy", "docker", "tests", "vllm_kvx"),
    *("README.md", "pyproject.toml"),
)

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
    """A folder or module of the package, or of its `tools`."""
    head, *rest = module.split(".")
    return f"tools.{rest[0]}" if head == "tools" and rest else head


def is_within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


def assert_known(kind: str, found: set[str], what: str) -> None:
    """Nothing was found but what is known, and all that is known was found."""
    known = set(KNOWN[kind])
    assert not found - known, f"{what}: {sorted(found - known)}"
    assert not known - found, f"take out of KNOWN what is not so any more: {sorted(known - found)}"


def test_every_part_has_a_rule() -> None:
    parts = {part_of(module) for module in MODULES if module and module != "tools"}
    assert parts - set(RULES) == set(), "give it a row in RULES"
    assert set(RULES) - parts == set(), "a rule of what there is not"
    assert all(rule.why for rule in RULES.values())


def test_the_top_level_is_whole() -> None:
    assert [name for name in TOP if not (ROOT / name).exists()] == []
    assert not (ROOT / PACKAGE / "csrc").exists(), "sources of CUDA ops lie beside the package"


def test_no_part_but_the_command_line_imports_tools() -> None:
    """Tools write records and servers read them: what serves does not hang on what measures."""
    wrong = {
        f"{module} -> {target}"
        for module, target, _ in own_imports()
        if is_within(target, "tools") and not is_within(module, "tools") and module != "cli"
    }
    assert not wrong
    assert not [
        part
        for part, rule in RULES.items()
        if not is_within(part, "tools")
        and part != "cli"
        and any(is_within(each, "tools") for each in rule.may)
    ], "a rule that allows it"


def test_imports_follow_the_arrows() -> None:
    wrong = set()
    for module, target, late in own_imports():
        part, aim = part_of(module), part_of(target)
        if not module or not target or aim == part:
            continue  # The package's own docstring and version; a part's own modules.
        allowed = any(is_within(target, each) for each in RULES[part].may)
        named = any(is_within(target, each) for each in LATE.get(part, ()))
        early = not late and named and target not in LIGHT
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


def test_tests_reach_inside_through_support_alone() -> None:
    """What is private to the package, and what an engine is made of, stands in `support.inside`."""
    wrong = set()
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        relative = path.relative_to(tests)
        if relative.parts[0] == "support":
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
    assert not wrong, "go through tests/support/inside"
