"""Which keys are one of ours misspelt: a typo must not run what nobody asked for."""

import difflib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

# The key of a policy, in additional_config and in a request.
POLICY_KEY = "kv_policy"
# Keys of ``vllm_xargs`` that begin like ours and are vLLM's.
VLLM_KEYS = frozenset({"kv_transfer_params", "kv_cache_report_mode"})

# Comparing costs microseconds a key, and clients choose the keys: no more of them are looked at,
# and none that is longer, which resembles nothing.
MAX_KEYS = 64
MAX_LENGTH = 32

# Shares of letters in common. `kv_policies` is ours, and another's `kv_cache_policy` is not; of
# words without the prefix, `k_policy` is ours and `policy` is not.
_WITH_PREFIX = 0.77
_WITHOUT_PREFIX = 0.87


class Misspelling(NamedTuple):
    """key: as it was written; name: the one of ours that it resembles."""

    key: str
    name: str


def misspelling(keys: Iterable[Any], names: Sequence[str]) -> Misspelling | None:
    """The first of `keys` that is none of `names`, which begin with ``kv_``, and resembles one.

    Case, hyphens, blanks and the like make no difference. Only the first 64 keys are looked at.
    """
    known = tuple(names)
    for key in islice(keys, MAX_KEYS):
        if not isinstance(key, str) or len(key) > MAX_LENGTH or key in known:
            continue
        if near := _nearest(key, known):
            return Misspelling(key, near)
    return None


# Most requests have the same keys.
@lru_cache(maxsize=2048)
def _nearest(key: str, names: tuple[str, ...]) -> str | None:
    by_letters = {_letters(name): name for name in names}
    letters = _letters(key)
    cutoff = _WITH_PREFIX if {"k", "v"} <= set(letters[:3]) else _WITHOUT_PREFIX
    if not any(_may_match(len(letters), len(name), cutoff) for name in by_letters):
        return None
    found = difflib.get_close_matches(letters, by_letters, n=1, cutoff=cutoff)
    return by_letters[found[0]] if found else None


def _may_match(length: int, other: int, cutoff: float) -> bool:
    """Whether words of these lengths may have so large a share of letters in common."""
    return 2 * min(length, other) >= cutoff * (length + other)


def has_prefix(key: str) -> bool:
    """Whether `key` begins with ``kv_``, in any case and with a hyphen too."""
    # Clients send as many keys as they like, and few begin so.
    return key[:1] in "kK" and key[:3].lower().replace("-", "_") == "kv_"


def _letters(key: str) -> str:
    return "".join(filter(str.isalnum, key)).lower()
