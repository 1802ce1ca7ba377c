"""Which classes the code of one of vLLM's models builds it from, and what policies remain."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

RETAIN, ALL, NONE, UNKNOWN = "retain or retrieve", "all policies", "full alone", "not importable"
# From most policies to fewest.
ORDER = (ALL, RETAIN, NONE)

_MODELS = ("vllm.model_executor.models.", "vllm.models.")
# What models share, and no part of one.
_SHARED = ("interfaces", "interfaces_base", "utils", "registry", "vision", "config")


class ModelCode:
    """A model's class, and all classes of vLLM's models that it reaches from there.

    Reached are base classes, and what a class calls or hands on by name; names that stand in
    annotations are not. A class that chooses between two kinds of attention reaches both.

    Attributes:
        classes: those reached. source: their text.
        named: architectures that it asks vLLM's registry for, as a language model of its own.
        asks: whether it has vLLM make a further model, perhaps one that a checkpoint names.
        has_latent_attention: whether it calls one of vLLM's classes of latent attention.
    """

    def __init__(self, model: type) -> None:
        self.classes: dict[type, None] = {}
        self.source, self.named = "", list[str]()
        self.has_latent_attention = False
        waiting = [model]
        while waiting:
            found = waiting.pop()
            if found in self.classes:
                continue
            self.classes[found] = None
            text, tree = _texts(found.__module__).get(found.__name__, ("", ast.Module([], [])))
            self.source += text
            self.named += _named(tree)
            module = vars(sys.modules[found.__module__])
            used = {name: _classes_in(module.get(name)) for name in _names(tree)}
            for name, classes in used.items():
                is_latent = "MLA" in name or "LatentAttention" in name
                self.has_latent_attention |= is_latent and bool(classes)
            every = chain(found.__bases__, *used.values())
            waiting += [each for each in every if _is_part(each)]
        self.asks = "init_vllm_registered_model(" in self.source


@functools.cache
def _texts(module: str) -> dict[str, tuple[str, ast.ClassDef]]:
    """The text of a module's classes, and what it is parsed to; by name."""
    source = inspect.getsource(sys.modules[module])
    lines = source.splitlines(keepends=True)
    return {
        node.name: ("".join(lines[node.lineno - 1 : node.end_lineno]), node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


def _is_part(found: type) -> bool:
    module = found.__module__
    return module.startswith(_MODELS) and module.rpartition(".")[2] not in _SHARED


def _classes_in(value: Any) -> list[type]:
    """A class, or those that a table of a module has."""
    if isinstance(value, dict):
        return [each for each in value.values() if inspect.isclass(each)]
    return [value] if inspect.isclass(value) else []


def _names(tree: ast.AST) -> set[str]:
    """Names that are used, but for those of annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _named(tree: ast.AST) -> Iterator[str]:
    """The strings of every list that is called `architectures`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "architectures":
            yield from _strings(node.value)
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "architectures" for target in node.targets
        ):
            yield from _strings(node.value)


def _strings(value: ast.expr) -> Iterator[str]:
    for each in value.elts if isinstance(value, ast.List) else ():
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
