"""What a check finds, and what checks are given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

Status = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """status: `note` is worth knowing, `problem` stands in the way of what was asked for.

    says: one line. mend: the command or setting that mends it; empty if there is none.
    """

    status: Status
    says: str
    mend: str = ""


def ok(says: str) -> Finding:
    return Finding("ok", says)


def note(says: str, mend: str = "") -> Finding:
    return Finding("note", says, mend)


def problem(says: str, mend: str = "") -> Finding:
    return Finding("problem", says, mend)


@dataclass(frozen=True)
class Request:
    """What doctor was asked for; fit for JSON.

    model: a directory or a hub name. policy: that of --kv-policy. layout: those of --kv-layout.
    request_policies: that of --kv-request-policies. additional_config: as given.
    gpu_memory: GiB of a GPU. prompt_len: tokens. ranks: --tensor-parallel-size.
    serve_args: all other flags, as the server is given them.
    """

    model: str | None = None
    revision: str | None = None
    policy: str | None = None
    layout: tuple[str, ...] | None = None
    request_policies: str | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    gpu_memory: float | None = None
    prompt_len: int | None = None
    serve_args: tuple[str, ...] = ()


@dataclass
class Context:
    """What the checks of one process share.

    request: what was asked for.
    missing: names of sections without which others cannot work, and why not.
    directory: where the model's files are. text_config: config.json, its text model's part.
    additional_config: as the server reads it from its flags; None if they were not read.
    kv_cache_dtype: of the server; as its flags say, if its configuration was not made.
    sizes: that the server's flags ask for, see ``asked_sizes``; None if vLLM did not parse them.
    vllm_config: the server's configuration, if it was made.
    ops: which ops retrieval runs, and why, as ``choose_backend`` says; None if it was not asked.
    gpu_bytes: memory of the first GPU. is_cpu: whether vLLM runs on a CPU here.
    """

    request: Request
    missing: dict[str, str] = field(default_factory=dict)
    directory: Path | None = None
    text_config: dict[str, Any] = field(default_factory=dict)
    additional_config: dict[str, Any] | None = None
    kv_cache_dtype: str | None = None
    sizes: dict[str, float] | None = None
    vllm_config: Any = None
    ops: tuple[str, str] | None = None
    gpu_bytes: int | None = None
    is_cpu: bool = False

    def state(self) -> dict[str, Any]:
        """All but the request and what takes vLLM, fit for JSON: for a process that goes on."""
        names = (
            *("missing", "text_config", "additional_config", "kv_cache_dtype"),
            *("sizes", "ops", "gpu_bytes", "is_cpu"),
        )
        directory = None if self.directory is None else str(self.directory)
        return {"directory": directory, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of(cls, request: Request, state: dict[str, Any]) -> "Context":
        """Goes on from a `state`; an empty one is the beginning."""
        found = cls(request, **state)
        found.directory = None if found.directory is None else Path(found.directory)
        found.ops = None if found.ops is None else (found.ops[0], found.ops[1])
        return found


class Section(NamedTuple):
    """A group of checks.

    needs: sections that must not be missing: a package that crashes is not imported twice.
    """

    name: str
    run: Callable[[Context], Iterator[Finding]]
    needs: tuple[str, ...] = ()


def reason(error: BaseException) -> str:
    """An exception in one line: its class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
