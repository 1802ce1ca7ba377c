"""Positions of a sequence that a layer does not store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """Positions [start, start + size) hold no KV; every other position is stored in order.

    grows: whether the gap reaches up to the last token as soon as that is past it: each token takes
        the slot of the one before.
    """

    start: int = 0
    size: int = 0
    grows: bool = False

    def stored_len(self, logical_len: int) -> int:
        """How many of the positions below `logical_len` are stored once all are computed."""
        size = max(self.size, logical_len - 1 - self.start) if self.grows else self.size
        return logical_len - min(max(logical_len - self.start, 0), size)

    def slot(self, position: int) -> int | None:
        """Index of `position` among the request's stored entries; None in the gap."""
        return self.stored_len(position + 1) - 1 if self.is_kept(position) else None

    def is_kept(self, position: int) -> bool:
        """True if `position` is stored."""
        return not self.start <= position < self.start + self.size


NO_GAP = Gap()
