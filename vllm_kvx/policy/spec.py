"""Policy names: what they mean, and back.

    policy = part ("+" part)*
    part = name ["-" integer] [":" key "=" value ("," key "=" value)*]

A policy is at most one answer on each axis; `full` is none.
"""

import difflib
import math
import re

from vllm_kvx.policy.auto import is_auto, refuse_auto
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import PolicyError, Value, allows, read_value, write_value
from vllm_kvx.policy.policy import KVPolicy

MAX_LENGTH = 512
# What people call no policy at all.
_MEAN_FULL = frozenset({"default", "dense", "false", "none", "null", "off", "stock", "vllm"})


def parse_policy(text: str) -> KVPolicy:
    """The policy that `text` names.

    Raises PolicyError, naming the bad part and what is allowed, for anything malformed; no other
    exception. Two methods that do not work together parse: see `KVPolicy.check_composition`.
    """
    if not isinstance(text, str):
        raise PolicyError(f"a policy is a string such as speed-24, got {type(text).__name__}")
    if len(text) > MAX_LENGTH:
        raise PolicyError(
            f"a policy name has at most {MAX_LENGTH} characters, got {len(text)}: {text[:32]!r}..."
        )
    if not text:
        raise PolicyError(f"empty policy name; allowed: {_allowed()}")
    if any(c.isspace() for c in text):
        hint = f"; {composes}" if (composes := _composes(text)) else ""
        raise PolicyError(f"{text!r}: policy names have no whitespace{hint}")
    if (lower := text.lower()) != text:
        # What else is wrong comes first; `auto` is a server's to take.
        if lower == lower.lower() and not is_auto(lower):
            parse_policy(lower)
        raise PolicyError(f"{text!r}: policy names are lower case; write {lower!r}")
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
        raise PolicyError(f"{text!r}: {_composes(text) or error}") from None


# What people write where '+' composes policies.
_SEPARATORS = re.compile(r"([\s,&+]+)")


def _composes(text: str) -> str:
    """What to write, if something else than '+' stands before a policy in `text`; else empty."""
    composed, *rest = _SEPARATORS.split(text.strip())
    misses_plus = False
    for separator, piece in zip(rest[::2], rest[1::2], strict=True):
        head = piece.partition(":")[0]
        if "=" in head:  # A further parameter of the policy before it.
            composed += f",{piece}"
            continue
        composed += f"+{piece}"
        is_policy = head.partition("-")[0] in ("full", *METHODS)
        misses_plus = misses_plus or (is_policy and separator != "+")
    if not misses_plus:
        return ""
    try:
        parse_policy(composed)
    except PolicyError as error:
        return f"policies compose with '+' alone; {error}"
    return f"policies compose with '+': write {composed!r}"


# Parameters that say how much of a prompt stays.
AMOUNTS = frozenset({"rate", "kv_rate", "kv_budget", "recent"})
_LOST_NONE = "which lost none of the short ones measured"


def check_served(text: str) -> None:
    """What parses as a policy, and is not to be served by a name that says so little.

    Raises:
        PolicyError: a part does not say how much stays, and its method's rate is a paper's, which
            loses answers.
    """
    for part in filter(is_bare, text.split("+")):
        mine, best = _with_more(part), METHODS["snapkv"].served_as
        fewer = "which loses fewer" if mine != best else _LOST_NONE
        other = "" if mine == best else f"{best}, {_LOST_NONE}, "
        raise PolicyError(
            f"{part} does not say how much stays, and the paper's rates lose answers: write "
            f"{mine}, {fewer}, {other}or the paper's {servable(parse_policy(part))}"
        )


def is_bare(name: str) -> bool:
    """Whether a part of it does not say how much stays, although its method's rate loses answers.

    Other parameters do not say it: `snapkv:window=16` has the paper's rate, as `snapkv` has.
    """
    return any(map(_is_bare, name.split("+")))


def _is_bare(part: str) -> bool:
    head, _, written = part.partition(":")
    method = METHODS.get(head)
    return method is not None and bool(method.served_as) and not AMOUNTS & set(_pairs(written))


