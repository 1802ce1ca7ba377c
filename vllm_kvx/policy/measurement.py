"""What of a method has to be measured for a model."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A layer that has to be measured for a model before a method can run.

    parameter, word: the method's parameter, and its value that stands for the measured layer.
    reduction: the parameter that says how heads and window rows become one score. Where the layer
        is left to the word and this to its default, the measured reduction takes its place. Empty
        if there is no choice.
    """

    parameter: str
    word: str
    reduction: str = ""

    def chooses_reduction(self, method: Any) -> bool:
        """Whether `method`, with its parameters, leaves its reduction to the measurement."""
        defaults = {field.name: field.default for field in fields(method)}
        return bool(self.reduction) and getattr(method, self.reduction) == defaults[self.reduction]
