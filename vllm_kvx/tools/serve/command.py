"""`vllm-kvx serve`: `vllm serve`, with what a CPU needs where this vLLM is a build for CPUs.

All arguments are `vllm serve`'s and are passed on as they are. This process becomes that command,
so that exit codes and signals are its own.
"""

import argparse
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvx.compat.cpu_mode import CPU_MODE_VARIABLE, engine_command, is_cpu_build
from vllm_kvx.config.environment import is_off
from vllm_kvx.errors import ToolError

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_SPACE_VARIABLE, _SPACE_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"
# The smallest blocks for which vLLM's CPU attention is made; what policies keep fills whole blocks.
_BLOCK = 32
# Retrieval's groups fill whole blocks, so that larger ones need larger blocks.
_GROUP = re.compile(r"\b(?:group|page)=(64|128|256)\b")
# The user's flag, by any of which our own is not set -> ours, without the size of blocks.
_FLAGS = {
    ("enforce-eager", "no-enforce-eager", "compilation-config", "optimization-level"): (
        "--enforce-eager",
    ),
    ("dtype",): ("--dtype", "float32"),
    ("block-size",): ("--block-size",),
}
_SPACE_FLAGS = ("kv-cache-memory-bytes", "gpu-memory-utilization")
# Short flags, of which some have their value attached: -O3.
_SHORT = {"-O": "optimization-level", "-cc": "compilation-config"}


class Needs(NamedTuple):
    """What `vllm serve` needs besides what the user gave: flags and variables.

    Both are empty on a GPU, and where ``KVX_CPU`` is off.
    """

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}

    def says(self) -> str:
        """All of it in one line; empty if there is none."""
        flags = re.sub(r" (?=--)", ", ", " ".join(self.flags))
        variables = (f"{name}={value}" for name, value in self.environment.items())
        added = ", ".join(filter(None, (*variables, flags)))
        return added and f"adds what vLLM's build for CPUs needs: {added}"


def add_serve(commands: "_Commands") -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "serve",
        usage="vllm-kvx serve MODEL [flags of vllm serve]",
        help="vllm serve, with what a CPU needs where vLLM is a build for CPUs",
        add_help=False,  # Its flags are vLLM's, --help too.
        allow_abbrev=False,
    )
    command.set_defaults(run=run, serve_args=[])


def run(args: argparse.Namespace) -> None:
    """Becomes `vllm serve`.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ToolError: its command cannot be run.
    """
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    needs = needs_of(args.serve_args)
    if said := needs.says():
        print(f"vllm-kvx serve: {said}", file=sys.stderr)
    command = [*vllm_command(), "serve", *args.serve_args, *needs.flags]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, {**os.environ, **needs.environment})
    except OSError as error:
        raise ToolError(f"{command[0]} cannot be run: {error.strerror}") from error


def vllm_command() -> list[str]:
    """The ``vllm`` command of this Python's environment."""
    for folder in (sysconfig.get_path("scripts"), Path(sys.executable).parent):
        script = Path(folder) / "vllm"
        if os.access(script, os.X_OK):
            return [str(script)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def needs_of(arguments: Sequence[str]) -> Needs:
    """What a server with these arguments of `vllm serve` needs here; what they say wins."""
    if not is_cpu_build() or is_off(CPU_MODE_VARIABLE):
        return Needs()
    environment = {} if CPU_MODE_VARIABLE in os.environ else {CPU_MODE_VARIABLE: "1"}
    if not engine_command(["serve", *arguments]):
        return Needs((), environment)
    config = _config_file(arguments)
    given = {*_flags_in(arguments), *(str(key).replace("_", "-") for key in config)}
    flags: list[str] = []
    for names, ours in _FLAGS.items():
        if not _is_given(names, given):
            flags += ours
    if flags[-1:] == ["--block-size"]:
        groups = _GROUP.findall(" ".join([*arguments, *map(str, config.values())]))
        flags.append(str(max([_BLOCK, *map(int, groups)])))
    if not os.environ.get(_SPACE_VARIABLE) and not _is_given(_SPACE_FLAGS, given):
        environment[_SPACE_VARIABLE] = _SPACE_GIB
    return Needs(tuple(flags), environment)


def _is_given(names: Sequence[str], given: set[str]) -> bool:
    """Whether one of `names` is among the flags, which vLLM takes shortened too."""
    return any(name == each or (each and name.startswith(each)) for name in names for each in given)


def _flags_in(arguments: Sequence[str]) -> Iterator[str]:
    """The names of the flags, as vLLM reads them: `--block_size=64` is block-size."""
    for word in arguments:
        if word.startswith("--"):
            # `--compilation-config.mode 0` is one too.
            yield re.split(r"[=.]", word[2:], maxsplit=1)[0].replace("_", "-")
        yield from (name for short, name in _SHORT.items() if word.startswith(short))


def _config_file(arguments: Sequence[str]) -> Mapping[Any, Any]:
    """What the file of `--config` says; what cannot be read is vLLM's to complain of."""
    path = ""
    for word, following in pairwise([*arguments, ""]):
        name, _, value = word.partition("=")
        if name == "--config":
            path = value or following
    if not path:
        return {}
    import yaml  # Comes with vLLM.

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
