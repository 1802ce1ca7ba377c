"""SPEED: shallow prefill, deep decode."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.parameters import PolicyError, Propagate, integer


@dataclass(frozen=True)
class Speed(Propagate):
    """SPEED-K: above the cutoff only anchors, tail and decode tokens exist (arXiv 2605.06105).

    Layers 0..K-1 process the whole prompt; layers K..L-1 process and store the first `anchors` and
    the last `tail` prompt tokens, and every decode token (Table 1, Eq. 3). Quality is the paper's
    only for weights tuned under this visibility.

    cutoff: K, the first layer that sees the reduced prompt; 0 < K < number of layers. Required.
    anchors: first prompt tokens that go on to every layer (default 1; 0 is the diagnostic).
    tail: last prompt tokens that go on to every layer (default 1: the one whose logits give the
        first output token).
    """

    name: ClassVar[str] = "speed"
    number: ClassVar[str] = "cutoff"
    letter: ClassVar[str] = "K"
    example: ClassVar[str] = "speed-24"

    cutoff: int = integer()
    anchors: int = integer(1, at_least=0)
    tail: int = integer(1)

    def check_model(self, num_layers: int) -> None:
        if self.cutoff >= num_layers:
            layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
            last = num_layers - 1
            use = f"use speed-1 .. speed-{last}" if last > 1 else "use speed-1"
            hint = use if last else "speed needs at least 2; use full"
            raise PolicyError(f"{self}: this model has {layers}; {hint}")

    def splits(self) -> tuple[int, ...]:
        return (self.cutoff,)
