"""Options of `vllm-kvx tune-speed`; the work is in ``command``, which is imported only to do it."""

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_kvx.config.arguments import json_object, positive
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.plan import RECITALS, TURNS

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# The paper's are 5e-6 for both. It tunes for hours on labelled data; in the minutes that this takes
# LoRA has to go faster (docs/use/tuning-for-speed.md).
LEARNING_RATES = {"lora": 3e-4, "full": 2e-5}
# Defaults of the options that only LoRA has, and of those of prompts that are made or answered.
_LORA: dict[str, Any] = {"rank": 32, "alpha": 64, "dropout": 0.0}
_DISTILLED: dict[str, Any] = {"hidden_loss": 1.0, "at_full_depth": 0.0}
_ASKING: dict[str, Any] = {
    "count": 4000,
    "lookups": 0.5,
    # As the chat template and --max-length allow (`sources.plan_of`).
    "recitals": None,
    "turns": None,
    "answer_tokens": 256,
    "engine_args": {},
}


def add_tune_speed(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "tune-speed",
        help="tune a checkpoint for --kv-policy speed-K",
        description="Tunes a checkpoint so that it keeps its answers where the layers from K on "
        "see of a prompt only its first and last token. By default no labelled data are needed: "
        "the model learns to predict under the cut what it predicts at full depth, on its own "
        "answers to generated lookups and to prompts that it writes itself. The same command "
        "takes an interrupted run up again.",
    )
    command.set_defaults(run=_tune)
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    command.add_argument(
        "--cutoff",
        type=int,
        required=True,
        metavar="K",
        help="layers that see the whole prompt; `vllm-kvx diagnose MODEL --method speed` shows "
        "where to cut",
    )
    command.add_argument(
        "--out", required=True, metavar="DIR", help="where the tuned checkpoint goes"
    )
    command.add_argument(
        "--anchors",
        type=int,
        default=1,
        metavar="N",
        help="first prompt tokens that every layer sees (default: %(default)s)",
    )
    command.add_argument(
        "--tail",
        type=positive,
        default=1,
        metavar="N",
        help="last prompt tokens that every layer sees (default: %(default)s)",
    )
    command.add_argument("--revision", help="revision of a hub model (default: main)")
    _add_data(command)
    _add_training(command)
    _add_machine(command)


def _add_data(command: argparse.ArgumentParser) -> None:
    data = command.add_argument_group("what is learnt from")
    data.add_argument(
        "--prompts",
        metavar="FILE",
        help='.jsonl with {"messages": [...]}, {"prompt": "..."}, {"text": "..."} or '
        '{"prompt_token_ids": [...]} per line: the model answers them beside those that are made',
    )
    data.add_argument(
        "--sft",
        metavar="FILE",
        help='.jsonl with {"messages": [...]} per line, whose last message is the answer to learn, '
        'or "answer" beside "prompt" or "text", in place of self-distillation',
    )
    data.add_argument(
        "--count",
        type=int,
        metavar="N",
        help=f"prompts that are made (default: {_ASKING['count']}; 0 with --prompts for those "
        "alone)",
    )
    data.add_argument(
        "--lookups",
        type=_share,
        metavar="SHARE",
        help="of the prompts that are made, those that look something up in a generated text; the "
        f"model writes the others itself (default: {_ASKING['lookups']})",
    )
    data.add_argument(
        "--recitals",
        type=_share,
        metavar="SHARE",
        help="of the generated lookups, those that ask for a part of the text, word for word; the "
        f"answer is the text's, and not the model's (default: {RECITALS}, if the chat template "
        "allows it)",
    )
    data.add_argument(
        "--turns",
        type=positive,
        metavar="N",
        help="questions to a generated text, each in a turn of its own, as far as they fit into "
        f"--max-length (default: {TURNS}, or what the chat template and --max-length allow)",
    )
    data.add_argument(
        "--max-length",
        type=positive,
        default=8192,
        metavar="N",
        help="tokens of the longest prompt with its answer (default: %(default)s)",
    )
    data.add_argument(
        "--answer-tokens",
        type=positive,
        metavar="N",
        help=f"of the longest answer (default: {_ASKING['answer_tokens']})",
    )
    data.add_argument(
        "--held-out",
        type=positive,
        default=200,
        metavar="N",
        help="examples that only measure agreement (default: %(default)s)",
    )
    data.add_argument(
        "--only-examples",
        action="store_true",
        help="have the prompts answered and stop, for runs with --examples",
    )
    data.add_argument(
        "--examples",
        metavar="DIR",
        help="the answered prompts of another run of the same model, by its --out",
    )


