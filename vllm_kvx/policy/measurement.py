"""What of a method has to be measured for a model."""

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A layer that has to be measured for a model before a method can run.

    parameter, word: the method's parameter, and its value that stands for the measured layer.
    reduction: the parameter that says how heads and window rows become one score. Where the layer
        is left to the word and this to its default, the measured reduction takes its place. Empty
        if there is no choice.
    rate: the parameter that says which share of the tokens goes on. Where the layer is left to the
        word and this is not given, the measured rate takes its place. Empty if none is measured.
    """

    parameter: str
    word: str
    reduction: str = ""
    rate: str = ""

    def chooses_reduction(self, method: Any) -> bool:
        """Whether `method`, with its parameters, leaves its reduction to the measurement."""
        defaults = {field.name: field.default for field in fields(method)}
        return bool(self.reduction) and getattr(method, self.reduction) == defaults[self.reduction]

    def leaves_rate(self, method: Any) -> bool:
        """Whether `method` leaves its rate to the measurement."""
        return bool(self.rate) and getattr(method, self.rate) is None

    def usual_rate(self, method: Any) -> float:
        """The rate that `method` has where a layer is given and no rate is."""
        changed: dict[str, Any] = {self.parameter: 0, self.rate: None}
        rate: float = getattr(replace(method, **changed), self.rate)
        return rate
