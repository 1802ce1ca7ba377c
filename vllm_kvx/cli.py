"""`vllm-kvx`: the tools around a server, one subcommand each.

vllm-kvx calibrate MODEL                      finds FastKV's TSP layer, by answers
vllm-kvx calibrate MODEL --method structkv    finds StructKV's pivot, by answers
vllm-kvx diagnose MODEL                       draws where a model's attention settles
vllm-kvx evaluate MODEL                       shows what policies keep of a model's answers

This module reads the options, for which it needs neither torch nor vLLM; the modules of
``calibration/`` do the work.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvx.errors import ToolError, vllm_needed
from vllm_kvx.evaluation.options import add_evaluate, positive
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.parameters import PolicyError

_FASTKV, _STRUCTKV = FastKV(), StructKV()
_WEIGHTS = (_STRUCTKV.entropy_weight, _STRUCTKV.sparsity_weight, _STRUCTKV.variance_weight)
_METHODS, _CRITERIA = ("fastkv", "structkv"), ("answers", "paper")
_COUNT, _LENGTH, _TARGET, _LEAST = 16, 2048, 0.98, 0.9


class _Option(NamedTuple):
    """An option of `calibrate` that only some methods or criteria have, and its default there."""

    default: Any
    methods: tuple[str, ...] = _METHODS
    criteria: tuple[str, ...] = _CRITERIA


_CALIBRATE = {
    "tsp_rate": _Option(_FASTKV.tsp_rate, ("fastkv",)),
    "kernel": _Option(_FASTKV.kernel, ("fastkv",)),
    "max_layer": _Option(None, criteria=("paper",)),
    "min_layer": _Option(None, ("structkv",), ("paper",)),
    "weights": _Option(_WEIGHTS, ("structkv",), ("paper",)),
    "struct_rate": _Option(_STRUCTKV.struct_rate, ("structkv",), ("answers",)),
    "decay": _Option(_STRUCTKV.decay, ("structkv",), ("answers",)),
    "reduction": _Option(None, criteria=("answers",)),
    "count": _Option(_COUNT, criteria=("answers",)),
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

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's) and return its exit code.

    The code is 2 if it cannot be done as asked; one line on stderr then says what to change.
    """
    args = parser().parse_args(argv)
    try:
        with vllm_needed():
            args.run(args)
    except (ToolError, PolicyError) as error:
        print(f"vllm-kvx {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """All commands and their options; the parsed `run` is the function that does the work."""
    top = argparse.ArgumentParser(prog="vllm-kvx", description="Tools around a vllm-kvx server.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_calibrate(commands)
    _add_diagnose(commands)
    add_evaluate(commands)
    return top


def _tool(name: str) -> Any:
    """A module of ``calibration/``, imported only now: it imports torch, which takes seconds."""
    return import_module(f"vllm_kvx.calibration.{name}")


def _add_calibrate(commands: "_Commands") -> None:
    command = commands.add_parser(
        "calibrate",
        help="find FastKV's TSP layer or StructKV's pivot for a model",
        description="Finds the layer after which only selected tokens go on: the earliest one "
        "under which the model's answers stay, or, by --criterion paper, the one where FastKV "
        "loses least (Eq. 3 of its paper) or StructKV's pivot (Eq. 4-9 of its paper). It is "
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
    _add_prompts(
        command,
        "default: generated lookups; by --criterion paper a built-in text for structkv, and fastkv "
        "has none",
    )
    _add_lookups(command)
    _add_layers(command)
    _add_rates(command)
    _add_window(command)
    _add_weights(command, None, "structkv, paper: ")
    _add_model(command)
    picture = command.add_mutually_exclusive_group()
    picture.add_argument(
        "--plot", metavar="PATH", help="where to draw the curve (default: beside the result, .png)"
    )
    picture.add_argument("--no-plot", action="store_true", help="draw nothing")


def _add_lookups(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--count", type=positive, metavar="N", help=f"generated lookups (default: {_COUNT})"
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
        help="of the best layer's score that a layer must have, and of the full model's answers "
        f"that must stay under it (default: {_TARGET})",
    )
    command.add_argument(
        "--least",
        type=_share,
        metavar="SHARE",
        help=f"of answers that stay, below which no layer is chosen (default: {_LEAST})",
    )
    command.add_argument(
        "--reduction",
        choices=("sum", "max"),
        help="how the heads' scores become one (default: sum, and max where it allows an earlier "
        "layer)",
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
        help=f"fastkv: share of the tokens that is propagated (default: {_FASTKV.tsp_rate})",
    )
    command.add_argument(
        "--struct-rate",
        type=float,
        metavar="RATE",
        help=f"structkv: share of the tokens that is propagated (default: {_STRUCTKV.struct_rate})",
    )
    command.add_argument(
        "--kernel",
        type=int,
        metavar="K",
        help=f"fastkv: width of the pooling over scores (default: {_FASTKV.kernel})",
    )
    command.add_argument(
        "--decay",
        type=float,
        metavar="D",
        help=f"structkv: weight of the layers below in the centrality (default: {_STRUCTKV.decay})",
    )


def _calibrate(args: argparse.Namespace) -> None:
    for name, option in _CALIBRATE.items():
        if getattr(args, name) is None:
            setattr(args, name, option.default)
            continue
        flag = name.replace("_", "-")
        if args.method not in option.methods:
            raise ToolError(f"--{flag} has no meaning without --method {option.methods[0]}")
        if args.criterion not in option.criteria:
            raise ToolError(f"--{flag} has no meaning without --criterion {option.criteria[0]}")
    _tool(_CALIBRATORS[args.method, args.criterion]).run(args)


def _add_diagnose(commands: "_Commands") -> None:
    command = commands.add_parser(
        "diagnose",
        help="draw where a model's attention settles, and what selecting tokens there recovers",
        description="Draws StructKV's Figures 4 and 5 for a model: entropy, sparsity, variance and "
        "transition score by layer, with the pivot; and the share of the attention mass that "
        "StructKV, FastKV, SnapKV and a GemFilter-like selection leave to each layer. Writes "
        "their numbers beside them.",
    )
    command.set_defaults(run=lambda args: _tool("diagnose").run(args))
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    _add_prompts(command, "default: a built-in text")
    command.add_argument(
        "--pivot",
        type=int,
        metavar="L",
        help="select after this layer, counted from 0 (default: the pivot of these prompts)",
    )
    command.add_argument(
        "--struct-rate",
        type=float,
        default=_STRUCTKV.struct_rate,
        metavar="RATE",
        help="share of the tokens that StructKV, FastKV and GemFilter select (default: "
        "%(default)s)",
    )
    command.add_argument(
        "--kv-rate",
        type=float,
        default=_STRUCTKV.kv_rate,
        metavar="RATE",
        help="share of the entries that SnapKV retains (default: %(default)s)",
    )
    command.add_argument(
        "--decay",
        type=float,
        default=_STRUCTKV.decay,
        metavar="D",
        help="weight of the layers below in StructKV's centrality (default: %(default)s)",
    )
    command.add_argument(
        "--kernel",
        type=int,
        default=_FASTKV.kernel,
        metavar="K",
        help="width of FastKV's and SnapKV's pooling over scores (default: %(default)s)",
    )
    _add_window(command)
    _add_weights(command, _WEIGHTS)
    _add_model(command)
    command.add_argument(
        "--output", metavar="DIR", help="where to write (default: diagnose-<name of the model>)"
    )


# Options that both commands have.


def _add_prompts(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--prompts",
        metavar="FILE",
        help='.jsonl with {"prompt": "..."} or {"prompt_token_ids": [...]} per line, or .txt with '
        "a line of --- between two prompts. Texts are used as they are: apply a chat template "
        f"beforehand ({default})",
    )
    command.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="longer prompts lose their middle (default: no limit)",
    )


def _add_window(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--window",
        type=int,
        default=_STRUCTKV.window,
        metavar="W",
        help="last tokens, whose queries score the others (default: %(default)s)",
    )


def _add_weights(
    command: argparse.ArgumentParser, default: tuple[float, ...] | None, whose: str = ""
) -> None:
    command.add_argument(
        "--weights",
        type=_weights,
        default=default,
        metavar="W1,W2,W3",
        help=f"{whose}of entropy, sparsity and variance in the transition score (default: "
        f"{','.join(map(str, _WEIGHTS))})",
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--revision", help="revision of a hub model (default: main)")
    command.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:<int> (default: %(default)s)"
    )
    command.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto is the checkpoint's on a GPU, float32 on CPU (default: %(default)s)",
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def _weights(text: str) -> tuple[float, ...]:
    try:
        entropy, sparsity, variance = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be three numbers, for example 0.2,0.3,0.5; got {text!r}"
        ) from None
    return entropy, sparsity, variance


if __name__ == "__main__":
    raise SystemExit(main())
