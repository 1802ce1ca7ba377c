"""Policy names: what they mean, and back.

    policy = part ("+" part)*
    part = name ["-" integer] [":" key "=" value ("," key "=" value)*]

A policy is at most one answer on each axis; `full` is none.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.fier import FIER
from vllm_kvx.policy.methods.quest import Quest
from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.policy.methods.streamingllm import StreamingLLM
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.parameters import (
    AXES,
    Method,
    PolicyError,
    Propagate,
    Retain,
    Retrieve,
    Select,
    Value,
    read_value,
)

__all__ = ["AVAILABLE", "METHODS", "KVPolicy", "PolicyError", "check_served", "parse_policy"]

# Every method, and whether this version can serve it. A new method is its file and a row here.
_TABLE: tuple[tuple[type[Method], bool], ...] = (
    (Speed, True),
    (FastKV, True),
    (StructKV, True),
    (SnapKV, True),
    (StreamingLLM, True),
    (FIER, True),
    (Quest, True),
)
METHODS: dict[str, type[Method]] = {method.name: method for method, _ in _TABLE}
AVAILABLE: frozenset[str] = frozenset({"full", *(m.name for m, served in _TABLE if served)})

_MAX_LENGTH = 512


@dataclass(frozen=True)
class KVPolicy:
    """At most one answer to each question about prompt tokens; with none it is `full`.

    A method that answers two axes is the same object on both. `str(policy)` is the canonical name,
    which parses back to an equal policy. Raises PolicyError where a method stands on an axis that
    it does not answer, or is missing from one that it does.
    """

    propagate: Propagate | None = None
    retain: Retain | None = None
    retrieve: Retrieve | None = None

    def __post_init__(self) -> None:
        for axis in AXES:
            part = getattr(self, axis)
            if part is not None and axis not in part.axes:
                raise PolicyError(f"{part} does not answer {axis}")
        _check_once(self.parts)
        for part in self.parts:
            for axis in part.axes:
                if getattr(self, axis) != part:
                    raise PolicyError(f"{part} answers {axis} too: give it there as well")

    @classmethod
    def of(cls, parts: Iterable[Method]) -> "KVPolicy":
        """The policy made of `parts`; PolicyError if two answer one axis or are one method.

        A part whose rates are all 1 answers none and leaves no trace: it is `full`.
        """
        answers: dict[str, Method] = {}
        parts = tuple(parts)
        for part in parts:
            for axis in part.axes:
                if axis in answers:
                    raise PolicyError(
                        f"two answers on the {axis} axis, {answers[axis]} and {part}: keep one"
                    )
                answers[axis] = part
        _check_once(parts)
        return cls(**answers)  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods in the order of their axes, each one once."""
        return tuple(dict.fromkeys(m for a in AXES if (m := getattr(self, a)) is not None))

    @property
    def is_full(self) -> bool:
        """True if nothing is spent less: stock vLLM."""
        return not self.parts

    @property
    def is_lossy_decode(self) -> bool:
        """True if decode tokens attend to less than what prefill computed (retain, retrieve)."""
        return self.retain is not None or self.retrieve is not None

    def __str__(self) -> str:
        return "+".join(map(str, self.parts)) or "full"

    def parameters(self) -> dict[str, dict[str, Value]]:
        """For each answered axis the method's name and every parameter, fit for JSON."""
        answers = {axis: getattr(self, axis) for axis in AXES}
        return {a: {"method": m.name, **m.parameters()} for a, m in answers.items() if m}

    def check_model(self, num_layers: int) -> None:
        """Raise PolicyError, with the values to use, if a model of `num_layers` cannot run it."""
        for part in self.parts:
            part.check_model(num_layers)