def _add_training(command: argparse.ArgumentParser) -> None:
    training = command.add_argument_group("how")
    training.add_argument(
        "--method",
        choices=("lora", "full"),
        default="lora",
        help="LoRA, merged afterwards, or all weights (default: %(default)s)",
    )
    for name, kind in (("rank", positive), ("alpha", positive), ("dropout", float)):
        help = f"LoRA's (default: {_LORA[name]})"
        training.add_argument(f"--{name}", type=kind, help=help)
    training.add_argument(
        "--hidden-loss",
        type=float,
        metavar="WEIGHT",
        help="of the distance between the upper layers' hidden states and those at full depth, "
        f"beside the divergence of the predictions (default: {_DISTILLED['hidden_loss']})",
    )
    training.add_argument(
        "--at-full-depth",
        type=_share,
        metavar="SHARE",
        help="of the batches, those that are learnt without the cut, so that the weights answer "
        f"there as before; below 1 (default: {_DISTILLED['at_full_depth']:g})",
    )
    training.add_argument(
        "--lr",
        type=float,
        help=f"learning rate (default: {LEARNING_RATES['lora']}, with --method full "
        f"{LEARNING_RATES['full']})",
    )
    training.add_argument(
        "--epochs", type=float, default=1.0, metavar="N", help="(default: %(default)s)"
    )
    training.add_argument(
        "--batch-tokens",
        type=positive,
        default=32768,
        metavar="N",
        help="tokens of a batch, and the most that run at once; at least --max-length (default: "
        "%(default)s)",
    )
    training.add_argument(
        "--accumulate",
        type=positive,
        default=2,
        metavar="N",
        help="batches of a step on each GPU (default: %(default)s)",
    )
    training.add_argument(
        "--evaluations",
        type=positive,
        default=4,
        metavar="N",
        help="how often held-out agreement is measured, and a checkpoint written (default: "
        "%(default)s)",
    )
    training.add_argument(
        "--checkpointing",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether activations are computed again in the backward pass; auto does so where "
        "memory needs it (default: %(default)s)",
    )
    training.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")


def _add_machine(command: argparse.ArgumentParser) -> None:
    machine = command.add_argument_group("where")
    machine.add_argument(
        "--gpus",
        type=positive,
        help="processes to train with, one a GPU (default: all that torch sees)",
    )
    machine.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:<int> (default: %(default)s)"
    )
    machine.add_argument(
        "--engine-args",
        type=json_object,
        metavar="JSON",
        help='keywords of vLLM\'s LLM for the answers, such as {"gpu_memory_utilization": 0.5}',
    )


def _tune(args: argparse.Namespace) -> None:
    if args.lr is None:
        args.lr = LEARNING_RATES[args.method]
    _complete(args, _LORA, "--method full" if args.method == "full" else None)
    distilled = dict.fromkeys(_DISTILLED, 0.0) if args.sft else _DISTILLED
    _complete(args, distilled, "--sft" if args.sft else None)
    answered = next((name for name in ("sft", "examples") if getattr(args, name)), None)
    _complete(args, _ASKING, f"--{answered}" if answered else None)
    for name in ("peft", "accelerate"):
        if find_spec(name) is None:
            raise ToolError(f"{name} is missing: pip install 'vllm-kvx[tune]'")
    import_module("vllm_kvx.tools.tune_speed.command").run(args)


def _complete(args: argparse.Namespace, defaults: dict[str, Any], unless: str | None) -> None:
    """Sets what is not given to its default; under the option `unless` none may be given."""
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif unless is not None:
            raise ToolError(f"--{name.replace('_', '-')} has no meaning with {unless}")


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value
