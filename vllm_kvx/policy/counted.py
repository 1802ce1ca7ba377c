"""Which policies have a row of their own in counters that are kept by policy.

Clients choose policies, and each one is a time series for whoever scrapes them: so rows are
bounded. Those that the server was started for always have theirs.
"""

from collections.abc import Iterable

# Rows for policies that clients name beside the server's own, first come, first served. They are
# never given to another policy: a counter that began again under another name would fall.
MAX_POLICIES = 64
# The name of the one row for all others.
OTHER = "other"


class CountedPolicies:
    """Rows by policy name: the server's own, those that came first, and one for the rest.

    size: rows that there can be.
    """

    def __init__(self, reserved: Iterable[str] = (), room: int | None = None) -> None:
        """reserved: names that have their row from the start. room: for others beside them."""
        self._rows = {name: row for row, name in enumerate(dict.fromkeys(reserved))}
        self.size = len(self._rows) + (MAX_POLICIES if room is None else room) + 1
        self._overflows = False

    def row_of(self, name: str) -> int:
        """The row of the policy `name`; the last one once the others are taken."""
        row = self._rows.get(name)
        if row is not None:
            return row
        if name == OTHER or len(self._rows) == self.size - 1:
            self._overflows = True
            return self.size - 1
        self._rows[name] = len(self._rows)
        return self._rows[name]

    @property
    def names(self) -> list[tuple[str, int]]:
        """Names and rows in use."""
        rest = [(OTHER, self.size - 1)] if self._overflows else []
        return [*self._rows.items(), *rest]
