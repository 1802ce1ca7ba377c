"""StreamingLLM: the static answer to what stays."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    Positions,
    Retain,
)
from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR
from vllm_kvx.policy.parameters import PolicyError, integer, optional, rate, share_of

DEFAULT_RECENT = 1020


@dataclass(frozen=True)
class StreamingLLM(Retain):
    """StreamingLLM: keep the prompt's first and last entries (Xiao et al., arXiv 2309.17453).

    sinks: first prompt tokens whose entries stay in every layer (default 4).
    recent: last prompt tokens whose entries stay in every layer (default 1020).
    kv_rate: share of the prompt's entries that stay, sinks included, in (0, 1], instead of `recent`
        (default: not given); the last one stays in any case.
    kv_floor: the least number of entries that a rate keeps of a prompt (default 512; 0 has no
        floor).
    """

    name: ClassVar[str] = "streamingllm"
    summary: ClassVar[str] = "the prompt's first and last entries stay"
    paper: ClassVar[str] = "arXiv 2309.17453"
    served_as: ClassVar[str] = "streamingllm:kv_rate=0.5"
    saves: ClassVar[tuple[str, ...]] = (KV_MEMORY, DECODE_READS)

    sinks: int = integer(4)
    recent: int | None = optional(integer())
    kv_rate: float | None = optional(rate(1.0))
    kv_floor: int | None = optional(integer(at_least=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_rate is None:
            if self.kv_floor is not None:
                raise PolicyError(
                    "streamingllm: kv_floor is the least that a rate keeps: give kv_rate too"
                )
            object.__setattr__(self, "recent", self.recent or DEFAULT_RECENT)
        elif self.recent is not None:
            raise PolicyError(
                "streamingllm: recent and kv_rate both say how many entries stay; keep one"
            )
        elif self.kv_floor == DEFAULT_KV_FLOOR:
            # Without a rate there is no floor, so that the default has to go without saying.
            object.__setattr__(self, "kv_floor", None)

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.kv_rate == 1 else super().axes

    @property
    def keeps_by(self) -> Positions:
        return Positions(self.sinks)

    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        if self.recent is not None:
            return min(self.sinks + self.recent, rows)
        assert self.kv_rate is not None
        floor = DEFAULT_KV_FLOOR if self.kv_floor is None else self.kv_floor
        return min(share_of(prompt_len, self.kv_rate, max(self.sinks + 1, floor)), rows)
