"""`vllm-kvx`: the tools around a server, one subcommand each.

vllm-kvx calibrate MODEL --prompts FILE
"""

import argparse
import sys
from collections.abc import Sequence

from vllm_kvx.policy.fastkv import FastKV
from vllm_kvx.policy.parameters import PolicyError

# torch and transformers come with vLLM, which is an extra of this package.
_COME_WITH_VLLM = ("torch", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's) and return its exit code.

    2 if it cannot be done as asked, with one line on stderr that says what to change.
    """
    args = parser().parse_args(argv)
    try:
        # Not before the arguments are read: importing torch takes seconds.
        from vllm_kvx.tools.dense import ToolError
    except ModuleNotFoundError as error:
        if error.name not in _COME_WITH_VLLM:
            raise
        return _fail(args, f"{error.name} is missing: pip install 'vllm-kvx[cuda]' or [cpu]")
    try:
        args.run(args)
    except (ToolError, PolicyError) as error:
        return _fail(args, str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """All commands and their options; `run` in the result does the work."""
    top = argparse.ArgumentParser(prog="vllm-kvx", description="Tools around a vllm-kvx server.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_calibrate(commands)
    return top


def _fail(args: argparse.Namespace, message: str) -> int:
    print(f"vllm-kvx {args.command}: error: {message}", file=sys.stderr)
    return 2


def _add_calibrate(commands: argparse._SubParsersAction) -> None:
    def run(args: argparse.Namespace) -> None:
        from vllm_kvx.tools import calibrate

        calibrate.run(args)

    defaults = FastKV()
    command = commands.add_parser(
        "calibrate",
        help="find FastKV's TSP layer for a model",
        description="Finds the layer after which FastKV loses least by propagating selected tokens "
        "only (Eq. 3 of its paper), on prompts like those that will be served. It is stored for "
        "the model's configuration and weights, where a server with --kv-policy fastkv looks.",
    )
    command.set_defaults(run=run)
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    command.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help='calibration prompts: .jsonl with {"prompt": "..."} or {"prompt_token_ids": [...]} '
        "per line, or .txt with a line of --- between two prompts. Texts are used as they are: "
        "apply a chat template beforehand",
    )
    command.add_argument(
        "--max-layer",
        type=int,
        metavar="L",
        help="last candidate, counted from 0 (default: half of the layers, minus 1)",
    )
    command.add_argument(
        "--max-prompt-tokens",
        type=_positive,
        metavar="N",
        help="longer prompts lose their middle (default: no limit)",
    )
    command.add_argument(
        "--tsp-rate",
        type=float,
        default=defaults.tsp_rate,
        metavar="RATE",
        help="share of the tokens that is propagated (default: %(default)s)",
    )
    command.add_argument(
        "--window",
        type=int,
        default=defaults.window,
        metavar="W",
        help="last tokens, whose queries score the others (default: %(default)s)",
    )
    command.add_argument(
        "--kernel",
        type=int,
        default=defaults.kernel,
        metavar="K",
        help="width of the pooling over scores (default: %(default)s)",
    )
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
    picture = command.add_mutually_exclusive_group()
    picture.add_argument(
        "--plot", metavar="PATH", help="where to draw the curve (default: beside the result, .png)"
    )
    picture.add_argument("--no-plot", action="store_true", help="draw nothing")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
