"""Options of `vllm-kvx evaluate`; the work is in ``command``, which is imported only to do it."""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from vllm_kvx.config.arguments import json_object, positive
from vllm_kvx.errors import ToolError

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_POLICIES = "snapkv:kv_rate=0.2,snapkv,fier-512"


def add_evaluate(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "evaluate",
        help="see what policies keep of a model's answers, side by side",
        description="Asks a model the same questions over long texts in full and under each "
        "policy, and shows how many answers stay right, with 95% confidence intervals. Results are "
        "kept question by question: the same command takes an interrupted run up again.",
    )
    command.set_defaults(run=_evaluate)
    command.add_argument("model", metavar="MODEL", help="directory or Hugging Face hub name")
    command.add_argument(
        "--policies",
        nargs="+",
        default=DEFAULT_POLICIES.split(","),
        metavar="POLICY",
        help="what to compare with full, each maybe over a KV cache of another dtype, such as "
        f"full@fp8 (default: {DEFAULT_POLICIES.replace(',', ' ')})",
    )
    command.add_argument(
        "--original",
        metavar="MODEL",
        help="the model that MODEL was tuned from: it is asked too, in full and under each policy, "
        "and what it answers in full is what all are compared with",
    )
    command.add_argument(
        "--tasks",
        type=_words,
        metavar="TASK,...",
        help="tasks or groups of them, or `list` to see them (default: generated)",
    )
    command.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,...",
        help="tokens of a prompt, chat template included (default: 4096,16384)",
    )
    command.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help="prompts of each task and length (default: 8, and all of a data set)",
    )
    command.add_argument(
        "--turns",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: after its answer each text that has a second question is asked that, too, in the "
        "next turn of the chat and with a prefix cache (default: 1)",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="six short questions that a small chat model answers, too: a number in 1,024 tokens "
        "(the demo checkpoint: its own format)",
    )
    command.add_argument(
        "--keep-going",
        action="store_true",
        help="ask the policies even if full answers too little for a share of it to say anything",
    )
    command.add_argument("--seed", type=int, default=0, help="which questions (default: 0)")
    command.add_argument(
        "--longbench",
        metavar="DIR",
        help="folder of LongBench's .jsonl files, for tasks named longbench_*; without it they "
        "come from the hub",
    )
    command.add_argument(
        "--ruler",
        metavar="DIR",
        help="folder of files that RULER's scripts made, for tasks named ruler_*",
    )
    command.add_argument(
        "--text", metavar="FILE", help="text for the task perplexity (default: a built-in one)"
    )
    where = command.add_argument_group("where the model runs")
    where.add_argument("--revision", help="revision of a hub model (default: main)")
    where.add_argument("--original-revision", help="that of --original (default: main)")
    where.add_argument(
        "--base-url",
        metavar="URL",
        help="a running server, whose --kv-policy and kv_layout have room for the policies; "
        "without it engines are started here",
    )
    where.add_argument(
        "--concurrency",
        type=positive,
        default=16,
        metavar="N",
        help="with --base-url: requests at a time (default: %(default)s)",
    )
    where.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help='keywords of vLLM\'s LLM, such as {"gpu_memory_utilization": 0.5}',
    )
    results = command.add_argument_group("results")
    results.add_argument(
        "--output", metavar="DIR", help="where results are kept (default: evaluate-<model>)"
    )
    results.add_argument(
        "--save",
        action="store_true",
        help="let servers of this model say what their policy kept here",
    )
    results.add_argument(
        "--speed",
        metavar="FILE",
        help="a result of benchmarks.engine.compare: plots accuracy against TTFT and tokens/s too",
    )
    results.add_argument("--no-plot", action="store_true", help="draw nothing")


def _evaluate(args: argparse.Namespace) -> None:
    if args.original is not None and args.base_url is not None:
        raise ToolError(
            "--original asks two models and --base-url is a server of one: leave --base-url out, "
            "and engines are started here"
        )
    if args.speed is not None and args.no_plot:
        raise ToolError("--speed is for plots, and --no-plot draws none: leave one of them out")
    if args.original_revision is not None and args.original is None:
        raise ToolError("--original-revision has no meaning without --original")
    import_module("vllm_kvx.tools.evaluate.command").run(args)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(word) for word in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 1:
        raise argparse.ArgumentTypeError(f"must be lengths in tokens such as 4096,16384: {text!r}")
    return lengths
