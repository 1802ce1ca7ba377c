"""Policy names as a JSON schema, made of the methods' fields and their limits.

Whatever ``spec.parse_policy`` accepts, the schema accepts. It refuses unknown names and parameters
and values outside their limits, and leaves to `parse_policy` what concerns several parameters or
parts: one that is given twice, two that exclude each other, two answers on one axis.
"""

import dataclasses
from typing import Any

from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.cache_dtype import DTYPE_PATTERN
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import Limits
from vllm_kvx.policy.spec import AMOUNTS, MAX_LENGTH

POLICY = "policy"
# What servers and requests take: one that loses answers and does not say how much stays is none
# (``spec.check_served``).
SERVED = "servedPolicy"
POLICY_AT_DTYPE = "policyAtDtype"
_EXAMPLES = "a KV policy, such as fier-2048 or snapkv:kv_rate=0.2"
# How a value ends, and a part; `@` begins a KV cache dtype.
_VALUE_END, _PART_END = r"([,+@]|$)", r"([+@]|$)"


def definitions() -> dict[str, Any]:
    """Schemas by name: `POLICY`, `SERVED`, `POLICY_AT_DTYPE` (`full@fp8`), and the methods'.

    A schema that uses them has them under ``definitions``.
    """
    methods = {_key(method): _conditions(method) for method in METHODS.values()}
    refs = [{"$ref": f"#/definitions/{key}"} for key in methods]
    policy = {"type": "string", "maxLength": MAX_LENGTH, "description": _EXAMPLES}
    at_dtype = policy | {"description": f"{_EXAMPLES}, maybe over another KV cache: full@fp8"}
    bare = "|".join(_bare(method) for method in METHODS.values() if method.served_as)
    bare_part = {"pattern": rf"(^|[+])({bare})([+]|$)"}
    return {
        POLICY: policy | {"allOf": [*_names(""), *refs]},
        SERVED: {"allOf": [{"$ref": f"#/definitions/{POLICY}"}, {"not": bare_part}]},
        POLICY_AT_DTYPE: at_dtype | {"allOf": [*_names(f"(@{DTYPE_PATTERN})?"), *refs]},
        **methods,
    }


def _bare(method: type[Method]) -> str:
    """A regular expression of a part that names `method`, and not how much stays."""
    others = "|".join(sorted({*method.keys()} - AMOUNTS))
    pair = f"({others})=[^,+]*"
    return f"{method.name}(:{pair}(,{pair})*)?"


def part_pattern(method: type[Method]) -> str:
    """A regular expression of every part of a policy name that names `method`."""
    keys = method.keys()
    pairs = {key: f"{key}=({limits_of(method, key).pattern})" for key in keys}
    head = method.name
    if method.number:
        head += f"-({limits_of(method, method.number).pattern})"
    if not pairs:
        return f"^{head}$"
    some = f"({'|'.join(pairs.values())})"
    mandatory = [pairs[key] for key in method.mandatory() if key in pairs]
    if not mandatory:
        return f"^{head}(:{some}(,{some})*)?$"
    # In any order beside each other there would be as many forms; one is all that is needed so far.
    (key,) = mandatory
    return f"^{head}:({some},)*{key}(,{some})*$"


def limits_of(method: type[Method], key: str) -> Limits:
    """The limits of the parameter `key`."""
    (field,) = (each for each in dataclasses.fields(method) if each.name == key)
    limits: Limits = field.metadata["limits"]
    return limits


def _key(method: type[Method]) -> str:
    return f"{POLICY}-{method.name}"


def _names(tail: str) -> list[dict[str, Any]]:
    """That a text is made of parts with the names of methods, and ends with `tail`."""
    numbered = "|".join(name for name, method in METHODS.items() if method.number)
    others = "|".join(name for name, method in METHODS.items() if not method.number)
    part = rf"(({numbered})-[0-9]+|{others})(:[a-z_]+=[^+@\s]+)?"
    end = rf"(\+|{tail}$)"
    return [
        {"pattern": rf"^(full{tail}$|({part}{end})+$)"},
        {"not": {"pattern": r"\s|\+$"}},
    ]


def _conditions(method: type[Method]) -> dict[str, Any]:
    """That every part that names `method` has its form, and its parameters values they take.

    Each is a condition of its own, so that a validator names the pattern that was missed.
    """
    number = "-[0-9]+" if method.number else ""
    begin = rf"(^|\+){method.name}"
    keys = method.keys()
    pair = f"({'|'.join(keys)})=[^,+@]+"
    pairs = f"(:{pair}(,{pair})*)?" if keys else ""
    wanted: list[dict[str, Any]] = [{"pattern": f"{begin}{number}{pairs}{_PART_END}"}]
    if method.number:
        pattern = limits_of(method, method.number).pattern
        wanted.append({"pattern": rf"{begin}-({pattern})([:+@]|$)"})
    for key in keys:
        given = rf"{begin}{number}:([^+]*,)?{key}="
        value = {"pattern": f"{given}({limits_of(method, key).pattern}){_VALUE_END}"}
        is_mandatory = key in method.mandatory()
        wanted.append(value if is_mandatory else {"if": {"pattern": given}, "then": value})
    return {"if": {"pattern": rf"{begin}([-:+@]|$)"}, "then": {"allOf": wanted}}
