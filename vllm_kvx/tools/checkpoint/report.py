"""What the tools have in common around a measurement: progress, records and where they go."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import vllm_kvx
from vllm_kvx.errors import ToolError
from vllm_kvx.records.folder import WAY_OUT, check_writable
from vllm_kvx.records.layers import record_path, save
from vllm_kvx.tools.time_left import Left

# Where prompts are from, if from no file.
BUILTIN = "built-in"

# Called with the index of the layer that is to be run next.
Progress = Callable[[int], None]


def progress_of(head: str, num_layers: int, number: int, left: Left) -> Progress:
    """Shows each layer on a terminal, and a line per prompt elsewhere; all on stderr.

    number: of the prompt that runs, from 1, of those that `left` is of.
    """
    width = 0

    def show(index: int) -> None:
        nonlocal width
        last = index + 1 == num_layers
        if sys.stderr.isatty():
            time_left = left.after(number - 1 + index / num_layers)
            line = f"{head}: layer {index + 1}/{num_layers}{time_left}"
            end = "\n" if last else ""
            print(f"\r{line:{width}}", end=end, file=sys.stderr)
            # A shorter line does not hide the end of one before.
            width = len(line)
        elif index == 0:
            print(f"{head}{left.after(number - 1)}", file=sys.stderr)
        sys.stderr.flush()

    return show


def counter_of(head: str, count: int, sizes: Sequence[float] = ()) -> Progress:
    """Shows the number of each step of `count`, on a terminal in one line; all on stderr.

    sizes: what the steps' times grow with, if not all are alike.
    """
    left, width = Left(sizes or [1] * count), 0

    def show(index: int) -> None:
        nonlocal width
        line = f"{head}: {index + 1}/{count}{left.after(index)}"
        begin, end = "", "\n"
        if sys.stderr.isatty():
            begin, end = "\r", "\n" if index + 1 == count else ""
        # A server that measures at start reads these lines (at_start.py).
        print(f"{begin}{line:{width}}", end=end, file=sys.stderr)
        width = len(line) if begin else 0
        sys.stderr.flush()

    return show


@contextmanager
def measuring(number: int, prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """What prompt `number` of 1.. is called in messages; within, lack of memory is a ToolError."""
    head = f"prompt {number}/{len(prompts)}, {len(prompts[number - 1])} tokens"
    try:
        yield head
    except torch.cuda.OutOfMemoryError as error:
        raise ToolError(
            f"{head}: out of GPU memory: use --max-prompt-tokens, --dtype bfloat16 or --device cpu"
        ) from error


def facts(prompts: Sequence[Sequence[int]], source: str | None) -> dict[str, Any]:
    """What every record says of a run: its prompts, from a file or built in, versions and date."""
    return {
        "prompts": {
            "source": str(Path(source).resolve()) if source else BUILTIN,
            "count": len(prompts),
            "tokens": [len(prompt) for prompt in prompts],
        },
        "versions": {
            "vllm_kvx": vllm_kvx.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def prompts_line(record: Mapping[str, Any]) -> str:
    """`4 prompts of 512-600 tokens`, of a record's facts."""
    tokens = record["prompts"]["tokens"]
    lengths = str(min(tokens)) if min(tokens) == max(tokens) else f"{min(tokens)}-{max(tokens)}"
    kind = "built-in prompts" if record["prompts"]["source"] == BUILTIN else "prompts"
    return f"{len(tokens)} {kind} of {lengths} tokens"


def check_cache(method: str) -> None:
    """Raise ToolError if a record of `method` could not be stored; to be found out beforehand."""
    check_writable(record_path(method, "").parent, WAY_OUT)


def store(record: Mapping[str, Any]) -> Path:
    """Put a record where servers look; returns its file.

    Raises:
        ToolError: it cannot be written.
    """
    try:
        return save(record)
    except OSError as error:
        raise ToolError(f"the result above could not be stored: {error}; {WAY_OUT}") from error
