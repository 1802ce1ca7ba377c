"""What rows are between two layers: their residual stream, and what the next attention takes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Projected:
    """What a layer's attention takes: query, (N, H, D), key and value, each (N, KV heads, D)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def select(self, rows: Tensor) -> "Projected":
        """Those of `rows`, (n,) int64."""
        return Projected(*(rows_of(part, rows) for part in (self.query, self.key, self.value)))


@dataclass
class Stream:
    """N rows between two layers.

    terms: (N, hidden) each; the residual stream is their sum.
    projected: of the next layer; None if that has yet to project it.
    """

    terms: tuple[Tensor, ...]
    projected: Projected | None = None

    def select(self, rows: Tensor) -> "Stream":
        """Copies of `rows`, (n,) int64."""
        terms = tuple(term.index_select(0, rows) for term in self.terms)
        return Stream(terms, None if self.projected is None else self.projected.select(rows))

    def sum(self, rows: Tensor | None = None) -> Tensor:
        """The residual stream, (n, hidden): of all rows, or of `rows`, (n,) int64."""
        terms = self.terms
        if rows is not None:
            terms = tuple(term.index_select(0, rows) for term in terms)
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def release(self) -> None:
        """Lets go of the tensors, whoever else holds the stream: their memory is free for more."""
        self.terms, self.projected = (), None


# What a pass ends with: rows below its last layer's successor, or the model's final states.
Out = Tensor | Stream


def rows_of(part: Tensor, rows: Tensor) -> Tensor:
    """`rows`, (n,) int64, of `part`, of any dtype."""
    if part.dtype.itemsize > 1:
        return part.index_select(0, rows)
    # Not every device gathers 8-bit floats.
    return part.view(torch.uint8).index_select(0, rows).view(part.dtype)
