"""vLLM's program that calls a compiled decoder's pieces, cut where a layer's attention begins.

vLLM splits a decoder's graph at its attention, compiles what is between, and writes Python that
calls the pieces one after the other (``vllm/compilation/codegen.py``)::

    submod_2 = __vllm_submods__[2](getitem_3, s72, weight, getitem_4, ..., l_positions_, cos_sin)
    getitem_5 = submod_2[0]
    ...
    submod_3 = __vllm_inlined_submods__3(getitem_5, s72, getitem_6, name, getitem_7, getitem_8)

The piece between two layers' attention puts out what the next one's attention takes, and the
residual stream. So a range of layers is a range of these statements. Here they are cut out and
made functions of their own; what they call is what the whole program calls.
"""

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PROGRAM = "execution_fn"
PIECES = "__vllm_submods__"
_ATTENTION = "unified_attention_with_output"
_GIVEN, _LIVE = "__kvx_given__", "__kvx_live__"


class UnknownForm(ValueError):
    """vLLM's program is not of the form that can be cut."""


@dataclass(frozen=True)
class Cut:
    """Names of what lives where a layer's attention begins, and the statement that calls it.

    output: where attention writes. residual: the sum of hidden states and residual.
    """

    statement: int
    query: str
    key: str
    value: str
    output: str
    residual: str

    @property
    def live(self) -> tuple[str, ...]:
        return self.query, self.key, self.value, self.output, self.residual


class Part(NamedTuple):
    """Source of a function over a range of layers, (given, live, pieces) -> what it puts out.

    given: the program's own arguments. live: by name, what lives at the cut it begins at, taken out
    of there. What comes out is the same at the cut where it ends, or what the program returns.
    """

    source: str
    name: str

    def function(self, scope: dict[str, Any]) -> Callable[..., Any]:
        """scope: the globals that the whole program has."""
        own = dict(scope)
        exec(compile(self.source, f"<vllm-kvx {self.name}>", "exec"), own)
        function: Callable[..., Any] = own[self.name]
        return function


class Stitching:
    """A program, parsed; `cuts` has one for each layer, in order.

    Raises:
        UnknownForm: the program is of another form.
    """

    def __init__(self, source: str) -> None:
        functions = {
            node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
        }
        if PROGRAM not in functions:
            raise UnknownForm(f"there is no function {PROGRAM}")
        program = functions.pop(PROGRAM)
        self.parameters = [argument.arg for argument in program.args.args]
        self._body = program.body
        # Functions, modules and constants that the program uses.
        used = _names(self._body, ast.Load) - _names(self._body, ast.Store)
        self._globals = used.difference(self.parameters)
        returned = self._body[-1]
        value = returned.value if isinstance(returned, ast.Return) else None
        if not isinstance(value, ast.Tuple) or len(value.elts) != 1:
            raise UnknownForm("the decoder does not return one tensor")
        taken = {name: _taken_by_attention(node) for name, node in functions.items()}
        self.cuts: list[Cut] = []
        # From the end, where what is read further on is known.
        read: set[str] = set()
        for index in range(len(self._body) - 1, -1, -1):
            statement = self._body[index]
            read = (read - _names([statement], ast.Store)) | _names([statement], ast.Load)
            call = _call_of(statement)
            if call is not None and (places := taken.get(call[0])) is not None:
                if len(call[1]) <= max(places):
                    raise UnknownForm("attention is called with arguments by name")
                self.cuts.append(self._cut(index, [call[1][place] for place in places], read))
        self.cuts.reverse()

    def _cut(self, index: int, taken: Sequence[ast.expr], read: set[str]) -> Cut:
        """taken: query, key, value and output, as attention is called with. read: from it on."""
        names = [each.id for each in taken if isinstance(each, ast.Name)]
        others = (*names, *self.parameters, *self._globals)
        beyond = read.difference(others)
        if len(names) != 4 or len(beyond) != 1:
            raise UnknownForm(f"attention takes {names}, and {sorted(beyond)} live beside it")
        query, key, value, output = names
        return Cut(index, query, key, value, output, beyond.pop())

    def part(self, first: int, last: int) -> Part:
        """Layers [first, last), from the beginning of attention `first` or of the program."""
        begin = self.cuts[first].statement if first else 0
        is_end = last == len(self.cuts)
        end = len(self._body) if is_end else self.cuts[last].statement
        body = self._body[begin:end]
        read, name = _names(body, ast.Load), f"layers_{first}_{last}"
        lines = [f"def {name}({_GIVEN}, {_LIVE}, {PIECES}):"]
        lines += [
            f"{each} = {_GIVEN}[{place}]"
            for place, each in enumerate(self.parameters)
            if each in read
        ]
        if first:
            lines += [f"{each} = {_LIVE}.pop({each!r})" for each in self.cuts[first].live]
        lines += [ast.unparse(statement) for statement in body]
        if not is_end:
            out = ", ".join(f"{each!r}: {each}" for each in self.cuts[last].live)
            lines.append(f"return {{{out}}}")
        return Part("\n    ".join(lines) + "\n", name)


def _taken_by_attention(function: ast.FunctionDef) -> list[int] | None:
    """Places of query, key, value and output among a function's arguments, if it is attention."""
    parameters = [argument.arg for argument in function.args.args]
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        names = [each.id for each in call.args[:4] if isinstance(each, ast.Name)]
        if call.func.attr == _ATTENTION and len(names) == 4 and set(names) <= set(parameters):
            return [parameters.index(name) for name in names]
    return None


def _call_of(statement: ast.stmt) -> tuple[str, list[ast.expr]] | None:
    """Name and arguments of the function that an assignment calls by its plain name."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    return call.func.id, call.args


def _names(statements: Iterable[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }
