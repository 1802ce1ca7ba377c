"""What `vllm-kvx evaluate --save` writes: a record that servers of the model read.

``records/evaluation.py`` has its path and reads it; ``server/evaluation_notice.py`` tells the log.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import FULL
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.evaluation import canonical, is_beside_unquantized, read, record_path
from vllm_kvx.records.folder import WAY_OUT
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.store import resolved_of
from vllm_kvx.tools.evaluate.summary import Cell, Summary, untested


@dataclass(frozen=True)
class Saved:
    """What became of a run's rows.

    path: the file; None if nothing was saved, and then none was written or changed.
    names: by row the name that it was saved under.
    needless: by row, why a server needs no entry of it.
    refused: by row, why it could not be saved, although it was asked for.
    """

    path: Path | None
    names: Mapping[Row, str]
    needless: Mapping[Row, str]
    refused: Mapping[Row, str]


def save(
    key: str, summary: Summary, facts: Mapping[str, Any], rows: Sequence[Row] | None = None
) -> Saved:
    """Stores what each policy kept, in the place of what was stored for that policy.

    rows: those that were asked for, answered or not; by default those that have answers.

    Where an original was asked, it is what the policy on the model keeps of the original's answers.
    A name has the KV cache dtype that its engine had, if that is a quantized one. What was compared
    with `full` over a quantized one, too, takes no place of what was compared with `full` itself.

    Raises:
        ToolError: it cannot be written.
    """
    path = record_path(key)
    record = read(path) or {}
    if not isinstance(record.get("policies"), dict):
        record = {"key": key, "policies": {}}
    full = summary.cell(summary.yardstick)
    original = facts["original"] if summary.yardstick.on_original else None
    resolved = resolved_of(facts)
    full_dtype = resolved.get(summary.yardstick, FULL_ROW).cache_dtype
    names, needless, refused = dict[Row, str](), dict[Row, str](), dict[Row, str]()
    for row in summary.rows if rows is None else rows:
        if row == FULL_ROW or row.on_original:
            continue
        cell, meant = summary.cell(row), resolved.get(row)
        if cell is None or meant is None:
            refused[row] = _unanswered(summary, row)
            continue
        stored = canonical(parse_policy(meant.policy), meant.cache_dtype)
        if stored == FULL:
            needless[row] = "which is full itself"
        elif stored in names.values():
            needless[row] = "which another row is, too"
        elif full is None or cell.of_full is None:
            refused[row] = _without_ratio(full, summary.yardstick)
        elif summary.answers(summary.yardstick).keys() - summary.answers(row).keys():
            # Short prompts come first: what was left out may be what a policy loses.
            refused[row] = "which did not answer all prompts"
        elif why := untested(row, cell):
            refused[row] = f"which {why}"
        elif full_dtype and is_beside_unquantized(record["policies"].get(stored)):
            refused[row] = f"which was compared with full that is not over {full_dtype}"
        if row in needless or row in refused:
            continue
        assert full is not None and cell.of_full is not None
        names[row] = stored
        lengths = {}
        for length in summary.lengths:
            part = summary.cell(row, length=length)
            if part is not None and part.of_full is not None:
                lengths[str(length)] = [round(value, 4) for value in part.of_full]
        record["policies"][stored] = {
            "of_full": [round(value, 4) for value in cell.of_full],
            "score": round(cell.score.value, 4),
            "full": round(full.score.value, 4),
            "n": cell.count,
            "lengths": lengths,
            "tasks": summary.scored,
            # What the name means of a policy that leaves its floor to the default.
            "kv_floor": DEFAULT_KV_FLOOR,
            "date": facts.get("date"),
            "dtype": facts.get("dtype"),
            **({"early": cell.early} if cell.early else {}),
            **({"original": original} if original else {}),
            **({"full_kv_cache_dtype": full_dtype} if full_dtype else {}),
        }
    if not names:
        return Saved(None, names, needless, refused)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}; {WAY_OUT}") from error
    return Saved(path, names, needless, refused)


def _unanswered(summary: Summary, row: Row) -> str:
    """Why a row has nothing to be saved, where it has no question that is right or wrong."""
    if summary.answers(row) and not summary.scored:
        return "of which no answer is right or wrong: perplexity alone was asked"
    return "which answered nothing"


def _without_ratio(full: Cell | None, yardstick: Row) -> str:
    """Why a row is no share of what `full` has right."""
    if full is None:
        return f"because {yardstick} answered nothing"
    if not full.score.value:
        return f"because {yardstick} has none of {full.count} answers right: there is none to keep"
    return f"because {yardstick} has none of the same prompts right"
