"""Lines of JSON that users give, and what is wrong with one."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvx.errors import ToolError


def objects(data: bytes, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a file, one a line, each with the words for its place; empty lines are none.

    Raises:
        ToolError: a line is no JSON object.
    """
    # Only \n ends a line: other marks of a line's end may stand in a text.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            place = f"{where}, line {number}"
            yield _object(line, place), place


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ToolError(f"{where}: it is not UTF-8 text") from error
    except ValueError as error:
        raise ToolError(f"{where}: it is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ToolError(f"{where}: it is no JSON object")
    return fields


def text_of(fields: dict[str, Any], name: str, where: str) -> str:
    """A field that must be a string; ToolError if it is none."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise ToolError(f"{where}: {_fault(fields, name)}; it must be a string")
    return value


def texts_of(fields: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A field that must be a list of strings, not an empty one; ToolError if it is none."""
    value = fields.get(name)
    if not value or not _are_strings(value):
        raise ToolError(f"{where}: {_fault(fields, name)}; it must be a list of strings")
    return tuple(value)


def _are_strings(values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and all(isinstance(value, str) for value in values)
    )


def _fault(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        return f'the field "{name}" is missing'
    shown = json.dumps(fields[name], ensure_ascii=False)
    return f'"{name}" is {shown if len(shown) <= 40 else shown[:37] + "..."}'
