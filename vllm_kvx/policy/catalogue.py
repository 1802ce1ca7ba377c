"""What each method is, in plain data: for tables, for programs and for pages.

Everything is read from the method's class: fields and limits, the docstring's lines about
parameters, and what the class says of itself.
"""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any

from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import Value
from vllm_kvx.policy.schema import limits_of, part_pattern
from vllm_kvx.policy.spec import parse_policy

_LINE = re.compile(r"([a-z_]+(?:, [a-z_]+)*): (.+)")
_DEFAULT = re.compile(r"\(default:? ([^;)]+)")
_NOT_GIVEN = "not given"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method.

    required: whether it has no default. default: the value where it is not given; None if it then
    has none. default_rule: in words, what holds then in the place of a value, such as another
    parameter's; empty if nothing does. limits: in words. schema: of the value, as a JSON schema.
    pattern: of its text in a name. meaning: the docstring's sentence.
    """

    name: str
    required: bool
    default: Value | None
    default_rule: str
    limits: str
    schema: dict[str, Any]
    pattern: str
    meaning: str


@dataclass(frozen=True)
class Entry:
    """A method: see ``axes.Method``.

    axes: what it answers with its defaults. number: the parameter that follows the name's hyphen;
    empty if none does. pattern: of every part of a policy name that names it.
    """

    name: str
    usage: str
    example: str
    summary: str
    paper: str
    axes: tuple[str, ...]
    saves: tuple[str, ...]
    needs: str
    number: str
    parameters: tuple[Parameter, ...]
    pattern: str


FULL = Entry(
    name="full",
    usage="full",
    example="full",
    summary="stock vLLM: every layer runs for every token, every entry is kept and read",
    paper="",
    axes=(),
    saves=(),
    needs="",
    number="",
    parameters=(),
    pattern="^full$",
)


def entries() -> tuple[Entry, ...]:
    """`full`, and every method in the order of the table."""
    return (FULL, *map(entry, METHODS.values()))


def entry(method: type[Method]) -> Entry:
    """What there is to say of `method`."""
    example = method.example or method.name
    (defaults,) = parse_policy(example).parts
    return Entry(
        name=method.name,
        usage=method.usage(),
        example=method.served_as or method.example or method.name,
        summary=method.summary,
        paper=method.paper,
        axes=defaults.axes,
        saves=method.saves,
        needs=method.needs,
        number=method.number,
        parameters=tuple(
            _parameter(method, field.name, defaults) for field in dataclasses.fields(method)
        ),
        pattern=part_pattern(method),
    )


def _parameter(method: type[Method], key: str, defaults: Method) -> Parameter:
    """The parameter `key`; `defaults` has nothing given but what is required."""
    limits = limits_of(method, key)
    required = key in method.mandatory()
    default = None if required else getattr(defaults, key)
    meaning = _meanings(method).get(key, "")
    told = _DEFAULT.search(meaning) if default is None and not required else None
    return Parameter(
        name=key,
        required=required,
        default=default,
        default_rule=told[1] if told and told[1] != _NOT_GIVEN else "",
        limits=limits.wanted,
        schema=limits.schema,
        pattern=limits.pattern,
        meaning=meaning,
    )


def _meanings(method: type[Method]) -> dict[str, str]:
    """By parameter, what the docstrings of the class and of those above it say of it."""
    fields = {field.name for field in dataclasses.fields(method)}
    found: dict[str, str] = {}
    for owner in method.__mro__:
        keys: list[str] = []
        # Without docstrings, under `python -OO`, there is nothing to read.
        for line in inspect.cleandoc(owner.__doc__ or "").splitlines():
            begins = _LINE.fullmatch(line)
            if begins and fields.issuperset(begins[1].split(", ")):
                keys = [key for key in begins[1].split(", ") if key not in found]
                found |= dict.fromkeys(keys, begins[2])
            elif line.startswith(" "):
                found |= {key: f"{found[key]} {line.strip()}" for key in keys}
            else:
                keys = []
    return found
