"""StructKV: centrality over the lower layers chooses the tokens that go on."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    PREFILL,
    WINDOW_FAMILIES,
    OnlineRule,
    Propagate,
    Retain,
    ScoreSpec,
    Selection,
    Weights,
)
from vllm_kvx.policy.measurement import Measurement
from vllm_kvx.policy.methods.snapkv import (
    DEFAULT_KV_RATE,
    MAX_KERNEL,
    MAX_WINDOW,
    cap_of,
    check_budget,
    check_window,
    floor_of,
    set_own_floor,
    set_share,
    waiting_for,
)
from vllm_kvx.policy.parameters import (
    PolicyError,
    check_layer,
    choice,
    integer,
    optional,
    rate,
    share_of,
    weight,
)
from vllm_kvx.policy.window_scores import DEFAULT_SCORE, retained_by, window_score

# How single entries are retained, unless `heads` and `kernel` say otherwise.
DEFAULT_HEADS = "shared"
DEFAULT_KERNEL = 7


@dataclass(frozen=True)
class StructKV(Propagate, Retain):
    """StructKV: structural propagation at a detected pivot, retention by local saliency.

    Layers 0..pivot process all N prompt tokens and add up centrality, `C = decay * C + S` (Eq. 3);
    later layers process the `max(int(N * struct_rate), struct_floor, window)` most central tokens.
    Each layer retains `max(int(N * kv_rate), kv_floor, window)` entries by its own saliency S (Eq.
    2), max-pooled over neighbours: all heads the same ones (Eq. 13, which does not pool), or each
    KV head its own. The rates are independent: struct_rate = 1 only retains, kv_rate = 1 only
    propagates.

    pivot: the last layer that processes every token: `calibrated` (default; measured before
        serving, by answers), `online` (found within the pass) or a layer counted from 0.
    struct_rate: share of the prompt's tokens that go on, in (0, 1] (default 0.2).
    kv_rate: share of the prompt's entries that stay, in (0, 1] (default 0.1).
    kv_budget: the same in tokens, at least `window`, instead of a rate (default: not given).
    kv_floor: the least number of entries that a rate keeps of a prompt (default 512; 0, the paper's
        form, has no floor). With pivot=online neither floor nor budget keeps more tokens than go
        on.
    struct_floor: the least number of tokens that the rate propagates of a prompt (default:
        kv_floor's value, and 512 with a budget).
    min_layer, max_layer: with pivot=online, where the rule first looks and where it ends (default
        auto: two thirds and five sixths of the depth).
    granularity: `token` (default), or `block` to keep whole blocks without copying.
    heads: `shared` (default): all heads of a layer keep the same entries, as in the paper (Eq.
        13); `own`: each KV head keeps those that its own query heads attend to. Whole blocks are
        shared by nature.
    kernel: width in tokens of the max-pooling over the scores that single entries are retained
        by, odd (default 7, at most 127); 1 does not pool and is the paper's form. Centrality and
        whole blocks are not pooled.
    score: what single entries are retained by: `attention` (default, Eq. 2), or `critical`,
        CriticalKV's, which asks how much a value moves the layer's output, too; where all heads
        keep the same entries, added up over them. Centrality and whole blocks go by attention.
    window: last prompt tokens, whose queries score the keys and which always stay (default
        8, at most 64).
    after: generated tokens whose queries score the keys for retention, too. Until they are in,
        every entry stays that a layer has computed; they themselves always stay (default 0; at most
        64 with the window; with a fixed pivot and granularity=token). Tokens that go on are chosen
        when the prompt is in, by the window.
    decay: weight of the layers below in the centrality, in (0, 1] (default 0.9).
    struct_reduction: how the weights of heads and window queries become the saliency that
        centrality adds up: `sum` (default, Eq. 2), or `max`, the largest of them. Retention of
        entries sums. With pivot=calibrated the default makes way for what was measured to keep
        answers at an earlier layer.
    entropy_weight, sparsity_weight, variance_weight: w1, w2, w3 of the transition score, Eq. 8
        (defaults 0.2, 0.3, 0.5).
    """

    name: ClassVar[str] = "structkv"
    summary: ClassVar[str] = (
        "tokens that are central over the lower layers go on; salient entries stay"
    )
    paper: ClassVar[str] = "arXiv 2604.06746"
    served_as: ClassVar[str] = "structkv:kv_rate=0.4"
    saves: ClassVar[tuple[str, ...]] = (PREFILL, KV_MEMORY, DECODE_READS)
    needs: ClassVar[str] = "the model's pivot, which `vllm-kvx calibrate` or a first start measures"
    slides: ClassVar[bool] = True
    selects_at: ClassVar[str] = "pivot"
    selects_early: ClassVar[bool] = True
    to_measure: ClassVar[Measurement] = Measurement("pivot", "calibrated", "struct_reduction")

    pivot: int | str = integer("calibrated", at_least=0, words=("calibrated", "online"))
    struct_rate: float = rate(0.2)
    kv_rate: float | None = optional(rate(DEFAULT_KV_RATE))
    kv_budget: int | None = optional(integer())
    kv_floor: int | None = optional(integer(at_least=0))
    struct_floor: int | None = optional(integer(at_least=0))
    granularity: str = choice("token", ("token", "block"))
    heads: str | None = optional(choice(DEFAULT_HEADS, ("own", "shared")))
    kernel: int | None = optional(integer(odd=True, at_most=MAX_KERNEL))
    score: str | None = optional(window_score())
    window: int = integer(8, at_most=MAX_WINDOW)
    after: int = integer(0, at_least=0, at_most=MAX_WINDOW - 1)
    decay: float = rate(0.9)
    struct_reduction: str = choice("sum", tuple(WINDOW_FAMILIES))
    entropy_weight: float = weight(0.2)
    sparsity_weight: float = weight(0.3)
    variance_weight: float = weight(0.5)
    min_layer: int | str = integer("auto", at_least=0, words=("auto",))
    max_layer: int | str = integer("auto", at_least=0, words=("auto",))

    def __post_init__(self) -> None:
        super().__post_init__()
        set_share(self, self.kv_rate, self.kv_budget, self.kv_floor)
        check_budget(self, self.kv_budget, self.window)
        set_own_floor(self, "struct_floor", self.kv_floor)
        if self.unit == "block" and self.heads == "own":
            raise PolicyError(
                "structkv: granularity=block keeps whole blocks, which hold the entries of all "
                "heads; leave out heads=own or use granularity=token"
            )
        if self.unit == "block" and self.kernel is not None:
            raise PolicyError(
                "structkv: kernel pools the scores of single entries, and granularity=block keeps "
                "whole blocks; leave out kernel or use granularity=token"
            )
        if self.unit == "block" and self.score is not None:
            raise PolicyError(
                "structkv: score says what single entries are retained by, and granularity=block "
                "ranks whole blocks by centrality; leave out score or use granularity=token"
            )
        check_window(self, "after", self.window, self.after)
        if self.after and (self.unit == "block" or self.pivot == "online"):
            raise PolicyError(
                "structkv: after waits for generated tokens with granularity=token and a fixed "
                "pivot alone; leave it out, or use pivot=calibrated or pivot=<int> with "
                "granularity=token"
            )
        # Blocks leave no choice, so that there is one name for them.
        entries = self.unit == "entry"
        object.__setattr__(self, "heads", (self.heads or DEFAULT_HEADS) if entries else None)
        object.__setattr__(self, "kernel", (self.kernel or DEFAULT_KERNEL) if entries else None)
        object.__setattr__(self, "score", (self.score or DEFAULT_SCORE) if entries else None)
        if self.pivot == "online" and self.granularity == "block":
            raise PolicyError(
                "structkv: pivot=online cannot be had with granularity=block, whose KV groups are "
                "fixed at start; use pivot=calibrated, pivot=<int> or granularity=token"
            )
        if self.pivot == "online" and (self.kv_rate or 0) > self.struct_rate:
            raise PolicyError(
                "structkv: pivot=online needs kv_rate <= struct_rate, so that every layer keeps "
                "equally much whatever its pivot; lower kv_rate to struct_rate or less, or use "
                "pivot=calibrated"
            )
        if not self.is_online and (self.min_layer, self.max_layer) != ("auto", "auto"):
            raise PolicyError(
                "structkv: min_layer and max_layer have effect with pivot=online and struct_rate "
                "below 1 only; leave them out"
            )
        if not (self.entropy_weight or self.sparsity_weight or self.variance_weight):
            raise PolicyError(
                "structkv: one of entropy_weight, sparsity_weight and variance_weight must be "
                "above 0"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        gates = {"propagate": self.struct_rate, "retain": self.kv_rate}
        return tuple(a for a in super().axes if gates[a] != 1)

    def check_model(self, num_layers: int) -> None:
        check_layer(self, "pivot", self.pivot, num_layers)
        if self.is_online:
            low, high = self.limits(num_layers)
            if not low <= high < num_layers - 1:
                raise PolicyError(
                    f"{self}: min_layer={low} and max_layer={high} do not fit this model of "
                    f"{num_layers} layers: they must be in this order and below its last layer"
                )

    @property
    def is_online(self) -> bool:
        """Whether the pivot is found within the pass; all layers are then in one KV group."""
        return self.pivot == "online" and self.struct_rate < 1

    @property
    def unmeasured(self) -> Measurement | None:
        # It propagates everything and needs no pivot.
        return None if self.struct_rate == 1 and self.unit == "entry" else super().unmeasured

    def limits(self, num_layers: int) -> tuple[int, int]:
        """The first and the last layer that pivot=online may choose.

        One that is not given makes way for the one that is.
        """
        low, high = online_limits(num_layers)
        given_low = None if isinstance(self.min_layer, str) else self.min_layer
        given_high = None if isinstance(self.max_layer, str) else self.max_layer
        if given_low is not None:
            low, high = given_low, max(high, given_low)
        if given_high is not None:
            low, high = min(low, given_high) if given_low is None else low, given_high
        return low, high

    @property
    def weights(self) -> Weights:
        """The weights w1, w2, w3 of Eq. 8: of entropy, sparsity and variance."""
        return self.entropy_weight, self.sparsity_weight, self.variance_weight

    @property
    def last_full_layer(self) -> int:
        """The last layer that processes every token; PolicyError if it is not known yet."""
        if isinstance(self.pivot, str):
            raise PolicyError(f"{self}: the pivot of this model is not known: write pivot=<int>")
        return self.pivot

    # Propagation.

    def num_by_rate(self, prompt_len: int) -> int:
        """Tokens of a prompt that the rate propagates by itself, the window included."""
        return share_of(prompt_len, self.struct_rate, self.window)

    def num_propagated(self, prompt_len: int) -> int:
        """Tokens of a prompt that go on, the window included."""
        floor = floor_of(self.struct_floor, self.kv_floor)
        return share_of(prompt_len, self.struct_rate, max(self.window, floor))

    @property
    def selects_by(self) -> ScoreSpec:
        family = WINDOW_FAMILIES[self.struct_reduction]
        return ScoreSpec(family, self.window, over_heads=True, decay=self.decay)

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        return () if self.is_online or self.struct_rate == 1 else (self.last_full_layer + 1,)

    def online_rule(self, num_layers: int) -> OnlineRule | None:
        return OnlineRule(*self.limits(num_layers), self.weights) if self.is_online else None

    def selection(self, prompt_len: int, num_layers: int) -> Selection | None:
        count = self.num_propagated(prompt_len)
        if count == prompt_len:
            return None
        online = self.online_rule(num_layers)
        after = self.last_full_layer if online is None else online.highest
        if after == num_layers - 1:
            return None
        return Selection(self.selects_by, count, after, after + 1, online)

    # Retention.

    @property
    def keeps_by(self) -> ScoreSpec:
        if self.unit == "block":
            return self.selects_by
        assert self.kernel is not None and self.score is not None
        shared = self.heads == "shared"
        by = retained_by(self.score, self.window, self.kernel, over_heads=shared)
        return waiting_for(by, self.after)

    @property
    def unit(self) -> Literal["entry", "block"]:
        return "block" if self.granularity == "block" else "entry"

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return (self.last_full_layer + 1,) if self.unit == "block" else ()

    def ranked_after(self) -> int | None:
        return self.last_full_layer if self.unit == "block" else None

    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        if self.unit == "entry":
            cap = cap_of(prompt_len, self.kv_rate, self.kv_budget, self.kv_floor, self.window)
            if self.is_online:
                # Every layer keeps equally much, whatever its pivot: what goes on is a limit.
                cap = min(cap, self.num_propagated(prompt_len))
            return min(cap, rows)
        share = self.kv_budget or max(prompt_len * (self.kv_rate or 0), self.kv_floor or 0)
        blocks = -(-rows // block_size)
        touched = blocks - (rows - min(self.window, rows)) // block_size
        wanted = max(math.ceil(share / block_size), touched)
        # The last block stays, and it alone may be partly filled.
        return rows - max(blocks - wanted, 0) * block_size


def online_limits(num_layers: int) -> tuple[int, int]:
    """Default `min_layer` and `max_layer`: two thirds and five sixths of the depth.

    Below, few of the tokens that hold an answer are central on the checkpoints that were measured,
    and the rule often ends at the first layer that it looks at.
    """
    high = max(min(num_layers * 5 // 6, num_layers - 2), 0)
    return min(num_layers * 2 // 3, high), high


def paper_limits(num_layers: int) -> tuple[int, int]:
    """The pivots among which the paper's criterion looks: a quarter to three quarters of the depth.

    The paper's own pivots lie between, 12 of 28 layers and 28 of 64 (Section 4.3).
    """
    high = max(min(num_layers * 3 // 4, num_layers - 2), 0)
    return min(num_layers // 4, high), high
