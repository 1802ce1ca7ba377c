"""Options of `vllm-kvx recommend`; the work is in ``command``, which is imported only to do it."""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from vllm_kvx.config.arguments import json_object, positive
from vllm_kvx.policy.auto import DEFAULT_KEEP, check_keep
from vllm_kvx.policy.parameters import PolicyError, read_value
from vllm_kvx.tools.ideal.devices import DEVICES
from vllm_kvx.tools.recommend.defaults import (
    CONCURRENCY,
    INPUT,
    ON_CPU_MINUTES,
    OUTPUT,
    TASKS,
    TASKS_ON_CPU,
)

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_recommend(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "recommend",
        help="find the policy that gains most of those that keep a model's answers",
        description="Asks a model questions over long texts in full and under a ladder of "
        "policies, in rounds, and stops asking a policy as soon as the answers decide whether it "
        "keeps the share of right answers that --keep names. Shows what each keeps, with an "
        "interval, and what it gains for a workload, and saves that: a server with --kv-policy "
        "auto serves the best. Answers are kept: the same command goes on after an interruption.",
    )
    command.set_defaults(run=_recommend)
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    command.add_argument(
        "--keep",
        type=_share,
        default=DEFAULT_KEEP,
        metavar="SHARE",
        help="of full's right answers, that a policy has to keep (default: %(default)s)",
    )
    work = command.add_argument_group("the workload")
    work.add_argument(
        "--input",
        type=positive,
        metavar="N",
        help="tokens of a prompt, of those that are asked too "
        f"(default: {INPUT}, or what the model takes; with --prompts the median of theirs)",
    )
    work.add_argument(
        "--output",
        type=positive,
        default=OUTPUT,
        metavar="N",
        help="tokens of an answer, for what is gained (default: %(default)s)",
    )
    work.add_argument(
        "--concurrency",
        type=positive,
        default=CONCURRENCY,
        metavar="N",
        help="requests at a time, for what is gained (default: %(default)s)",
    )
    work.add_argument(
        "--device",
        choices=tuple(DEVICES),
        help="the GPU that gains are counted for (default: the one here, else an H100)",
    )
    asked = command.add_argument_group("what is asked")
    asked.add_argument(
        "--prompts",
        metavar="FILE",
        help='your own prompts, a JSON object a line: {"prompt": "...", "answer": "..."}, or '
        '"answers" with several, of which a right answer contains any',
    )
    asked.add_argument(
        "--tasks",
        type=_words,
        metavar="TASK,...",
        help=f"tasks of `vllm-kvx evaluate` or groups of them (default: "
        f"{','.join(TASKS)}, without a GPU {','.join(TASKS_ON_CPU)}; with --prompts none)",
    )
    asked.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        help="the policies of the ladder (default: those that the model runs; it shows them)",
    )
    asked.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help="questions at most (default: 512, or more where --keep needs more than half of them)",
    )
    asked.add_argument("--seed", type=int, default=0, help="which questions (default: 0)")
    asked.add_argument(
        "--time-limit",
        type=_minutes,
        metavar="MINUTES",
        help="after which nothing more is asked, and what is known is shown (default: none on a "
        f"GPU, {ON_CPU_MINUTES:g} without one)",
    )
    where = command.add_argument_group("where the model runs, and results")
    where.add_argument("--revision", help="revision of a hub model (default: main)")
    where.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='keywords of vLLM\'s LLM, such as {"gpu_memory_utilization": 0.5}',
    )
    where.add_argument(
        "--results",
        metavar="DIR",
        help="where answers and the report are kept (default: recommend-<model>)",
    )
    where.add_argument(
        "--no-save",
        action="store_true",
        help="let servers with --kv-policy auto know nothing of it",
    )


def _recommend(args: argparse.Namespace) -> None:
    import_module("vllm_kvx.tools.recommend.command").run(args)


def _share(text: str) -> float:
    try:
        return check_keep(read_value(text), "it")
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be minutes above 0, got {text}")
    return value


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
