"""What `vllm-kvx recommend` found of a model, where servers with `--kv-policy auto` find it."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.auto import check_keep
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy, servable
from vllm_kvx.records.folder import CACHE_VARIABLE, WAY_OUT, cache_root, root_to_read

logger = logging.getLogger("vllm.kvx.recommendation")

FOLDER = "recommendation"
_MEND = f"Run `vllm-kvx recommend` again, delete it, or set {CACHE_VARIABLE} to another directory."


@dataclass(frozen=True)
class Row:
    """A policy that was asked.

    policy: its name, with every layer in numbers. kept: the share of `full`'s right answers that it
    kept, and the ends of the interval; they hold at every look of the run together (``level``).
    n: prompts that it was asked. right: those of them that `full` has right.
    gains: over `full` for the workload, by name: `ttft`, `tpot`, `pool`, `requests`.
    verdict: `kept`, `lost`, `undecided`, or `outdone` by one that keeps the answers and gains more.
    """

    policy: str
    kept: tuple[float, float, float]
    n: int
    right: float
    gains: Mapping[str, float]
    verdict: str


@dataclass(frozen=True)
class Recommendation:
    """What ``recommendation/KEY.json`` in the cache folder holds, or ``KEY@fp8.json``.

    key: the model's (``model_key``). model: what it was called. keep: the share that was asked for.
    workload: tokens of `input` and `output`, and requests at a time (`concurrency`), which gains
    are for; device: on what. kv_cache_dtype: as policies' names have it after the @; empty for a
    cache that quantizes nothing. tasks: what was asked. rows: the policies, those that gain most
    first. chosen: the one that gains most of those that kept the answers; None if none did.
    level: of the intervals, 0 to 1. kv_floor: what names of policies mean that leave it out.
    versions: of packages. command, date: of the run.
    """

    key: str
    model: str
    keep: float
    workload: Mapping[str, int]
    device: str
    kv_cache_dtype: str
    tasks: Sequence[str]
    rows: Sequence[Row]
    chosen: str | None
    level: float
    versions: Mapping[str, str]
    command: str
    date: str
    kv_floor: int = field(default=DEFAULT_KV_FLOOR)

    def that_keep(self, keep: float) -> list[Row]:
        """The rows that were shown to keep so large a share, those that gain most first."""
        return [row for row in self.rows if row.kept[1] >= keep]


def record_path(key: str, kv_cache_dtype: str = "", root: Path | None = None) -> Path:
    """The file for a model's key, whether or not it exists; `root` is the cache folder.

    kv_cache_dtype: as policies' names have it after the @; empty for a cache that quantizes
    nothing.

    Raises:
        CacheFolderError: there is no cache folder.
    """
    over = f"@{kv_cache_dtype}" if kv_cache_dtype else ""
    return (root or cache_root()) / FOLDER / f"{key}{over}.json"


def save(record: Recommendation) -> Path:
    """Stores a record in the place of what was stored for its model; returns its file.

    Raises:
        ToolError: there is no cache folder, or it cannot be written.
    """
    path = record_path(record.key, record.kv_cache_dtype)
    # Of its own: two runs may end at once, and each record is whole.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}; {WAY_OUT}") from error
    return path


def load(key: str, kv_cache_dtype: str = "") -> Recommendation | None:
    """What was stored of a model over such a KV cache; None if nothing was that can be used.

    A warning says of a record that cannot be used why, and how to mend that.
    """
    root = root_to_read()
    if root is None:
        return None
    path = record_path(key, kv_cache_dtype, root)
    try:
        record = of_json(json.loads(path.read_text(encoding="utf-8")))
        if record.kv_cache_dtype != kv_cache_dtype:
            raise ValueError(f"it is of another KV cache dtype, {record.kv_cache_dtype!r}")
        if record.key != key:
            raise ValueError(f"its key is {record.key!r}, wanted is {key!r}")
        if record.kv_floor != DEFAULT_KV_FLOOR:
            raise ValueError(
                f"its policies' names are of another default of kv_floor, {record.kv_floor}"
            )
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Ignoring %s: %s. %s", path, error, _MEND)
        return None
    return record


def of_json(found: Any) -> Recommendation:
    """The record that `found`, parsed JSON, is.

    Raises:
        ValueError: it is none; the message says what is wrong with it.
    """
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    known = {each.name for each in fields(Recommendation)}
    if missing := known - set(found):
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    try:
        rows = [_row(each) for each in found["rows"]]
        values = {name: found[name] for name in known} | {"rows": rows}
        record = Recommendation(**values)
        check_keep(record.keep)
        if not all(type(record.workload[name]) is int for name in _WORKLOAD):
            raise ValueError(f"its workload has not {', '.join(_WORKLOAD)}")
    except (TypeError, KeyError, AttributeError, PolicyError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return record


_WORKLOAD = ("input", "output", "concurrency")


def _row(found: Any) -> Row:
    """A row, whose policy parses; TypeError, KeyError or PolicyError where it is none."""
    row = Row(**{**found, "kept": tuple(found["kept"])})
    numbers = [*row.kept, row.n, row.right, *row.gains.values()]
    if len(row.kept) != 3 or not all(isinstance(each, int | float) for each in numbers):
        raise TypeError(f"the row of {row.policy} has values that are no numbers")
    # Earlier records have bare names, which no server takes.
    return replace(row, policy=servable(parse_policy(row.policy)))
