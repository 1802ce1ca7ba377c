"""What policies kept of a model's answers, where servers of that model find it."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.policy.cache_dtype import FULL, at_dtype
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR
from vllm_kvx.policy.policy import KVPolicy, with_retrieval
from vllm_kvx.records.folder import CACHE_VARIABLE, cache_root, root_to_read

logger = logging.getLogger("vllm.kvx.evaluation")

_OWN = "this model's right answers"
_MEND = f"Evaluate again, delete it, or set {CACHE_VARIABLE} to another directory."


def record_path(key: str, root: Path | None = None) -> Path:
    """The file for a model's key, whether or not it exists; `root` is the cache folder.

    Raises:
        CacheFolderError: there is no cache folder.
    """
    return (root or cache_root()) / "evaluation" / f"{key}.json"


def load(key: str, policy: KVPolicy, dtype: str | None = None) -> dict[str, Any] | None:
    """What was stored of `policy` on that model over such a KV cache; None if nothing was."""
    root = root_to_read()
    if root is None:
        return None
    path = record_path(key, root)
    record = read(path)
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
    rates = ("kv_rate", "token_rate", "struct_rate", "rate")
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
    # Of a policy that waits for generated tokens (`after=`).
    ended = ""
    if "early" in found:
        ended = f", {found['early']} of whose answers ended before retention"
    return (
        f"{name}: kept {value:.1f}% [{low:.1f}-{high:.1f}] of {whose} ({found['n']} prompts"
        f"{lengths}{ended}, full {100 * found['full']:.1f}% right, {str(found.get('date'))[:10]})."
    )


def is_beside_unquantized(found: Any) -> bool:
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


def read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Ignoring %s: %s. %s", path, error, _MEND)
        return None
    return record if isinstance(record, dict) else None
