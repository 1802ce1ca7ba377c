"""Options of the tools that measure a checkpoint: `calibrate` and `diagnose`."""

import argparse

from vllm_kvx.config.arguments import positive
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV

FASTKV, STRUCTKV = FastKV(), StructKV()


WEIGHTS = (STRUCTKV.entropy_weight, STRUCTKV.sparsity_weight, STRUCTKV.variance_weight)


def add_prompts(command: argparse.ArgumentParser, default: str) -> None:
    """--prompts and --max-prompt-tokens; `default` says what is measured without."""
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


def add_window(
    command: argparse.ArgumentParser, default: int | None = STRUCTKV.window, whose: str = ""
) -> None:
    """--window; `whose` says which method has it."""
    command.add_argument(
        "--window",
        type=int,
        default=default,
        metavar="W",
        help=f"{whose}last tokens, whose queries score the others (default: {STRUCTKV.window})",
    )


def add_weights(command: argparse.ArgumentParser, whose: str) -> None:
    """--weights, without a default; `whose` says which method has them."""
    command.add_argument(
        "--weights",
        type=_weights,
        metavar="W1,W2,W3",
        help=f"{whose}of entropy, sparsity and variance in the transition score (default: "
        f"{','.join(map(str, WEIGHTS))})",
    )


def add_model(command: argparse.ArgumentParser) -> None:
    """Adds --revision, --device and --dtype to a command that loads a model."""
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


def _weights(text: str) -> tuple[float, ...]:
    try:
        entropy, sparsity, variance = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be three numbers, for example 0.2,0.3,0.5; got {text!r}"
        ) from None
    return entropy, sparsity, variance
