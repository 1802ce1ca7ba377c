"""Options of `vllm-kvx calibrate`; the work is in modules that are imported only to do it."""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvx.config.arguments import positive
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.checkpoint.options import (
    FASTKV,
    STRUCTKV,
    WEIGHTS,
    add_model,
    add_prompts,
    add_weights,
    add_window,
)
from vllm_kvx.tools.plots import check_matplotlib

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_METHODS, _CRITERIA = ("fastkv", "structkv"), ("answers", "paper")


# Four lookups of each of eight tasks choose, and as many others confirm. Of 32 right answers a
# layer may lose one, and 16 of which none is lost are enough: a small model has as many.
_COUNT, _CONFIRM, _LENGTH, _TARGET, _LEAST = 32, 32, 2048, 0.98, 0.8


class _Option(NamedTuple):
    """An option of `calibrate` that only some methods or criteria have, and its default there."""

    default: Any
    methods: tuple[str, ...] = _METHODS
    criteria: tuple[str, ...] = _CRITERIA


CALIBRATE = {
    "tsp_rate": _Option(FASTKV.tsp_rate, ("fastkv",)),
    "kernel": _Option(FASTKV.kernel, ("fastkv",)),
    "max_layer": _Option(None, criteria=("paper",)),
    "min_layer": _Option(None, ("structkv",), ("paper",)),
    "weights": _Option(WEIGHTS, ("structkv",), ("paper",)),
    "struct_rate": _Option(STRUCTKV.struct_rate, ("structkv",), ("answers",)),
    "decay": _Option(STRUCTKV.decay, ("structkv",), ("answers",)),
    "reduction": _Option(None, criteria=("answers",)),
    "count": _Option(_COUNT, criteria=("answers",)),
    "confirm": _Option(_CONFIRM, criteria=("answers",)),
    "length": _Option(_LENGTH, criteria=("answers",)),
    "target": _Option(_TARGET, criteria=("answers",)),
    "least": _Option(_LEAST, criteria=("answers",)),
    "compare": _Option(False, ("fastkv",), ("answers",)),
}


# By method and criterion, the module that does it.
_CALIBRATORS = {
    ("fastkv", "paper"): "tsp_layer",
    ("structkv", "paper"): "pivot",
    ("fastkv", "answers"): "by_answers",
    ("structkv", "answers"): "by_answers",
}


def _tool(name: str) -> Any:
    """A module of this folder, imported only now: it imports torch, which takes seconds."""
    return import_module(f"vllm_kvx.tools.calibrate.{name}")


def add_calibrate(commands: "_Commands") -> None:
    command = commands.add_parser(
        "calibrate",
        help="find FastKV's TSP layer or StructKV's pivot for a model",
        description="Finds the layer after which only selected tokens go on: the one with "
        "the least work under which the model's answers stay, or, by --criterion paper, the one "
        "where FastKV loses least (Eq. 3 of its paper) or StructKV's pivot (Eq. 4-9). It is "
        "stored for the model's configuration and weights, where a server with that --kv-policy "
        "looks. If no layer keeps the answers, none is stored.",
    )
    command.set_defaults(run=_calibrate)
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    command.add_argument(
        "--method", choices=_METHODS, default="fastkv", help="whose layer (default: %(default)s)"
    )
    command.add_argument(
        "--criterion",
        choices=_CRITERIA,
        default="answers",
        help="answers: what the tokens that answers need say; paper: Eq. 3 or Eq. 4-9 (default: "
        "%(default)s)",
    )
    add_prompts(
        command,
        "default: generated lookups; by --criterion paper a built-in text for structkv, and fastkv "
        "has none",
    )
    _add_lookups(command)
    _add_layers(command)
    _add_rates(command)
    add_window(command)
    add_weights(command, "structkv, paper: ")
    add_model(command)
    picture = command.add_mutually_exclusive_group()
    picture.add_argument(
        "--plot", metavar="PATH", help="where to draw the curve (default: beside the result, .png)"
    )
    picture.add_argument("--no-plot", action="store_true", help="draw nothing")


def _add_lookups(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--count",
        type=positive,
        metavar="N",
        help=f"generated lookups that the layer is chosen by (default: {_COUNT})",
    )
    command.add_argument(
        "--confirm",
        type=_confirming,
        metavar="N",
        help=f"others that the choice is confirmed by, at least {_CONFIRM} (default: {_CONFIRM})",
    )
    command.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help=f"tokens of each; at most what the model takes (default: {_LENGTH})",
    )
    command.add_argument(
        "--target",
        type=_share,
        metavar="SHARE",
        help="of the best layer's score that a layer must have to be tried first (default: "
        f"{_TARGET})",
    )
    command.add_argument(
        "--least",
        type=_share,
        metavar="SHARE",
        help="of the full model's answers, that must stay with a certainty of 95%%: the lower end "
        f"of the interval of what stays, on both sets of prompts (default: {_LEAST})",
    )
    command.add_argument(
        "--reduction",
        choices=("sum", "max"),
        help="how the heads' scores become one (default: sum, and max where it holds with less "
        "work)",
    )
    command.add_argument(
        "--compare",
        action="store_const",
        const=True,
        help="fastkv: measure Eq. 3 too, for the table; structkv's Eq. 8 costs nothing",
    )


def _add_layers(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--min-layer",
        type=int,
        metavar="L",
        help="structkv, paper: first candidate (default: a quarter of the layers)",
    )
    command.add_argument(
        "--max-layer",
        type=int,
        metavar="L",
        help="paper: last candidate, counted from 0 (default: fastkv, half of the layers, minus 1; "
        "structkv, three quarters of them)",
    )


def _add_rates(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tsp-rate",
        type=float,
        metavar="RATE",
        help="fastkv: share of the tokens that is propagated (default: answers, searched with the "
        f"layer; paper, {FASTKV.token_rate})",
    )
    command.add_argument(
        "--struct-rate",
        type=float,
        metavar="RATE",
        help=f"structkv: share of the tokens that is propagated (default: {STRUCTKV.struct_rate})",
    )
    command.add_argument(
        "--kernel",
        type=int,
        metavar="K",
        help=f"fastkv: width of the pooling over scores (default: {FASTKV.kernel})",
    )
    command.add_argument(
        "--decay",
        type=float,
        metavar="D",
        help=f"structkv: weight of the layers below in the centrality (default: {STRUCTKV.decay})",
    )


def _calibrate(args: argparse.Namespace) -> None:
    for name, option in CALIBRATE.items():
        if getattr(args, name) is None:
            setattr(args, name, option.default)
            continue
        flag = name.replace("_", "-")
        if args.method not in option.methods:
            raise ToolError(f"--{flag} has no meaning without --method {option.methods[0]}")
        if args.criterion not in option.criteria:
            raise ToolError(f"--{flag} has no meaning without --criterion {option.criteria[0]}")
    if args.plot is not None:
        check_matplotlib("--plot")
    _tool(_CALIBRATORS[args.method, args.criterion]).run(args)


def _confirming(text: str) -> int:
    value = positive(text)
    if value < _CONFIRM:
        raise argparse.ArgumentTypeError(f"must be at least {_CONFIRM}, got {text}")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0  # No share, as is said below.
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value
