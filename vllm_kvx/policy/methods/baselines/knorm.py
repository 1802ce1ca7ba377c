"""Knorm: keys of small norm stay."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import DECODE_READS, KV_MEMORY, Retain, ScoreSpec
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_RATE, cap_of, set_share
from vllm_kvx.policy.parameters import integer, optional, rate


@dataclass(frozen=True)
class Knorm(Retain):
    """Knorm (Devoto et al., arXiv 2406.11430): attention falls mostly on keys of small L2 norm.

    Each layer and KV head keeps the `max(int(N * kv_rate), kv_floor, 1)` prompt entries of N whose
    keys are shortest. No query is asked, so what stays does not depend on the question, and the
    prompt's end has no privilege.

    kv_rate: share of the prompt's entries that stay, in (0, 1] (default 0.1; 1 keeps all).
    kv_budget: the same in tokens, instead of a rate (default: not given).
    kv_floor: the least number of entries that a rate keeps of a prompt (default 512; 0, the paper's
        form, has no floor).
    """

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "keys of small norm stay"
    paper: ClassVar[str] = "arXiv 2406.11430"
    served_as: ClassVar[str] = "knorm:kv_rate=0.5"
    saves: ClassVar[tuple[str, ...]] = (KV_MEMORY, DECODE_READS)

    kv_rate: float | None = optional(rate(DEFAULT_KV_RATE))
    kv_budget: int | None = optional(integer())
    kv_floor: int | None = optional(integer(at_least=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        set_share(self, self.kv_rate, self.kv_budget, self.kv_floor)

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.kv_rate == 1 else super().axes

    @property
    def keeps_by(self) -> ScoreSpec:
        return ScoreSpec("key_norm")

    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        cap = cap_of(prompt_len, self.kv_rate, self.kv_budget, self.kv_floor, at_least=1)
        return min(cap, rows)
