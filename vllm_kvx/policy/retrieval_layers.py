"""Which layers read a part of what they store, and which of them choose it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RetrievalLayers:
    """Layers count from 0, those of a model that have full attention alone.

    dense: the first layers, which read everything. FIER and Quest have two, as attention there is
        spread over all keys.
    reuse: of those above, layers that read by one choice: the first of so many makes it.
    """

    dense: int = 2
    reuse: int = 1

    def retrieves(self, layer: int) -> bool:
        """Whether a layer may read less than everything."""
        return layer >= self.dense

    def in_stages(self, starts: Sequence[int], num_layers: int) -> list[bool]:
        """By KV stage of a model, whether any of its layers may read less than everything.

        starts: the first layer of each.
        """
        return [self.retrieves(end - 1) for end in (*starts[1:], num_layers)]

    def chooses(self, layer: int, first: int = 0) -> bool:
        """Whether a layer makes the choice that it reads by.

        first: of a pipeline's rank, whose first one has nobody's choice to go by.
        """
        above = layer - self.dense
        return above >= 0 and (above % self.reuse == 0 or layer == max(first, self.dense))

    def share_that_chooses(self, num_layers: int) -> float:
        """The share of a model's layers that retrieve which choose; 1 where each does.

        Of all ranks of a pipeline alike, though the first layer of each chooses too.
        """
        retrieving = range(self.dense, num_layers)
        if not retrieving:
            return 1.0
        return sum(map(self.chooses, retrieving)) / len(retrieving)


OF_PAPERS = RetrievalLayers()
