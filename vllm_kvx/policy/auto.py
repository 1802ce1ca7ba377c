"""`auto`: a server's policy that is chosen at start, by what was measured of its model.

    auto = "auto" [":keep=" share]

It is no policy itself. ``server/auto_policy.py`` puts a policy in its place before anything else
reads the name, so that requests, workers and counters never see it.
"""

import re
from dataclasses import dataclass

from vllm_kvx.policy.parameters import PolicyError, Value, read_value

AUTO = "auto"
DEFAULT_KEEP = 0.97
# What is served where nothing was measured: it drops nothing, and of lists of many values, which
# smaller budgets cut short, it lost nothing that can be told (docs/results/quality.md).
FALLBACK = "fier-4096"
_KEEP = "keep"
# What `parse_auto` takes, as a regular expression of JSON schemas.
PATTERN = r"^auto(:keep=(1(\.0+)?|0\.0*[1-9][0-9]*))?$"
_USAGE = f"write {AUTO} or {AUTO}:{_KEEP}={DEFAULT_KEEP}"


@dataclass(frozen=True)
class Auto:
    """What `auto` asks for; `str` writes it.

    keep: the share of `full`'s right answers that a policy must have been shown to keep, in (0, 1];
        None for the share that the model's recommendation was made for.
    """

    keep: float | None = None

    def __str__(self) -> str:
        return AUTO if self.keep is None else f"{AUTO}:{_KEEP}={self.keep!r}"


def is_auto(text: object) -> bool:
    """Whether `text` means `auto`, well written or not."""
    return isinstance(text, str) and text.partition(":")[0] == AUTO


def parse_auto(text: str) -> Auto:
    """What a text asks for of which `is_auto` holds.

    Raises:
        PolicyError: it is malformed, or `keep` is no share in (0, 1].
    """
    head, colon, tail = text.partition(":")
    if head != AUTO:
        raise PolicyError(f"{text!r}: {_USAGE}")
    if not colon:
        return Auto()
    key, _, value = tail.partition("=")
    if key != _KEEP:
        raise PolicyError(f"{text!r}: {AUTO} has the parameter {_KEEP} alone: {_USAGE}")
    # A share has no exponent, and the pattern leaves out the same numbers as the limits.
    is_plain = re.match(PATTERN, text) is not None
    return Auto(check_keep(read_value(value) if is_plain else value, f"{text!r}: {_KEEP}"))


def check_keep(value: Value, what: str = _KEEP) -> float:
    """`value` as a share of answers to keep; PolicyError, which begins with `what`, if it is none.

    It is in (0, 1]: no policy is asked to keep more than all, and to keep none asks for nothing.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise PolicyError(
            f"{what} is a share of full's right answers, above 0 and at most 1, such as "
            f"{DEFAULT_KEEP}; got {'nothing' if value == '' else value}"
        )
    return float(value)


def refuse_auto(text: str, instead: str) -> None:
    """Raises PolicyError, which ends with `instead`, if `text` means `auto`."""
    if is_auto(text):
        raise PolicyError(
            f"{text!r} is no policy: a server chooses one for it at start, where --kv-policy names "
            f"it, and nowhere else: {instead}"
        )
