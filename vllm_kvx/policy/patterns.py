"""Regular expressions of numbers as policy names write them.

They use what Python, JavaScript and RE2 share, so that a JSON schema may hold them: no lookaround.
"""

from collections.abc import Iterator

# Mantissas of names without leading zeros. Rounding: 1.0000000000000001 is read as 1.
_ABOVE_0_BELOW_1 = r"0\.[0-9]*[1-9][0-9]*"
_NO_MORE_THAN_1 = rf"{_ABOVE_0_BELOW_1}|1(\.0+|\.0{{15}}[0-9]+)?"
_ABOVE_0 = rf"{_ABOVE_0_BELOW_1}|[1-9][0-9]*(\.[0-9]+)?"
_NO_MORE_THAN_A_TENTH = r"0\.0[0-9]*[1-9][0-9]*|0\.10*|0\.10{14}[0-9]+"

# A number in (0, 1]. With an exponent it is not exact: some larger numbers match, such as 9e-0001,
# and some that are read as 0, such as 1e-999; none that is in (0, 1] is missing.
RATE = (
    rf"(({_NO_MORE_THAN_1})(e-?0+)?"
    rf"|({_ABOVE_0})e-0*[1-9][0-9]*"
    rf"|({_NO_MORE_THAN_A_TENTH})e0*[1-9][0-9]*)"
)
# A number in [0, 1].
WEIGHT = rf"(0(\.0+)?(e-?[0-9]+)?|{RATE})"


def integers(low: int, high: int, odd: bool = False) -> Iterator[str]:
    """Alternatives that match the integers from `low` to `high`, 0 <= low <= high, and no others.

    odd: only the odd ones.
    """
    if low == 0:
        if not odd:
            yield "0"
        low = 1
    if high < low:
        return
    short, long = len(str(low)), len(str(high))
    if short == long:
        yield from _alike(str(low), str(high), odd)
        return
    if low != 10 ** (short - 1):
        yield from _alike(str(low), "9" * short, odd)
        short += 1
    whole = long if high == 10**long - 1 else long - 1
    if short <= whole:
        yield from _whole(short, whole, odd)
    if whole < long:
        yield from _alike("1" + "0" * (long - 1), str(high), odd)


def _whole(short: int, long: int, odd: bool) -> Iterator[str]:
    """All integers of `short` to `long` digits."""
    if not odd:
        yield f"[1-9]{_digits(short - 1, long - 1)}"
        return
    if short == 1:
        yield "[13579]"
        short = 2
    if short <= long:
        yield f"[1-9]{_digits(short - 2, long - 2)}[13579]"


def _alike(low: str, high: str, odd: bool) -> Iterator[str]:
    """Integers from `low` to `high`, which have equally many digits, zeros in front allowed."""
    rest = len(low) - 1
    if not rest:
        digits = [str(each) for each in range(int(low), int(high) + 1) if each % 2 or not odd]
        if len(digits) > 1:
            yield f"[{''.join(digits)}]" if odd else f"[{low}-{high}]"
        else:
            yield from digits
        return
    first, last = int(low[0]), int(high[0])
    if first == last:
        yield from (low[0] + tail for tail in _alike(low[1:], high[1:], odd))
        return
    if low[1:] != "0" * rest:
        yield from (low[0] + tail for tail in _alike(low[1:], "9" * rest, odd))
        first += 1
    top = last if high[1:] == "9" * rest else last - 1
    if first <= top:
        head = str(first) if first == top else f"[{first}-{top}]"
        yield head + (f"{_digits(rest - 1)}[13579]" if odd else _digits(rest))
    if top < last:
        yield from (high[0] + tail for tail in _alike("0" * rest, high[1:], odd))


def _digits(low: int, high: int | None = None) -> str:
    """`low` to `high` digits, or just as many as `low`."""
    high = low if high is None else high
    if (low, high) == (0, 0):
        return ""
    if low == high:
        return "[0-9]" if low == 1 else f"[0-9]{{{low}}}"
    return "[0-9]?" if (low, high) == (0, 1) else f"[0-9]{{{low},{high}}}"
