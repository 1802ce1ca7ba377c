"""SPEED: shallow prefill, deep decode."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    NO_GAP,
    PREFILL,
    Gap,
    Method,
    Propagate,
    Retain,
    SharedPrefix,
)
from vllm_kvx.policy.parameters import PolicyError, check_cutoff, integer


@dataclass(frozen=True)
class Speed(Propagate):
    """SPEED-K: above the cutoff only anchors, tail and decode tokens exist (arXiv 2605.06105).

    Layers 0..K-1 process the whole prompt; layers K..L-1 process and store the first `anchors` and
    the last `tail` prompt tokens, and every decode token (Table 1, Eq. 3). Layers among
    them that slide over a window show anchors to one another alone. Quality is the paper's only for
    weights tuned under this visibility.

    cutoff: K, the first layer that sees the reduced prompt; 0 < K < number of layers. Required.
    anchors: first prompt tokens that go on to every layer (default 1; 0 is the diagnostic).
    tail: last prompt tokens that go on to every layer (default 1: the one whose logits give the
        first output token).
    """

    slides: ClassVar[bool] = True
    name: ClassVar[str] = "speed"
    summary: ClassVar[str] = "prompt tokens run the lower K layers alone, but for anchors and tail"
    paper: ClassVar[str] = "arXiv 2605.06105"
    saves: ClassVar[tuple[str, ...]] = (PREFILL, KV_MEMORY, DECODE_READS)
    needs: ClassVar[str] = "weights tuned for this cutoff: vllm-kvx tune-speed"
    number: ClassVar[str] = "cutoff"
    letter: ClassVar[str] = "K"
    example: ClassVar[str] = "speed-24"

    cutoff: int = integer()
    anchors: int = integer(1, at_least=0)
    tail: int = integer(1)

    def check_model(self, num_layers: int) -> None:
        check_cutoff(self.name, self, self.cutoff, num_layers)

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.cutoff,)

    def gap(self, prompt_len: int, layer: int) -> Gap:
        size = prompt_len - self.anchors - self.tail
        return Gap(self.anchors, size) if layer >= self.cutoff and size > 0 else NO_GAP

    def window_gap(self, prompt_len: int, layer: int) -> Gap:
        if layer < self.cutoff:
            return NO_GAP
        end = max(prompt_len - self.tail, 0)
        anchors = min(self.anchors, end)
        return Gap(anchors, end - anchors)

    @property
    def shared_prefix(self) -> SharedPrefix:
        return SharedPrefix(self.anchors, self.tail, self.cutoff)

    def check_retain(self, retain: Retain) -> None:
        layer = retain.ranked_after()
        if layer is not None and layer >= self.cutoff:
            raise PolicyError(
                f"{retain}: blocks are ranked at layer {layer}, which {self} does not run for "
                f"every token: use a pivot below {self.cutoff} or granularity=token"
            )

    def untuned(self, num_layers: int, tuned: Method | None = None) -> str | None:
        if tuned == self:
            return None
        if not isinstance(tuned, Speed):
            return (
                f"{_layers(self.cutoff, num_layers)} only anchors, tail and generated tokens, and "
                "weights that were not tuned for that lose answers"
            )
        reasons = []
        if self.cutoff < tuned.cutoff:
            reasons.append(
                f"{_layers(self.cutoff, tuned.cutoff)} only anchors, tail and generated tokens "
                "here, and every prompt token in tuning"
            )
        if self.cutoff > tuned.cutoff:
            reasons.append(
                f"{_layers(tuned.cutoff, self.cutoff)} every prompt token here, and only anchors, "
                "tail and generated tokens in tuning"
            )
        for name in ("anchors", "tail"):
            here, then = getattr(self, name), getattr(tuned, name)
            if here != then:
                reasons.append(f"{name}={here} here, and {name}={then} in tuning")
        return "; ".join(reasons)


def _layers(first: int, end: int) -> str:
    """Layers [first, end) as the subject of a sentence, and its verb."""
    return f"layer {first} sees" if end - first == 1 else f"layers {first} to {end - 1} see"
