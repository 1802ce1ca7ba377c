"""Source files in JavaScript, Go, Rust and shell, and questions about their functions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_kvx.tools.tune_speed.documents.base import (
    Ask,
    Asks,
    Document,
    Maker,
    alone,
    distinct,
    ordinal,
    phrased,
    words,
)
from vllm_kvx.tools.tune_speed.documents.values import Values

_VERBS = ("assemble", "fetch", "parse", "render", "revoke", "rotate", "upsert", "verify", "flush")


@dataclass(frozen=True)
class Language:
    """How functions are written.

    name: of the language. declaration: the first line, with places for `name` and `parameters`.
    comment: what begins a comment. end: the last line. parameter: one parameter.
    lines: of bodies, with places for the parameters `a` and `b`, a `literal`, another function
        `other` and a made-up variable `local`.
    snake: whether names are written with underscores.
    """

    name: str
    declaration: str
    comment: str
    end: str
    parameter: str
    lines: tuple[str, ...]
    snake: bool = False

    def __call__(self, rng: random.Random, size: int) -> "Source":
        """A file of about `size` words."""
        values = Values(random.Random(rng.random()))
        names = distinct(lambda: self._name(values))
        functions: list[Function] = []
        left = size
        while left > 0 or not functions:
            callees = [function.name for function in functions[-40:]]
            function = self._function(values, next(names), callees)
            # The last one is as short as the file needs it.
            while len(function.body) > 1 and words(function.text) > left:
                function = function._replace(body=function.body[:-1])
            functions.append(function)
            left -= words(function.text)
        return Source(self, functions)

    def _name(self, values: Values) -> str:
        parts = [values.rng.choice(_VERBS), values.word("trait"), values.word("thing")]
        if self.snake:
            return "_".join(parts)
        return parts[0] + "".join(part.capitalize() for part in parts[1:])

    def _function(self, values: Values, name: str, callees: Sequence[str]) -> "Function":
        rng = values.rng
        a, b = values.coined(), values.coined()
        declared = ", ".join(self.parameter.format(name=parameter) for parameter in (a, b))
        lines = [line for line in self.lines if callees or "{other}" not in line]
        body = []
        for line in rng.sample(lines, rng.randint(2, min(6, len(lines)))):
            literal = values.value(rng.choice(("hex", "code", "version", "email", "object")))
            slots = {"a": a, "b": b, "literal": literal, "local": values.coined()}
            other = rng.choice(callees) if callees else ""
            body.append(line.format(**slots, other=other, number=rng.randint(2, 990)))
        return Function(
            name,
            f"{self.comment} {values.sentence('report')}",
            self.declaration.format(name=name, parameters=declared),
            tuple(body),
            self.end,
        )


class Function(NamedTuple):
    """name, comment, declaration, end: as the file has them. body: its lines, not indented."""

    name: str
    comment: str
    declaration: str
    body: tuple[str, ...]
    end: str

    @property
    def text(self) -> str:
        indented = [f"  {line}" for line in self.body]
        return "\n".join((self.comment, self.declaration, *indented, self.end))


class Source(Document):
    """A file of functions in one language."""

    def __init__(self, language: Language, functions: Sequence[Function]) -> None:
        self.name = f"{language.name} file"
        self.functions = functions
        self.text = "\n\n".join(function.text for function in functions)

    def asks(self) -> Asks:
        return {
            "function": (3, self._function),
            "functions": (1.5, self._functions),
            "comment": (1, self._comment),
            "signature": (1, self._signature),
            "literal": (1.5, self._literal),
            "callers": (1.5, self._callers),
            "body_line": (1, self._body_line),
            "explain": (2, self._explain),
            "listing": (1, self._listing),
            "after": (1, self._after),
        }

    def _phrased(self, rng: random.Random, kind: str, reference: str, **slots: object) -> Ask:
        common = {"document": self.name, "noun": "function", "nouns": "functions"}
        return phrased(rng, kind, reference, **common, **slots)

    def _function(self, rng: random.Random) -> Ask:
        function = rng.choice(self.functions)
        return self._phrased(rng, "function", function.text, key=function.name)

    def _functions(self, rng: random.Random) -> Ask | None:
        if len(self.functions) < 2:
            return None
        first, second = rng.sample(self.functions, 2)
        reference = f"{first.text}\n{second.text}"
        slots = {"first": first.name, "second": second.name}
        return self._phrased(rng, "functions", reference, **slots)

    def _comment(self, rng: random.Random) -> Ask:
        function = rng.choice(self.functions)
        _, _, comment = function.comment.partition(" ")
        return self._phrased(rng, "comment", comment, key=function.name)

    def _signature(self, rng: random.Random) -> Ask:
        function = rng.choice(self.functions)
        return self._phrased(rng, "signature", function.declaration, key=function.name)

    def _literal(self, rng: random.Random) -> Ask | None:
        for _ in range(20):
            function = rng.choice(self.functions)
            quoted = rng.choice(function.body).split('"')
            if len(quoted) > 1 and alone(self.text, quoted[1]):
                return self._phrased(rng, "literal", function.name, value=f'"{quoted[1]}"')
        return None

    def _callers(self, rng: random.Random) -> Ask | None:
        for _ in range(20):
            called = rng.choice(self.functions)
            callers = [
                function
                for function in self.functions
                if any(called.name in line for line in function.body)
            ]
            if len(callers) == 1:
                return self._phrased(rng, "callers", callers[0].name, key=called.name)
        return None

    def _body_line(self, rng: random.Random) -> Ask:
        function = rng.choice(self.functions)
        index = rng.randrange(len(function.body))
        slots = {"key": function.name, "ordinal": ordinal(index), "number": index + 1}
        return self._phrased(rng, "body_line", function.body[index], **slots)

    def _explain(self, rng: random.Random) -> Ask:
        return self._phrased(rng, "explain", "", key=rng.choice(self.functions).name)

    def _listing(self, rng: random.Random) -> Ask | None:
        count = min(rng.randint(3, 10), len(self.functions))
        if count < 3:
            return None
        names = [function.name for function in self.functions[:count]]
        return self._phrased(rng, "listing", "\n".join(names), count=count)

    def _after(self, rng: random.Random) -> Ask | None:
        if len(self.functions) < 2:
            return None
        index = rng.randrange(len(self.functions) - 1)
        before, after = self.functions[index : index + 2]
        return self._phrased(rng, "after", after.name, key=f"`{before.name}`")


JAVASCRIPT = Language(
    "JavaScript",
    *("function {name}({parameters}) {{", "//", "}", "{name}"),
    (
        'const {local} = {a}.get("{literal}");',
        "if ({a}.length > {number}) throw new RangeError({b});",
        'console.warn("{literal}", {b});',
        "{b} = {b} ?? {other}({a}, {number});",
        "for (const {local} of {b}) {a}.push({local} * {number});",
        "return {other}({a}, {b});",
        "const {local} = `${{{a}}}/{literal}`;",
    ),
)
GO = Language(
    "Go",
    *("func {name}({parameters}) error {{", "//", "}", "{name} string"),
    (
        '{local} := strings.TrimPrefix({a}, "{literal}")',
        "if len({b}) == 0 {{ return ErrShort }}",
        'log.Printf("{literal}: %v", {a})',
        "if err := {other}({a}, {b}); err != nil {{ return err }}",
        "{local} := make([]byte, {number})",
        'cache.Set({a}, "{literal}", {number}*time.Second)',
        "return {other}({b}, {a})",
    ),
)
RUST = Language(
    "Rust",
    *("fn {name}({parameters}) -> Option<String> {{", "///", "}", "{name}: &str"),
    (
        'let {local} = {a}.strip_suffix("{literal}")?;',
        "let {local} = {b}.bytes().take({number}).count();",
        "let {local} = {other}({a}, {b})?;",
        'tracing::debug!("{literal} {{}}", {b});',
        "assert!({a}.len() < {number});",
        'if {b} == "{literal}" {{ return None; }}',
    ),
    snake=True,
)
SHELL = Language(
    "shell",
    *("{name}() {{", "#", "}", "{name}"),
    (
        'local {local}="${{1:-{literal}}}"',
        'grep -q "{literal}" "$1" || return {number}',
        '{other} "$1" "$2" >> "/var/tmp/{local}"',
        'printf "%s\\n" "{literal}" | tee -a "$2"',
        "sleep {number}",
        'export {local}="{literal}"',
    ),
    snake=True,
)
KINDS: dict[str, Maker] = {
    "javascript": JAVASCRIPT,
    "go": GO,
    "rust": RUST,
    "shell": SHELL,
}
