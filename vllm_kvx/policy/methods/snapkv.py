"""SnapKV: retain what the last prompt queries attend to."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.parameters import PolicyError, Retain, integer, optional, rate, share_of

DEFAULT_KV_RATE = 0.1
# Query rows that the saliency kernel takes in one pass over the keys.
MAX_WINDOW = 64
MAX_KERNEL = 127


@dataclass(frozen=True)
class SnapKV(Retain):
    """SnapKV (arXiv 2404.14469) with FastKV's estimator: FastKV without propagation.

    Each layer and KV head keeps the window and the prompt entries with the highest saliency to it:
    `cap = max(int(N * kv_rate), window)` entries of N in all.

    kv_rate: share of the prompt's entries that stay, in (0, 1] (default 0.1; 1 keeps all).
    kv_budget: the same in tokens, at least `window`, instead of a rate (default: not given).
    window: last prompt tokens, whose queries score the keys and which always stay (default 8, at
        most 64).
    kernel: width in tokens of the max-pooling over scores, odd (default 7, at most 127).
    """

    name: ClassVar[str] = "snapkv"

    kv_rate: float | None = optional(rate(DEFAULT_KV_RATE))
    kv_budget: int | None = optional(integer())
    window: int = integer(8, at_most=MAX_WINDOW)
    kernel: int = integer(7, odd=True, at_most=MAX_KERNEL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_budget is None:
            if self.kv_rate is None:
                object.__setattr__(self, "kv_rate", DEFAULT_KV_RATE)
        elif self.kv_rate is not None:
            raise PolicyError(
                f"{self.name}: kv_rate and kv_budget both say how many entries stay; keep one"
            )
        elif self.kv_budget < self.window:
            raise PolicyError(
                f"{self.name}: kv_budget must be at least the window of {self.window} tokens, "
                f"got {self.kv_budget}"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in super().axes if a != "retain" or self.kv_rate != 1)

    def cap(self, prompt_len: int) -> int:
        if self.kv_budget is not None:
            return min(self.kv_budget, prompt_len)
        assert self.kv_rate is not None
        return share_of(prompt_len, self.kv_rate, self.window)
