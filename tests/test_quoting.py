"""A client's text in a log: on one line, and cut."""

import pytest

from vllm_kvx.config.quoting import one_line, quoted


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("cmpl-1", "'cmpl-1'"),
        ("a\nWARNING b", r"'a\nWARNING b'"),
        ("\x1b[31m\r\u2028\u202e", r"'\x1b[31m\r\u2028\u202e'"),
        ("é" * 200, f"'{'é' * 80}'... (200 characters)"),
        (["a\n"], r"['a\n']"),
        ({"a" * 200: 1}, "{'" + "a" * 78 + "... (207 characters)"),
        (None, "None"),
    ],
)
def test_quoted(value: object, written: str) -> None:
    assert quoted(value) == written


def test_one_line() -> None:
    assert one_line("it does not fit: é") == "it does not fit: é"
    assert one_line("a\nb\x1b\u2028c\\d") == r"a\nb\x1b\u2028c\d"
    assert one_line("a" * 5000) == "a" * 2000 + "..."