def parse_policy(text: str) -> KVPolicy:
    """The policy that `text` names.

    Raises PolicyError, naming the bad part and what is allowed, for anything malformed; no other
    exception. A name parses whether or not this version serves it: see `check_served`.
    """
    if not isinstance(text, str):
        raise PolicyError(f"a policy is a string such as speed-24, got {type(text).__name__}")
    if len(text) > _MAX_LENGTH:
        raise PolicyError(
            f"a policy name has at most {_MAX_LENGTH} characters, got {len(text)}: {text[:32]!r}..."
        )
    if not text:
        raise PolicyError(f"empty policy name; allowed: {_allowed()}")
    if any(c.isspace() for c in text):
        raise PolicyError(f"{text!r}: policy names have no whitespace")
    if text != text.lower():
        raise PolicyError(f"{text!r}: policy names are lower case; write {text.lower()!r}")
    if text == "full":
        return KVPolicy()
    parts = text.split("+")
    if "" in parts:
        raise PolicyError(f"{text!r}: empty part; write a policy on each side of every '+'")
    if len(parts) > 1 and "full" in parts:
        raise PolicyError(f"{text!r}: full is no policy to compose with; drop it or the rest")
    try:
        return KVPolicy.of([_parse_part(part) for part in parts])
    except PolicyError as error:
        raise PolicyError(f"{text!r}: {error}") from None


def check_served(policy: KVPolicy) -> None:
    """Raise PolicyError if this version cannot serve `policy`: a method, or two together."""
    for part in policy.parts:
        if part.name not in AVAILABLE:
            served = ["full", *(m.usage() for m in METHODS.values() if m.name in AVAILABLE)]
            raise PolicyError(
                f"{part.name} is not served by this version of vllm-kvx; "
                f"served: {', '.join(served)}"
            )
    propagate, retain = policy.propagate, policy.retain
    pivot = getattr(retain, "pivot", None) if retain is not None and retain.keeps_blocks else None
    if isinstance(propagate, Speed) and isinstance(pivot, int) and pivot >= propagate.cutoff:
        raise PolicyError(
            f"{retain}: blocks are ranked at layer {pivot}, which {propagate} does not run for "
            f"every token: use a pivot below {propagate.cutoff} or granularity=token"
        )
    if not isinstance(propagate, Select) or retain is None or retain is propagate:
        return
    if isinstance(retain, StreamingLLM):
        raise PolicyError(
            f"{retain} goes by position, and which positions {propagate} computes in its upper "
            "layers is chosen by data: compose it with speed-K, or retain with snapkv"
        )
    if isinstance(propagate, StructKV) or isinstance(retain, StructKV):
        raise PolicyError(
            f"{propagate} and {retain} score keys differently: use structkv's own struct_rate and "
            "kv_rate, or fastkv with snapkv"
        )
    assert isinstance(retain, SnapKV)
    if (retain.window, retain.kernel) != (propagate.window, getattr(propagate, "kernel", 0)):
        raise PolicyError(
            f"{propagate} and {retain} score keys by different windows or kernels: give both the "
            "same window and kernel"
        )


def _check_once(parts: Sequence[Method]) -> None:
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise PolicyError(f"{name} is given twice: put all its parameters in one place")


def _allowed() -> str:
    return ", ".join(["full", *(method.usage() for method in METHODS.values())])


def _parse_part(part: str) -> Method:
    """The method that one part of a policy name stands for."""
    head, colon, tail = part.partition(":")
    name, dash, number = head.partition("-")
    if name == "full":
        raise PolicyError(f"full takes no number and no parameters, got {part!r}; write full")
    if name not in METHODS:
        near = difflib.get_close_matches(name, ["full", *METHODS], n=1)
        suggested = METHODS[near[0]].usage() if near and near[0] in METHODS else "".join(near)
        hint = f"did you mean {suggested}? " if near else ""
        raise PolicyError(f"unknown policy {head!r}; {hint}allowed: {_allowed()}")
    method = METHODS[name]
    if method.number and not dash:
        raise PolicyError(f"{name} needs a number, {method.usage()}; for example {method.example}")
    if dash and not method.number:
        raise PolicyError(
            f"{name} takes no number, got {head!r}; its parameters follow a colon: "
            f"{', '.join(method.keys())}"
        )
    values = _parse_parameters(method, tail) if colon else {}
    if method.number:
        values[method.number] = read_value(number)
    return method(**values)


def _parse_parameters(method: type[Method], text: str) -> dict[str, Value]:
    """The `key=value` pairs after a colon."""
    values: dict[str, Value] = {}
    keys = method.keys()
    allowed = f"parameters of {method.name}: {', '.join(keys)}"
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise PolicyError(f"{pair!r} is not key=value; {allowed}")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PolicyError(f"unknown parameter {key!r}; {hint}{allowed}")
        if key in values:
            raise PolicyError(f"parameter {key!r} is given twice")
        values[key] = read_value(value)
    return values
