"""Names of a report's rows: a policy on the model, or on the original that it was tuned from."""

FULL = "full"
_ORIGINAL = " (original)"


def row_of_original(policy: str) -> str:
    """The row of a policy on the original; on the model itself a row is named as its policy."""
    return policy + _ORIGINAL


def is_of_original(row: str) -> bool:
    """Whether a row is the original's."""
    return row.endswith(_ORIGINAL)


def policy_of(row: str) -> str:
    """The policy of a row, as the user names it."""
    return row.removesuffix(_ORIGINAL)


FULL_ORIGINAL = row_of_original(FULL)
