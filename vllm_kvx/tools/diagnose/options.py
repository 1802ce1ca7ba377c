"""Options of `vllm-kvx diagnose`; the work is in ``attention`` and ``speed``."""

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvx.config.arguments import positive
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.tools.checkpoint.options import (
    FASTKV,
    STRUCTKV,
    WEIGHTS,
    add_model,
    add_prompts,
    add_weights,
    add_window,
)

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_SPEED = Speed(1)


# By method, the module that does it.
_DIAGNOSES = {"structkv": "attention", "speed": "speed"}


class _Option(NamedTuple):
    """An option of `diagnose` that one method has, and its default there.

    generated: whether it is of the prompts that are generated where none are given.
    """

    method: str
    default: Any
    generated: bool = False


_DIAGNOSE: Mapping[str, _Option] = {
    "pivot": _Option("structkv", None),
    "struct_rate": _Option("structkv", STRUCTKV.struct_rate),
    "kv_rate": _Option("structkv", STRUCTKV.kv_rate),
    "decay": _Option("structkv", STRUCTKV.decay),
    "kernel": _Option("structkv", FASTKV.kernel),
    "window": _Option("structkv", STRUCTKV.window),
    "weights": _Option("structkv", WEIGHTS),
    "answer_tokens": _Option("speed", 32),
    "anchors": _Option("speed", _SPEED.anchors),
    "tail": _Option("speed", _SPEED.tail),
    "every": _Option("speed", 1),
    "count": _Option("speed", 8, generated=True),
    "length": _Option("speed", 1024, generated=True),
}


def add_diagnose(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "diagnose",
        help="draw where a model's attention settles, and what selecting tokens or cutting the "
        "prompt there leaves",
        description="By --method structkv it draws StructKV's Figures 4 and 5 for a model: "
        "entropy, sparsity, variance and transition score by layer, with the pivot; and the share "
        "of the attention mass that StructKV, FastKV, SnapKV and a GemFilter-like selection leave "
        "to each layer. By --method speed it draws SPEED's Figure 3, where generated tokens attend "
        "to the prompt and where its states become stable, with the cutoffs that follow by the "
        "paper's rule; and how far the model's answers change under every cutoff. Writes the "
        "numbers beside the figures.",
    )
    command.set_defaults(run=_diagnose)
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    command.add_argument(
        "--method",
        choices=tuple(_DIAGNOSES),
        default="structkv",
        help="whose layers (default: %(default)s)",
    )
    add_prompts(
        command,
        "default: a built-in text; by --method speed generated lookups and built-in questions",
    )
    _add_structkv(command)
    _add_speed(command)
    add_model(command)
    command.add_argument(
        "--output", metavar="DIR", help="where to write (default: diagnose-<name of the model>)"
    )


def _add_structkv(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--pivot",
        type=int,
        metavar="L",
        help="structkv: select after this layer, counted from 0 (default: the pivot of these "
        "prompts)",
    )
    command.add_argument(
        "--struct-rate",
        type=float,
        metavar="RATE",
        help="structkv: share of the tokens that StructKV, FastKV and GemFilter select (default: "
        f"{STRUCTKV.struct_rate})",
    )
    command.add_argument(
        "--kv-rate",
        type=float,
        metavar="RATE",
        help=f"structkv: share of the entries that SnapKV retains (default: {STRUCTKV.kv_rate})",
    )
    command.add_argument(
        "--decay",
        type=float,
        metavar="D",
        help="structkv: weight of the layers below in StructKV's centrality (default: "
        f"{STRUCTKV.decay})",
    )
    command.add_argument(
        "--kernel",
        type=int,
        metavar="K",
        help="structkv: width of FastKV's and SnapKV's pooling over scores (default: "
        f"{FASTKV.kernel})",
    )
    add_window(command, None, "structkv: ")
    add_weights(command, "structkv: ")


def _add_speed(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--answer-tokens",
        type=positive,
        metavar="N",
        help=f"speed: tokens of the longest answer (default: {_DIAGNOSE['answer_tokens'].default})",
    )
    command.add_argument(
        "--anchors",
        type=int,
        metavar="N",
        help="speed: first prompt tokens that every layer processes (default: "
        f"{_DIAGNOSE['anchors'].default})",
    )
    command.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="speed: last prompt tokens that every layer processes (default: "
        f"{_DIAGNOSE['tail'].default})",
    )
    command.add_argument(
        "--every",
        type=positive,
        metavar="N",
        help="speed: try only cutoffs that are multiples of N (default: every one)",
    )
    command.add_argument(
        "--count",
        type=positive,
        metavar="N",
        help=f"speed: generated lookups (default: {_DIAGNOSE['count'].default})",
    )
    command.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help="speed: tokens of each lookup; at most what the model takes (default: "
        f"{_DIAGNOSE['length'].default})",
    )


def _diagnose(args: argparse.Namespace) -> None:
    for name, option in _DIAGNOSE.items():
        if getattr(args, name) is None:
            setattr(args, name, option.default)
            continue
        flag = name.replace("_", "-")
        if args.method != option.method:
            raise ToolError(f"--{flag} has no meaning without --method {option.method}")
        if option.generated and args.prompts is not None:
            raise ToolError(f"--{flag} is for generated lookups: leave it out, or --prompts")
    if args.method == "speed" and args.prompts is None and args.max_prompt_tokens is not None:
        raise ToolError("--max-prompt-tokens is for --prompts: lookups have --length")
    import_module(f"vllm_kvx.tools.diagnose.{_DIAGNOSES[args.method]}").run(args)
