"""The parameters of methods: which values they take, and how values are written in names.

The fields of a method (``axes.Method``) are made by `integer`, `rate`, `weight` or `choice`. Those
carry the limits, so that a name, a Python call and a config file are checked alike.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_kvx.policy import patterns

Value = int | float | str
MAX_DIGITS = 9

_INTEGER = re.compile(r"0|[1-9][0-9]*")
_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?")


class PolicyError(ValueError):
    """A policy that is malformed, or that this server cannot run; the message says what works."""


@dataclass(frozen=True)
class Limits:
    """The values one parameter takes: `wanted` in words, `allows` in code.

    schema: the same as a JSON schema of the value. pattern: a regular expression of all texts in a
    name that `read_value` makes such a value of, in what Python, JavaScript and RE2 share.
    """

    wanted: str
    allows: Callable[[Any], bool]
    schema: dict[str, Any]
    pattern: str


def _declare(default: Value | None, limits: Limits) -> Any:
    if default is None:
        return dataclasses.field(metadata={"limits": limits})
    return dataclasses.field(default=default, metadata={"limits": limits})


def integer(
    default: int | str | None = None,
    at_least: int = 1,
    words: tuple[str, ...] = (),
    odd: bool = False,
    at_most: int | None = None,
) -> Any:
    """An integer field within these limits, or one of `words`; required without a default."""

    def allows(value: Any) -> bool:
        if type(value) is not int:
            return value in words
        if value < at_least or (at_most is not None and value > at_most):
            return False
        return value % 2 == 1 or not odd

    kind = "an odd integer" if odd else "an integer"
    limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    wanted = " or ".join([f"{kind} {limits}", *words])
    schema: dict[str, Any] = {"type": "integer", "minimum": at_least}
    if at_most is not None:
        schema["maximum"] = at_most
    if odd:
        schema["not"] = {"multipleOf": 2}
    if words:
        schema = {"anyOf": [schema, {"enum": list(words)}]}
    largest = 10**MAX_DIGITS - 1 if at_most is None else at_most
    pattern = "|".join([*patterns.integers(at_least, largest, odd), *map(re.escape, words)])
    return _declare(default, Limits(wanted, allows, schema, pattern))


def rate(default: float) -> Any:
    """A share of the prompt's tokens, in (0, 1]."""
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    limits = Limits(
        "a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1, schema, patterns.RATE
    )
    return _declare(default, limits)


def weight(default: float) -> Any:
    """A factor in [0, 1]."""
    schema = {"type": "number", "minimum": 0, "maximum": 1}
    limits = Limits(
        "a number in [0, 1]", lambda v: _is_number(v) and 0 <= v <= 1, schema, patterns.WEIGHT
    )
    return _declare(default, limits)


def choice(default: int | str, values: tuple[int, ...] | tuple[str, ...]) -> Any:
    """Declares a field that is one of `values`, which all have the default's type."""

    def allows(value: Any) -> bool:
        return type(value) is type(default) and value in values

    texts = [str(value) for value in values]
    pattern = "|".join(map(re.escape, texts))
    limits = Limits("one of " + ", ".join(texts), allows, {"enum": list(values)}, pattern)
    return _declare(default, limits)


def optional(field: Any) -> Any:
    """`field` with None as its default: not given."""
    return dataclasses.field(default=None, metadata=field.metadata)


def allows(method: type[Any], parameter: str, value: Value) -> bool:
    """Whether `value` is within the limits of a method's parameter."""
    fields = {field.name: field for field in dataclasses.fields(method)}
    limits = fields[parameter].metadata.get("limits")
    return isinstance(limits, Limits) and limits.allows(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def read_value(text: str) -> Value:
    """`text` as an int or a float where it is written as one, else unchanged.

    Raises PolicyError for an integer beyond MAX_DIGITS.
    """
    if _INTEGER.fullmatch(text):
        # Token counts are int32 on the device.
        if len(text) > MAX_DIGITS:
            raise PolicyError(f"{text} is too large: integers have at most {MAX_DIGITS} digits")
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def write_value(value: Value) -> str:
    """The shortest text that `read_value` turns into an equal value."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


def share_of(prompt_len: int, share: float, at_least: int) -> int:
    """`max(int(N * rate), w)`, and never more than the N tokens there are."""
    return min(max(int(prompt_len * share), at_least), prompt_len)


def check_cutoff(name: str, policy: object, cutoff: int, num_layers: int) -> None:
    """Raise PolicyError unless a model of `num_layers` has layers below and above the cutoff.

    name: the method's; `policy` is what the message calls the whole.
    """
    if cutoff < num_layers:
        return
    layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
    last = num_layers - 1
    use = f"use {name}-1 .. {name}-{last}" if last > 1 else f"use {name}-1"
    hint = use if last else f"{name} needs at least 2; use full"
    raise PolicyError(f"{policy}: this model has {layers}; {hint}")


def check_layer(method: object, key: str, layer: int | str, num_layers: int) -> None:
    """Raise PolicyError unless `layer` is a word or the index of one of `num_layers` layers."""
    if isinstance(layer, int) and layer >= num_layers:
        raise PolicyError(
            f"{method}: this model has {num_layers} layers; use {key}=0 .. {key}={num_layers - 1}"
        )
