"""What policies kept of a model's answers, where servers of that model find it."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import at_dtype, split_dtype
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.folder import CACHE_VARIABLE, WAY_OUT, cache_root, root_to_read
from vllm_kvx.tools.evaluate.groups import with_retrieval
from vllm_kvx.tools.evaluate.rows import FULL, is_of_original
from vllm_kvx.tools.evaluate.store import RESOLVED
from vllm_kvx.tools.evaluate.summary import KEPT_ALL, Cell, Summary, kept_all

logger = logging.getLogger("vllm.kvx.evaluation")

_OWN = "this model's right answers"
_MEND = f"Evaluate again, delete it, or set {CACHE_VARIABLE} to another directory."


def record_path(key: str, root: Path | None = None) -> Path:
    """The file for a model's key, whether or not it exists; `root` is the cache folder.

    Raises:
        CacheFolderError: there is no cache folder.
    """
    return (root or cache_root()) / "evaluation" / f"{key}.json"


@dataclass(frozen=True)
class Saved:
    """What became of a run's rows.

    path: the file; None if nothing was saved, and then none was written or changed.
    names: by row the name that it was saved under.
    needless: by row, why a server needs no entry of it.
    refused: by row, why it could not be saved, although it was asked for.
    """

    path: Path | None
    names: Mapping[str, str]
    needless: Mapping[str, str]
    refused: Mapping[str, str]


def save(
    key: str, summary: Summary, facts: Mapping[str, Any], rows: Sequence[str] | None = None
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
    record = _read(path) or {}
    if not isinstance(record.get("policies"), dict):
        record = {"key": key, "policies": {}}
    full = summary.cell(summary.yardstick)
    original = facts["original"] if is_of_original(summary.yardstick) else None
    full_dtype = split_dtype(facts[RESOLVED].get(summary.yardstick, FULL))[1]
    names, needless, refused = dict[str, str](), dict[str, str](), dict[str, str]()
    for name in summary.policies if rows is None else rows:
        if name == FULL or is_of_original(name):
            continue
        cell = summary.cell(name)
        if cell is None or name not in facts[RESOLVED]:
            refused[name] = _unanswered(summary, name)
            continue
        policy, dtype = split_dtype(facts[RESOLVED][name])
        stored = canonical(parse_policy(policy), dtype)
        if stored == FULL:
            needless[name] = "which is full itself"
        elif stored in names.values():
            needless[name] = "which another row is, too"
        elif full is None or cell.of_full is None:
            refused[name] = _without_ratio(full, summary.yardstick)
        elif kept_all(name, cell):
            refused[name] = f"which {KEPT_ALL}"
        elif full_dtype and _is_beside_unquantized(record["policies"].get(stored)):
            refused[name] = f"which was compared with full that is not over {full_dtype}"
        if name in needless or name in refused:
            continue
        assert full is not None and cell.of_full is not None
        names[name] = stored
        lengths = {}
        for length in summary.lengths:
            part = summary.cell(name, length=length)
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


def _unanswered(summary: Summary, name: str) -> str:
    """Why a row has nothing to be saved, where it has no question that is right or wrong."""
    if summary.answers(name) and not summary.scored:
        return "of which no answer is right or wrong: perplexity alone was asked"
    return "which answered nothing"


def _without_ratio(full: Cell | None, yardstick: str) -> str:
    """Why a row is no share of what `full` has right."""
    if full is None:
        return f"because {yardstick} answered nothing"
    if not full.score.value:
        return f"because {yardstick} has none of {full.count} answers right: there is none to keep"
    return f"because {yardstick} has none of the same prompts right"


def load(key: str, policy: KVPolicy, dtype: str | None = None) -> dict[str, Any] | None:
    """What was stored of `policy` on that model over such a KV cache; None if nothing was."""
    root = root_to_read()
    if root is None:
        return None
    path = record_path(key, root)
    record = _read(path)
    if record is None:
        return None
    policies = record.get("policies")
    found = policies.get(canonical(policy, dtype)) if isinstance(policies, dict) else None
    if found is not None and not _is_whole(found):
        logger.warning("Ignoring %s: its entry of %s is damaged. %s", path, policy, _MEND)
        return None
    if found is not None and leaves_floor(policy) and found.get("kv_floor") != DEFAULT_KV_FLOOR:
        logger.warning(
            "Ignoring %s: its entry of %s is of another default of kv_floor. %s",
            path,
            policy,
            _MEND,
        )
        return None
    return found


def leaves_floor(policy: KVPolicy) -> bool:
    """Whether the name of `policy` stands for what the default of ``kv_floor`` makes of it."""
    rates = ("kv_rate", "tsp_rate", "struct_rate", "rate")
    return any(
        "_floor" not in str(part)
        and any(getattr(part, rate, None) not in (None, 1) for rate in rates)
        for part in policy.parts
    )


def canonical(policy: KVPolicy, dtype: str | None = None) -> str:
    """The name that a policy is stored under: with retrieval on, as it is evaluated."""
    return str(with_retrieval(policy)) + at_dtype(dtype)


def line(
    policy: KVPolicy, model: str, found: Mapping[str, Any] | None, dtype: str | None = None
) -> str:
    """What the log says of a policy on a model and a KV cache: what it kept, or how to find out."""
    name = f"{policy}{at_dtype(dtype)}"
    if name == FULL:
        return "full: every entry is kept and read."
    if found is None:
        return (
            f"{name}: nobody has measured what it keeps of this model's answers: `vllm-kvx "
            f"evaluate {model} --policies {name} --save`"
        )
    value, low, high = (100 * share for share in found["of_full"])
    # Short questions have no length.
    lengths = f" of {', '.join(found['lengths'])} tokens" if found["lengths"] else ""
    whose = f"the right answers of {found['original']}" if found.get("original") else _OWN
    if found.get("full_kv_cache_dtype"):
        whose += f" over {found['full_kv_cache_dtype']} entries"
    return (
        f"{name}: kept {value:.1f}% [{low:.1f}-{high:.1f}] of {whose} ({found['n']} prompts"
        f"{lengths}, full {100 * found['full']:.1f}% right, {str(found.get('date'))[:10]})."
    )


def _is_beside_unquantized(found: Any) -> bool:
    return isinstance(found, dict) and "full_kv_cache_dtype" not in found


def _is_whole(found: Any) -> bool:
    """Whether an entry has what is said of it."""
    if not isinstance(found, dict):
        return False
    of_full, lengths = found.get("of_full"), found.get("lengths")
    numbers = [found.get("full"), *(of_full if isinstance(of_full, list) else [])]
    return (
        len(numbers) == 4
        and all(isinstance(number, int | float) for number in numbers)
        and isinstance(lengths, dict)
        and isinstance(found.get("n"), int)
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Ignoring %s: %s. %s", path, error, _MEND)
        return None
    return record if isinstance(record, dict) else None
