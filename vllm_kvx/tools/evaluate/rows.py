"""Names of a report's rows: a policy on the model, or on the original that it was tuned from.

Either may name the KV cache dtype of its engine: `fier-512@fp8`, `full@fp8 (original)`.
"""

from vllm_kvx.policy.cache_dtype import FULL, split_dtype

_ORIGINAL = " (original)"


def row_of_original(policy: str) -> str:
    """The row of a policy on the original; on the model itself a row is named as its policy."""
    return policy + _ORIGINAL


def is_of_original(row: str) -> bool:
    """Whether a row is the original's."""
    return row.endswith(_ORIGINAL)


def policy_of(row: str) -> str:
    """The policy of a row, as the user names it, with its KV cache dtype."""
    return row.removesuffix(_ORIGINAL)


def dtype_of(row: str) -> str | None:
    """The KV cache dtype that a row asks for; None where the engine's other options say."""
    return split_dtype(policy_of(row))[1]


def with_dtype(row: str, dtype: str) -> str:
    """The row over such a KV cache, `@fp8`; as it is, where it names one or `dtype` is empty."""
    policy = policy_of(row)
    named = policy if "@" in policy else policy + dtype
    return row_of_original(named) if is_of_original(row) else named


FULL_ORIGINAL = row_of_original(FULL)
