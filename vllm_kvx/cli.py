"""`vllm-kvx`: the tools around a server, one subcommand each.

vllm-kvx serve MODEL                          is `vllm serve`, with what a CPU needs on a CPU
vllm-kvx calibrate MODEL                      finds FastKV's TSP layer, by answers
vllm-kvx calibrate MODEL --method structkv    finds StructKV's pivot, by answers
vllm-kvx diagnose MODEL                       draws where a model's attention settles
vllm-kvx diagnose MODEL --method speed        draws where a model's prompt may be cut
vllm-kvx evaluate MODEL                       shows what policies keep of a model's answers
vllm-kvx recommend MODEL                      finds the policy that gains most and keeps answers
vllm-kvx tune-speed MODEL                     tunes a checkpoint for --kv-policy speed-K
vllm-kvx build-ops                            builds the CUDA ops of fier and quest
vllm-kvx batch IN.jsonl OUT.jsonl MODEL       answers a file of requests
vllm-kvx policies [NAME]                      shows what policies there are
vllm-kvx doctor [MODEL]                       looks at what works here, and what a server would do

This module reads the options, for which it needs neither torch nor vLLM; the modules of
``tools/`` do the work.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from vllm_kvx import __version__
from vllm_kvx.errors import ToolError, vllm_needed
from vllm_kvx.ops.build import add_build_ops
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.tools.batch.options import add_batch
from vllm_kvx.tools.calibrate.options import add_calibrate
from vllm_kvx.tools.diagnose.options import add_diagnose
from vllm_kvx.tools.doctor.options import add_doctor
from vllm_kvx.tools.evaluate.options import add_evaluate
from vllm_kvx.tools.policies.command import add_policies
from vllm_kvx.tools.recommend.options import add_recommend
from vllm_kvx.tools.serve.command import add_serve
from vllm_kvx.tools.tune_speed.options import add_tune_speed

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's) and return its exit code.

    The code is 2 if it cannot be done as asked; one line on stderr then says what to change. Only
    `doctor` has codes of its own.
    """
    top, commands = _parsers()
    args, others = top.parse_known_args(argv)
    if others and not hasattr(args, "serve_args"):
        command = commands[args.command]
        command.error(f"unrecognized arguments: {' '.join(others)}{_meant(command, others)}")
    if others:
        args.serve_args = others
    try:
        with vllm_needed():
            return args.run(args) or 0
    except (ToolError, PolicyError) as error:
        print(f"vllm-kvx {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, which a usage of twenty lines would hide."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _meant(command: argparse.ArgumentParser, others: Sequence[str]) -> str:
    """Which option of `command` the first unknown one of `others` resembles, as a question."""
    known = re.findall(r"--[a-z][\w-]*", command.format_help())
    for other in others:
        near = difflib.get_close_matches(other.partition("=")[0], known, n=1)
        if other.startswith("--") and near:
            return f" (did you mean {near[0]}?)"
    return ""


def parser() -> argparse.ArgumentParser:
    """All commands and their options; the parsed `run` is the function that does the work."""
    return _parsers()[0]


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """``parser``, and each command's own."""
    about = "Tools around a vllm-kvx server."
    top: argparse.ArgumentParser = _Parser(prog="vllm-kvx", description=about)
    top.add_argument("--version", action="version", version=f"vllm-kvx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serve(commands)
    add_calibrate(commands)
    add_diagnose(commands)
    add_evaluate(commands)
    add_recommend(commands)
    add_tune_speed(commands)
    add_build_ops(commands)
    add_batch(commands)
    add_doctor(commands)
    add_policies(commands)
    return top, commands.choices


if __name__ == "__main__":
    raise SystemExit(main())
