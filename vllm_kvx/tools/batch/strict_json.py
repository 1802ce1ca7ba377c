"""JSON as RFC 8259 has it, which is less than Python's own module reads and writes.

That one takes NaN and Infinity, makes Infinity of 1e999 and writes it so, reads UTF-16, and lets
the last of equal keys win. What it does with deep values and long integers differs by version.
"""

import json
import math
import sys
from typing import Any, NoReturn

# Levels of arrays and objects in a reply: fewer than any Python reads, and more than vLLM writes.
DEPTH = 500


def loads(raw: bytes, depth: int = DEPTH, unique_keys: bool = False) -> Any:
    """The value that `raw` holds, in UTF-8; a byte order mark before it does not matter.

    depth: levels of arrays and objects that it may have. unique_keys: whether an object that has a
    key twice is an error; otherwise the last one counts.

    Raises:
        ValueError: it holds no such value; the message says why.
    """
    try:
        found = json.loads(
            raw.decode("utf-8-sig"),
            parse_constant=_no_number,
            parse_float=_finite,
            object_pairs_hook=_unique if unique_keys else None,
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {depth} levels deep") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            most = sys.get_int_max_str_digits()
            raise ValueError(f"an integer has more than {most:,} digits") from None
        raise
    if raw.count(b"[") + raw.count(b"{") > depth and _depth(found) > depth:
        raise ValueError(f"it is nested more than {depth} levels deep")
    return found


def dumps(value: Any) -> bytes:
    """`value` as JSON in ASCII, on one line.

    Raises:
        ValueError: a number of it is not finite.
    """
    return json.dumps(value, allow_nan=False).encode()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"an object has the key {key[:50]!r} twice")
        found[key] = value
    return found


def _depth(value: Any) -> int:
    """Levels of lists and dicts, counted without recursion."""
    depth, level = 0, [value] if isinstance(value, list | dict) else []
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | dict)
        ]
    return depth
