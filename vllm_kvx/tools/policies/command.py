"""`vllm-kvx policies`: what policies there are, for readers and for programs."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvx import __version__
from vllm_kvx.policy.catalogue import FULL, Entry, Parameter, entries, entry
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import write_value
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.policies.schema import document

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# Narrower terminals get lines that they have to break.
_LEAST_WIDTH = 72
_GAP = "  "


def add_policies(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "policies",
        help="see what policies there are, their parameters, what each saves and needs",
        description="Lists the policies that --kv-policy, kv_layout and requests may name, or "
        "explains the one that is named, with the limits of its parameters.",
        epilog="They compose with '+': speed-24+fier-2048. Exit code 2 if NAME is no policy.",
    )
    command.set_defaults(run=_policies)
    command.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a method, such as snapkv, or a policy, such as snapkv:kv_rate=0.2+fier-2048",
    )
    command.add_argument(
        "--json",
        action="store_true",
        help="one JSON object, with JSON schemas of policies, additional_config and batch lines",
    )


def _policies(args: argparse.Namespace) -> None:
    width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
    chosen = entries() if args.name is None else _named(args.name)
    if args.json:
        text = json.dumps(as_json(chosen), indent=1)
    elif args.name is None:
        text = "\n".join(table(chosen, width))
    else:
        text = "\n\n".join("\n".join(details(each, width)) for each in chosen)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Of `| head`. What is left in the buffer has nowhere to go, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_json(chosen: Sequence[Entry]) -> dict[str, Any]:
    """`chosen` and the schemas of all that users write."""
    policies = [dataclasses.asdict(each) for each in chosen]
    return {"version": __version__, "policies": policies, "schema": document()}


def table(chosen: Sequence[Entry], width: int) -> Iterator[str]:
    """The lines of a table of `chosen` that is `width` columns wide."""
    rows = [("policy", "saves", "parameters", "needs")]
    rows += [
        (
            each.usage,
            ", ".join(each.saves) or "nothing",
            " ".join(_given(each)) or "none",
            each.needs or "nothing",
        )
        for each in chosen
    ]
    first = max(len(row[0]) for row in rows)
    saves = max(len(word) + 1 for each in chosen for word in each.saves)
    rest = width - first - saves - 3 * len(_GAP)
    widths = (first, saves, rest - rest * 2 // 5, rest * 2 // 5)
    for number, row in enumerate(rows):
        if number == 1:
            yield _GAP.join("-" * each for each in widths)
        cells = [_wrap(cell, each) for cell, each in zip(row, widths, strict=True)]
        for at in range(max(map(len, cells))):
            line = [cell[at] if at < len(cell) else "" for cell in cells]
            padded = (text.ljust(each) for text, each in zip(line, widths, strict=True))
            yield _GAP.join(padded).rstrip()
    yield ""
    yield from _wrap(
        "Parameters, here with their defaults, follow a colon: snapkv:kv_rate=0.2,window=16. `...` "
        "has to be given. Those without a value are off or follow another parameter, as vllm-kvx "
        "policies NAME says, with limits and meanings. Policies compose with '+': "
        "speed-24+fier-2048.",
        width,
    )


def details(each: Entry, width: int) -> Iterator[str]:
    """The lines that explain a method, at most `width` columns wide."""

    paper = f" ({each.paper})" if each.paper else ""
    yield from _wrap(f"{each.usage}: {each.summary}{paper}", width)
    yield ""
    facts = {
        "answers": ", ".join(each.axes),
        "saves": ", ".join(each.saves),
        "needs": each.needs,
        "example": each.example,
    }
    for label, text in facts.items():
        yield from _wrap(text or "nothing", width, label.ljust(10))
    for parameter in each.parameters:
        name = parameter.name
        if name == each.number:
            name = f"{each.usage.partition('-')[2]}, {name}"
        yield ""
        yield from _wrap(f"{name}: {parameter.limits}; {_default(parameter)}", width, "  ")
        yield from _wrap(parameter.meaning, width, "    ")


def _named(name: str) -> list[Entry]:
    """What there is to say of the methods in `name`.

    Raises:
        PolicyError: it is neither a method nor a policy.
    """
    by_usage = {method.usage(): method for method in METHODS.values()} | METHODS
    if name in by_usage:
        return [entry(by_usage[name])]
    policy = parse_policy(name)
    policy.check_composition()
    return [entry(type(part)) for part in policy.parts] or [FULL]


def _given(each: Entry) -> Iterator[str]:
    for parameter in each.parameters:
        if parameter.name == each.number:
            continue
        if parameter.required:
            yield f"{parameter.name}=..."
        elif parameter.default is None:
            yield parameter.name
        else:
            yield f"{parameter.name}={write_value(parameter.default)}"


def _default(parameter: Parameter) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    if default is not None:
        return f"default {write_value(default)}"
    return (
        f"default: {parameter.default_rule}" if parameter.default_rule else "not given by default"
    )


def _wrap(text: str, width: int, first: str = "") -> list[str]:
    """`text` in lines, of which the first begins with `first` and the others below its end."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )
