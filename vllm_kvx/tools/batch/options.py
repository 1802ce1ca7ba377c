"""Options of `vllm-kvx batch`; the work is in ``run``, which is imported only to do it."""

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from vllm_kvx.config.arguments import positive, seconds

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

CONCURRENCY = 256
PROGRESS_S = 10.0


def add_batch(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "batch",
        usage="vllm-kvx batch IN.jsonl OUT.jsonl (MODEL [flags of vllm serve] | --base-url URL)",
        help="answer a file of requests, a policy for each, and go on where a run was killed",
        description="Answers each line of IN.jsonl, in OpenAI's batch format, with a line in "
        "OUT.jsonl, by a server of its own or a running one. A line's body may name its policy: "
        '"vllm_xargs": {"kv_policy": "..."}. The same command again goes on after a run that '
        "ended or was killed; no line is lost, and none is answered twice.",
        epilog="Exit code: 0 if every line has its answer, errors included; 1 if the server went "
        "away before, or an answer could not be written; 2 if the command cannot be done as asked.",
        allow_abbrev=False,
    )
    command.set_defaults(run=_batch, serve_args=[])
    command.add_argument("batch", metavar="IN.jsonl", help="requests, one a line")
    command.add_argument("answers", metavar="OUT.jsonl", help="answers, in the order they come")
    command.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="what to serve; flags of `vllm serve` follow it, such as --kv-policy",
    )
    command.add_argument("--base-url", metavar="URL", help="a running server, in its place")
    command.add_argument(
        "--retry-errors",
        action="store_true",
        help="ask the lines whose answer in OUT.jsonl is an error again, mended in IN.jsonl or "
        "not, and no others but those that have none yet",
    )
    command.add_argument(
        "--concurrency",
        type=positive,
        default=CONCURRENCY,
        metavar="N",
        help="requests that the server has at one time (default: %(default)s)",
    )
    command.add_argument(
        "--summary",
        metavar="FILE",
        help="where to write this run's lines, tokens and seconds, as JSON",
    )
    command.add_argument(
        "--progress",
        type=seconds,
        default=PROGRESS_S,
        metavar="SECONDS",
        help="how often to say how far it is (default: %(default)g)",
    )


def _batch(args: argparse.Namespace) -> int:
    code: int = import_module("vllm_kvx.tools.batch.run").run(args)
    return code
