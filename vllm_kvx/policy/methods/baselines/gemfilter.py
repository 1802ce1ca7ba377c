"""GemFilter: an early layer chooses the tokens that the whole model then runs."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    PREFILL,
    Propagate,
    ScoreSpec,
    Selection,
)
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR, MAX_KERNEL, MAX_WINDOW
from vllm_kvx.policy.parameters import PolicyError, integer, rate, share_of


@dataclass(frozen=True)
class GemFilter(Propagate):
    """GemFilter (Shi et al., arXiv 2409.17422): an early layer filters the prompt for all.

    Layers 0..layer process all N prompt tokens. The `max(int(N * rate), kv_floor, window)` tokens
    with the highest saliency to the window in that layer then run again, from layer 0 to the last,
    and they alone are stored. Unlike in the paper they keep their positions, and scores are
    attention weights, where its code takes inner products.

    layer: the layer that chooses, counted from 0; not the last one. Required.
    rate: share of the prompt's tokens that run again, in (0, 1] (default 0.1).
    kv_floor: the least number of tokens that run again (default 512; 0, the paper's form, has no
        floor).
    window: last prompt tokens, whose queries score the keys and which always run again (default
        1, at most 64).
    kernel: width in tokens of the max-pooling over scores, odd (default 5, at most 127).
    """

    name: ClassVar[str] = "gemfilter"
    summary: ClassVar[str] = "an early layer chooses the tokens that the whole model then runs"
    paper: ClassVar[str] = "arXiv 2409.17422"
    saves: ClassVar[tuple[str, ...]] = (PREFILL, KV_MEMORY, DECODE_READS)
    example: ClassVar[str] = "gemfilter:layer=13"
    served_as: ClassVar[str] = "gemfilter:layer=13,rate=0.4"
    restarts: ClassVar[bool] = True
    slides: ClassVar[bool] = True
    selects_at: ClassVar[str] = "layer"

    layer: int = integer(at_least=0)
    rate: float = rate(0.1)
    kv_floor: int = integer(DEFAULT_KV_FLOOR, at_least=0)
    window: int = integer(1, at_most=MAX_WINDOW)
    kernel: int = integer(5, odd=True, at_most=MAX_KERNEL)

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.rate == 1 else super().axes

    def check_model(self, num_layers: int) -> None:
        if self.layer >= num_layers - 1:
            raise PolicyError(
                f"{self}: this model has {num_layers} layers, and the last one leaves nothing to "
                f"save; use layer=0 .. layer={num_layers - 2}"
            )

    @property
    def selects_by(self) -> ScoreSpec:
        return ScoreSpec("window_attention", self.window, self.kernel, over_heads=True)

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.layer + 1,)

    def selection(self, prompt_len: int, num_layers: int) -> Selection | None:
        count = share_of(prompt_len, self.rate, max(self.window, self.kv_floor))
        if count == prompt_len:
            return None
        return Selection(self.selects_by, count, self.layer, resumes_at=0)
