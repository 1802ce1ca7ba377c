"""SnapKV: retain what the last prompt queries attend to."""

from abc import ABC
from dataclasses import dataclass, replace
from typing import ClassVar

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    Retain,
    ScoreSpec,
)
from vllm_kvx.policy.parameters import PolicyError, integer, optional, rate, share_of
from vllm_kvx.policy.window_scores import retained_by, window_score

DEFAULT_KV_RATE = 0.1
# The least number of tokens that a rate leaves of a prompt, unless a floor is given. A share of a
# chat's few tokens is no answer: by a tenth, a question of 41 tokens would keep eight.
DEFAULT_KV_FLOOR = 512
# Query rows that the saliency kernel takes in one pass over the keys.
MAX_WINDOW = 64
MAX_KERNEL = 127


@dataclass(frozen=True)
class RetainByWindow(Retain, ABC):
    """What the prompt's last queries attend to stays, by a rate or a budget.

    kv_rate: share of the prompt's entries that stay, in (0, 1] (default 0.1; 1 keeps all).
    kv_budget: the same in tokens, at least `window`, instead of a rate (default: not given).
    kv_floor: the least number of entries that a rate keeps of a prompt (default 512; 0, the paper's
        form, has no floor).
    window: last prompt tokens, whose queries score the keys and which always stay (default 8, at
        most 64).
    kernel: width in tokens of the max-pooling over scores, odd (default 7, at most 127).
    score: what entries stay by: `attention` (default, the paper's), or `critical`, CriticalKV's,
        which asks how much a value moves the layer's output, too.
    """

    saves: ClassVar[tuple[str, ...]] = (KV_MEMORY, DECODE_READS)

    kv_rate: float | None = optional(rate(DEFAULT_KV_RATE))
    kv_budget: int | None = optional(integer())
    kv_floor: int | None = optional(integer(at_least=0))
    window: int = integer(8, at_most=MAX_WINDOW)
    kernel: int = integer(7, odd=True, at_most=MAX_KERNEL)
    score: str = window_score()

    def __post_init__(self) -> None:
        super().__post_init__()
        set_share(self, self.kv_rate, self.kv_budget, self.kv_floor)
        check_budget(self, self.kv_budget, self.window)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in super().axes if a != "retain" or self.kv_rate != 1)

    @property
    def keeps_by(self) -> ScoreSpec:
        return retained_by(self.score, self.window, self.kernel)

    def cap(self, prompt_len: int) -> int:
        """Entries of a prompt that a layer keeps at most, the window included."""
        return cap_of(prompt_len, self.kv_rate, self.kv_budget, self.kv_floor, self.window)

    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        return min(self.cap(prompt_len), rows)


@dataclass(frozen=True)
class SnapKV(RetainByWindow):
    """SnapKV (arXiv 2404.14469) with FastKV's estimator: FastKV without propagation.

    Each layer and KV head keeps the window and the prompt entries with the highest saliency to it:
    `cap = max(int(N * kv_rate), kv_floor, window)` entries of N in all, or kv_budget. Scores are
    pooled over `kernel` neighbours; `score` says what they are.

    after: generated tokens whose queries score the keys too. Until they are in, every entry of the
        prompt stays; they themselves always stay (default 0; at most 64 with the window).
    lookahead: tokens that are drafted over all entries once the prompt is in, greedily. Their
        queries score the keys too; then they are thrown away, and the answer begins behind the
        prompt (default 0; at most 64 with the window, and not beside after).
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "what the prompt's last queries attend to stays"
    paper: ClassVar[str] = "arXiv 2404.14469"
    served_as: ClassVar[str] = "snapkv:kv_rate=0.2,after=32"

    after: int = integer(0, at_least=0, at_most=MAX_WINDOW - 1)
    lookahead: int = integer(0, at_least=0, at_most=MAX_WINDOW - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after and self.lookahead:
            raise PolicyError(
                f"{self.name}: after and lookahead both say which tokens behind the prompt score "
                "its keys; keep one"
            )
        check_window(self, "after", self.window, self.after)
        check_window(self, "lookahead", self.window, self.lookahead)

    @property
    def keeps_by(self) -> ScoreSpec:
        by = waiting_for(super().keeps_by, self.after)
        return replace(by, window=by.window + self.lookahead, drafted=self.lookahead)

    def num_drafted(self, prompt_len: int) -> int:
        return self.lookahead if self.cap(prompt_len) < prompt_len else 0


def set_share(
    method: Retain, kv_rate: float | None, kv_budget: int | None, kv_floor: int | None
) -> None:
    """Gives a `method` with neither rate nor budget the default rate, and a rate a floor.

    Raises PolicyError if it has both a budget and one of the others.
    """
    if kv_budget is None:
        object.__setattr__(method, "kv_rate", DEFAULT_KV_RATE if kv_rate is None else kv_rate)
        object.__setattr__(method, "kv_floor", DEFAULT_KV_FLOOR if kv_floor is None else kv_floor)
    elif kv_rate is not None:
        raise PolicyError(
            f"{method.name}: kv_rate and kv_budget both say how many entries stay; keep one"
        )
    elif kv_floor is not None:
        raise PolicyError(
            f"{method.name}: kv_floor is the least that a rate keeps, and kv_budget is no rate; "
            "keep one"
        )


def floor_of(own: int | None, kv_floor: int | None) -> int:
    """The least number of tokens that a rate propagates: its own floor, or else retention's."""
    given = kv_floor if own is None else own
    return DEFAULT_KV_FLOOR if given is None else given


def set_own_floor(method: Retain, key: str, kv_floor: int | None) -> None:
    """Leaves a `method`'s floor of propagation out where it is retention's: one name a policy."""
    if getattr(method, key) == floor_of(None, kv_floor):
        object.__setattr__(method, key, None)


def check_budget(method: Retain, kv_budget: int | None, window: int) -> None:
    """Raises PolicyError if a budget has no room for the window."""
    if kv_budget is not None and kv_budget < window:
        raise PolicyError(
            f"{method.name}: kv_budget must be at least the window of {window} tokens, "
            f"got {kv_budget}"
        )


def check_window(method: Retain, key: str, window: int, more: int) -> None:
    """Raises PolicyError if the window is too long with `more` tokens behind the prompt.

    key: the parameter that asks for these.
    """
    if window + more > MAX_WINDOW:
        raise PolicyError(
            f"{method.name}: window and {key} are at most {MAX_WINDOW} tokens together, got "
            f"{window} and {more}"
        )


def waiting_for(by: ScoreSpec, generated: int) -> ScoreSpec:
    """`by` with so many generated tokens behind the prompt's window."""
    return replace(by, window=by.window + generated, generated=generated)


def cap_of(
    prompt_len: int,
    kv_rate: float | None,
    kv_budget: int | None,
    kv_floor: int | None,
    at_least: int,
) -> int:
    """Entries that a rate with its floor or a budget keeps of a prompt, never more than it has."""
    if kv_budget is not None:
        return min(kv_budget, prompt_len)
    assert kv_rate is not None
    return share_of(prompt_len, kv_rate, max(at_least, kv_floor or 0))
