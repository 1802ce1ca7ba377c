"""Options of `vllm-kvx doctor`; the work is in ``command``, which is imported only to do it."""

import argparse
import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_kvx.config.arguments import positive, served_policy, server_policy
from vllm_kvx.config.settings import REQUEST_POLICIES

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

TIMEOUT_S = 180.0


def add_doctor(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "doctor",
        usage="vllm-kvx doctor [MODEL] [--kv-policy POLICY] [options] [flags of vllm serve]",
        help="see what works here, and whether a server would start",
        description="Looks at the installation, and at what a server of MODEL with these flags "
        "would do: whether it starts, what its policy stores, and what nobody has measured yet. "
        "Put `vllm-kvx doctor` in the place of `vllm serve`: all other flags are read as the "
        "server reads them. Of the model the configuration and file headers are read; no weights "
        "are loaded, and nothing is downloaded.",
        epilog="Exit code: 0 if nothing stands in the way of such a server, 1 if something is "
        "broken, 2 if the command line is wrong.",
        allow_abbrev=False,
    )
    command.set_defaults(run=_doctor, serve_args=[])
    command.add_argument(
        "model", metavar="MODEL", nargs="?", help="directory or Hugging Face hub name; comes first"
    )
    command.add_argument(
        "--kv-policy", type=server_policy, metavar="POLICY", help="as the server's (default: none)"
    )
    command.add_argument(
        "--kv-layout", type=served_policy, nargs="+", metavar="POLICY", help="as the server's"
    )
    command.add_argument(
        "--kv-request-policies",
        choices=REQUEST_POLICIES,
        help="as the server's (default: layout)",
    )
    command.add_argument(
        "--additional-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="as the server's, for the other keys",
    )
    command.add_argument("--revision", help="of a model on the hub (default: main)")
    command.add_argument(
        "--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="as the server's"
    )
    command.add_argument(
        "--gpu-memory",
        type=_positive_number,
        metavar="GIB",
        help="memory of a GPU for the estimate of the KV pool (default: that of the first GPU)",
    )
    command.add_argument(
        "--prompt-len",
        type=positive,
        metavar="N",
        help="tokens of the prompt that rows and bytes are told for (default: the longest)",
    )
    command.add_argument(
        "--timeout",
        type=_positive_number,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="after which a check counts as hanging (default: %(default)g)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _doctor(args: argparse.Namespace) -> int:
    code: int = import_module("vllm_kvx.tools.doctor.command").run(args)
    return code


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def _positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value
