"""SwiftKV: the upper layers' keys and values of a prompt, made of one layer's output."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import NO_GAP, PREFILL, Gap, Propagate, Retain
from vllm_kvx.policy.parameters import PolicyError, check_cutoff, integer


@dataclass(frozen=True)
class SwiftKV(Propagate):
    """SwiftKV's SingleInputKV (Qiao et al., arXiv 2410.03960), with the model's own projections.

    Layers 0..K-1 process the whole prompt. Layers K..L-1 store keys and values of every prompt
    token: each layer's own input norm and projections, applied to the states that leave layer
    K - 1. The last prompt token, whose logits give the first output token, and generated tokens run
    these layers and attend to all that they store. So prefill computes less, and stores as much.

    The paper distills the projections of the upper layers to this input; here they are what the
    checkpoint has. Generated tokens store what they compute, where the paper projects theirs too.

    cutoff: K, the first layer that prompt tokens do not run; 0 < K < number of layers. Required.
    """

    name: ClassVar[str] = "swiftkv"
    summary: ClassVar[str] = "upper layers' entries are projected from one layer's output"
    paper: ClassVar[str] = "arXiv 2410.03960"
    saves: ClassVar[tuple[str, ...]] = (PREFILL,)
    needs: ClassVar[str] = "weights distilled for it"
    number: ClassVar[str] = "cutoff"
    letter: ClassVar[str] = "K"
    example: ClassVar[str] = "swiftkv-16"

    cutoff: int = integer()

    def check_model(self, num_layers: int) -> None:
        check_cutoff(self.name, self, self.cutoff, num_layers)

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.cutoff,)

    def skipped(self, prompt_len: int, layer: int) -> Gap:
        return Gap(0, prompt_len - 1) if layer >= self.cutoff and prompt_len > 1 else NO_GAP

    @property
    def projects_from(self) -> int:
        return self.cutoff

    def check_retain(self, retain: Retain) -> None:
        raise PolicyError(
            f"{self} keeps every entry of a prompt, and runs the upper layers for its last token "
            f"alone, which leaves {retain} no window to score by there: give either by itself, or "
            f"{retain} after speed-{self.cutoff}"
        )

    def notice(self, num_layers: int) -> str:
        return (
            f"prompt tokens have keys and values in layers {self.cutoff} to {num_layers - 1} that "
            f"are projected from the output of layer {self.cutoff - 1}. Answers keep their quality "
            "with weights distilled for that; other weights lose it."
        )
