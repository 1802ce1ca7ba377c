"""What a method is: the axes it answers, its parameters and which values they take.

A method is one frozen dataclass whose fields are made by `integer`, `rate`, `weight` or `choice`.
Those carry the limits, so that a name, a Python call and a config file are checked alike.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

AXES = ("propagate", "retain", "retrieve")
Value = int | float | str
MAX_DIGITS = 9

_INTEGER = re.compile(r"0|[1-9][0-9]*")
_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?")


class PolicyError(ValueError):
    """A policy that cannot be meant, or cannot be had here; the message says what can."""


@dataclass(frozen=True)
class Limits:
    """The values one parameter takes: `wanted` in words, `allows` in code."""

    wanted: str
    allows: Callable[[Any], bool]


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
    return _declare(default, Limits(wanted, allows))


def rate(default: float) -> Any:
    """A share of the prompt's tokens, in (0, 1]."""
    return _declare(default, Limits("a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1))


def weight(default: float) -> Any:
    """A factor in [0, 1]."""
    return _declare(default, Limits("a number in [0, 1]", lambda v: _is_number(v) and 0 <= v <= 1))


def choice(default: int | str, values: tuple[int, ...] | tuple[str, ...]) -> Any:
    """One of `values`, all of the default's type."""

    def allows(value: Any) -> bool:
        return type(value) is type(default) and value in values

    return _declare(default, Limits("one of " + ", ".join(map(str, values)), allows))


def optional(field: Any) -> Any:
    """`field` with None as its default: not given."""
    return dataclasses.field(default=None, metadata=field.metadata)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


@dataclass(frozen=True)
class Method:
    """One answer on one or more axes. Subclasses inherit from the axes that they can answer.

    name: the method's name, lower case.
    number: the field that `name-<int>` fills, if the method takes one; it is then mandatory.
    letter: what messages call that number.
    example: a complete name to show where the number is missing.

    Raises PolicyError where a parameter is outside its limits.
    """

    name: ClassVar[str]
    number: ClassVar[str] = ""
    letter: ClassVar[str] = ""
    example: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata["limits"]
            if (value is None and field.default is None) or limits.allows(value):
                continue
            if field.name == self.number:
                raise PolicyError(
                    f"{self.usage()}: {self.letter} must be {limits.wanted}, got {value!r}; "
                    f"for example {self.example}"
                )
            raise PolicyError(f"{self.name}: {field.name} must be {limits.wanted}, got {value!r}")

    def __str__(self) -> str:
        """The canonical name: parameters at their defaults are left out."""
        head, required = self.name, {}
        if self.number:
            required = {self.number: getattr(self, self.number)}
            head = f"{self.name}-{required[self.number]}"
        defaults = type(self)(**required).parameters()
        written = [
            f"{key}={write_value(value)}"
            for key, value in self.parameters().items()
            if defaults.get(key) != value
        ]
        return f"{head}:{','.join(written)}" if written else head

    @classmethod
    def usage(cls) -> str:
        """The shape of the name, for messages: `speed-K`, `fastkv`."""
        return f"{cls.name}-{cls.letter}" if cls.number else cls.name

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The parameters that may follow the colon."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.name != cls.number)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes answered with these parameters, in the order of AXES."""
        bases = {"propagate": Propagate, "retain": Retain, "retrieve": Retrieve}
        return tuple(axis for axis in AXES if isinstance(self, bases[axis]))

    def parameters(self) -> dict[str, Value]:
        """Every parameter that has a value, by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {key: value for key, value in values.items() if value is not None}

    def check_model(self, num_layers: int) -> None:
        """Raise PolicyError if a model of `num_layers` layers cannot run this method."""

    def splits(self) -> tuple[int, ...]:
        """Layers where a new KV group must begin; PolicyError where they are not known yet."""
        return ()


class Propagate(Method):
    """Which tokens' hidden states go on to the layers above layer x? Answered in prefill."""


class Select(Propagate):
    """Propagates tokens chosen by their saliency to the prompt's last queries."""

    window: int
    # Whether the layer is found while the prompt runs: all layers are then in one KV group.
    is_online: bool = False

    @property
    def last_full_layer(self) -> int:
        """The layer after which only selected tokens go on; PolicyError if not known yet."""
        raise NotImplementedError

    def num_propagated(self, prompt_len: int) -> int:
        """Tokens of a prompt that go on, the window included."""
        raise NotImplementedError


class Retain(Method):
    """Which computed KV entries stay in the cache? Answered when the prompt is in."""

    # Last prompt tokens whose queries score the keys; 0 where nothing is scored.
    window: int = 0

    def cap(self, prompt_len: int) -> int:
        """Entries of a prompt that a layer keeps at most."""
        raise NotImplementedError

    # Whether whole blocks stay or go, all layers of a segment alike; then nothing is copied.
    keeps_blocks: bool = False

    def kept(self, prompt_len: int, rows: int, block_size: int) -> int:
        """Of `rows` entries that a layer computed, how many stay."""
        return min(self.cap(prompt_len), rows)


def share_of(prompt_len: int, share: float, window: int) -> int:
    """`max(int(N * rate), w)`, and never more than the N tokens there are."""
    return min(max(int(prompt_len * share), window), prompt_len)


class Retrieve(Method):
    """Which stored entries does this decode step read? Answered in every decode step."""

    budget: int
    reduction: str
    dense_below: int | str
    # Whether single tokens are scored, by 1-bit keys; else whole groups, by bounds.
    has_codes: ClassVar[bool]

    @property
    def group_tokens(self) -> int:
        """Tokens that share a scale and a zero: the quantisation group, or the page."""
        raise NotImplementedError

    @property
    def unit(self) -> int:
        """Tokens that are read together."""
        return 1 if self.has_codes else self.group_tokens

    @property
    def budget_units(self) -> int:
        """Units that a step reads."""
        return self.budget // self.unit

    def floor(self, crossover: int) -> int:
        """The least length of which a step reads a part; a shorter one is read whole.

        crossover: from where on retrieval pays on this machine, for `dense_below=auto` and budgets
            of up to a quarter of it; larger ones take longer to read. 0: everywhere.
        """
        if isinstance(self.dense_below, int):
            below = self.dense_below
        else:
            below = max(crossover, 4 * self.budget) if crossover else 0
        return max(self.budget + 1, below)


def check_layer(method: Method, key: str, layer: int | str, num_layers: int) -> None:
    """Raise PolicyError unless `layer` is a word or the index of one of `num_layers` layers."""
    if isinstance(layer, int) and layer >= num_layers:
        raise PolicyError(
            f"{method}: this model has {num_layers} layers; use {key}=0 .. {key}={num_layers - 1}"
        )


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
