"""Which classes the code of one of vLLM's models builds it from, and what policies remain."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
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
    annotations are not.

    Attributes:
        classes: those reached. source: their text.
        named: architectures that it asks vLLM's registry for, as a language model of its own.
        asks: whether it has vLLM make a further model, perhaps one that a checkpoint names.
    """

    def __init__(self, model: type) -> None:
        self.classes: dict[type, None] = {}
        self.source, self.named = "", list[str]()
        waiting = [model]
        while waiting:
            found = waiting.pop()
            if found in self.classes:
                continue
            self.classes[found] = None
            text = textwrap.dedent(inspect.getsource(found))
            self.source += text
            tree = ast.parse(text)
            self.named += _named(tree)
            module = vars(sys.modules[found.__module__])
            used = [value for name in _names(tree) for value in _classes_in(module.get(name))]
            waiting += [each for each in (*found.__bases__, *used) if _is_part(each)]
        self.asks = "init_vllm_registered_model(" in self.source

    def has_latent_attention(self) -> bool:
        """Whether it calls one of vLLM's classes of latent attention."""
        return any(
            "MLA" in name or "LatentAttention" in name
            for found in self.classes
            for name in _names(ast.parse(textwrap.dedent(inspect.getsource(found))))
            if inspect.isclass(vars(sys.modules[found.__module__]).get(name))
        )


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