def _pairs(written: str) -> dict[str, str]:
    """The parameters of a part, as the text behind its colon has them."""
    pairs = (pair.partition("=") for pair in written.split(",") if pair)
    return {key: value for key, _, value in pairs}


def _with_more(part: str) -> str:
    """What to write in the place of a bare part: its own parameters, and others of `served_as`."""
    head, _, written = part.partition(":")
    own, best = _pairs(written), _pairs(METHODS[head].served_as.partition(":")[2])
    more = {key: value for key, value in best.items() if key not in own}
    for added in (more, {key: value for key, value in more.items() if key in AMOUNTS}):
        name = f"{head}:{','.join(f'{key}={value}' for key, value in {**own, **added}.items())}"
        try:
            parse_policy(name)
        except PolicyError:
            continue  # Not `after` beside `lookahead`, or a window with which it is too long.
        return name
    return METHODS[head].served_as


def servable(policy: KVPolicy) -> str:
    """A name of `policy` that ``check_served`` takes: it says how much stays."""
    return "+".join(map(_with_rates, policy.parts)) or str(policy)


def _with_rates(part: Method) -> str:
    name = str(part)
    if not _is_bare(name):
        return name
    rates = {k: v for k, v in part.parameters().items() if k in AMOUNTS}
    written = ",".join(f"{key}={write_value(value)}" for key, value in rates.items())
    return f"{name}{',' if ':' in name else ':'}{written}"


def _allowed() -> str:
    return ", ".join(["full", *(method.usage() for method in METHODS.values())])


def _parse_part(part: str) -> Method:
    """The method that one part of a policy name stands for."""
    refuse_auto(part, "name a policy, such as those that `vllm-kvx policies` lists")
    head, colon, tail = part.partition(":")
    name, dash, number = head.partition("-")
    if name == "full":
        raise PolicyError(f"full takes no number and no parameters, got {part!r}; write full")
    if name not in METHODS:
        near = difflib.get_close_matches(name, ["full", *METHODS], n=1)
        if name in _MEAN_FULL:
            near = ["full"]
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
        values[method.number] = _read(method, method.number, number)
    missing = [key for key in method.mandatory() if key not in values]
    if missing:
        raise PolicyError(f"{name} needs {' and '.join(missing)}; for example {method.example}")
    return method(**values)


def _parse_parameters(method: type[Method], text: str) -> dict[str, Value]:
    """The `key=value` pairs after a colon."""
    values: dict[str, Value] = {}
    keys = method.keys()
    allowed = f"parameters of {method.name}: {', '.join(keys) or 'none'}"
    before = ""
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            hint = _number_with_comma(method, before, pair)
            raise PolicyError(f"{pair!r} is not key=value; {hint}{allowed}")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PolicyError(f"unknown parameter {key!r}; {hint}{allowed}")
        if key in values:
            raise PolicyError(f"parameter {key!r} is given twice")
        values[key] = _read(method, key, value)
        before = pair
    return values


def _read(method: type[Method], key: str, text: str) -> Value:
    """The value that `text` means; the text itself, which is none, if no float is such a number.

    So the error shows what was written, and not the 0.0 or inf that is the nearest float.
    """
    value = read_value(text)
    if not isinstance(value, float) or allows(method, key, value):
        return value
    is_zero = not set(text.partition("e")[0]) & set("123456789")
    return text if math.isinf(value) or (value == 0 and not is_zero) else value


def _number_with_comma(method: type[Method], pair: str, rest: str) -> str:
    """A hint if `pair` and `rest`, which a comma parts, are one number, as in kv_rate=0,2."""
    key, _, head = pair.partition("=")
    if not (rest.isascii() and rest.isdigit() and head.isascii() and head.isdigit()):
        return ""
    for number in (f"{head}.{rest}", head + rest if len(rest) == 3 else ""):
        if number and allows(method, key, read_value(number)):
            return f"did you mean {key}={number}? "
    return ""
