"""Which tokens of a prompt the upper layers run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """What the layers from `cutoff` on run of a prompt: its first `anchors`, its last `tail`."""

    cutoff: int
    anchors: int = 1
    tail: int = 1

    def rows(self, prompt_len: int, length: int) -> list[int]:
        """The positions that run in the upper layers, of a prompt and its answer of `length`."""
        tail = max(prompt_len - self.tail, 0)
        return [*range(min(self.anchors, tail)), *range(tail, length)]
