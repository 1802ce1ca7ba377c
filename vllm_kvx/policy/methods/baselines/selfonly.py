"""SelfOnly: SPEED without attention among generated tokens in the upper layers."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    NO_GAP,
    PREFILL,
    Gap,
    Propagate,
    Retain,
    Retrieve,
    SharedPrefix,
)
from vllm_kvx.policy.parameters import PolicyError, check_cutoff, integer


@dataclass(frozen=True)
class SelfOnly(Propagate):
    """SelfOnly-K, the SPEED paper's diagnostic of decode tokens (arXiv 2605.06105, appendix F).

    Layers 0..K-1 process the whole prompt and store every token, as under SPEED-K. In layers
    K..L-1 the last prompt token and each generated token attend to the first `anchors` prompt
    tokens and to themselves, not to each other. So these layers store the anchors and one entry,
    which each token takes over from the one before.

    cutoff: K, the first layer that is so restricted; 0 < K < number of layers. Required.
    anchors: first prompt tokens that every layer processes (default 1; 0 leaves a token itself).
    """

    name: ClassVar[str] = "selfonly"
    summary: ClassVar[str] = "SPEED without attention among generated tokens: a diagnostic"
    paper: ClassVar[str] = "arXiv 2605.06105"
    saves: ClassVar[tuple[str, ...]] = (PREFILL, KV_MEMORY, DECODE_READS)
    needs: ClassVar[str] = "weights tuned for speed-K: vllm-kvx tune-speed"
    number: ClassVar[str] = "cutoff"
    letter: ClassVar[str] = "K"
    example: ClassVar[str] = "selfonly-24"
    overwrites: ClassVar[bool] = True

    cutoff: int = integer()
    anchors: int = integer(1, at_least=0)

    def check_model(self, num_layers: int) -> None:
        check_cutoff(self.name, self, self.cutoff, num_layers)

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.cutoff,)

    def gap(self, prompt_len: int, layer: int) -> Gap:
        if layer < self.cutoff:
            return NO_GAP
        anchors = min(self.anchors, prompt_len)
        return Gap(anchors, max(prompt_len - 1 - anchors, 0), grows=True)

    @property
    def shared_prefix(self) -> SharedPrefix:
        return SharedPrefix(self.anchors, 1, self.cutoff)

    def check_retain(self, retain: Retain) -> None:
        raise PolicyError(self._alone(str(retain)))

    def check_retrieve(self, retrieve: Retrieve) -> None:
        raise PolicyError(self._alone(str(retrieve)))

    def _alone(self, other: str) -> str:
        return (
            f"{self} is a diagnostic that is served by itself: drop {other}, or compose it with "
            f"speed-{self.cutoff}"
        )

    def notice(self, num_layers: int) -> str:
        return (
            f"generated tokens do not see each other in layers {self.cutoff} to {num_layers - 1}: "
            "a diagnostic of speed-K, which loses answers even with weights tuned for it."
        )
