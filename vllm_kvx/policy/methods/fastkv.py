"""FastKV: one layer chooses the tokens that go on; each KV head chooses the entries that stay."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import (
    DECODE_READS,
    KV_MEMORY,
    PREFILL,
    WINDOW_FAMILIES,
    Propagate,
    ScoreSpec,
    Selection,
)
from vllm_kvx.policy.measurement import Measurement
from vllm_kvx.policy.methods.snapkv import (
    MAX_WINDOW,
    RetainByWindow,
    check_window,
    floor_of,
    set_own_floor,
    waiting_for,
)
from vllm_kvx.policy.parameters import (
    PolicyError,
    Value,
    check_layer,
    choice,
    integer,
    optional,
    rate,
    share_of,
)

# The paper's.
DEFAULT_TSP_RATE = 0.2


@dataclass(frozen=True)
class FastKV(Propagate, RetainByWindow):
    """FastKV: token-selective propagation (TSP) and KV retention (Jo et al.).

    Layers 0..tsp_layer process all N prompt tokens, later layers the `max(int(N * tsp_rate),
    tsp_floor, window)` most salient ones. Retention is SnapKV's, with its parameters kv_rate
    (default 0.1) and kv_floor, or kv_budget; window (8), kernel (7) and score. The two rates are
    independent: tsp_rate = 1 only retains, kv_rate = 1 only propagates. The paper has no floors:
    kv_floor=0 is its form. Tokens that go on are chosen by attention, whatever the score: a value's
    norm tells what its own layer would lose, and layers above lose tokens.

    tsp_layer: the last layer that processes every token, counted from 0 (default `auto`: the
        paper's for models that it names, otherwise measured before serving, by answers).
    tsp_rate: share of the prompt's tokens that go on, in (0, 1] (default: 0.2, and with
        tsp_layer=auto what was measured together with the layer).
    tsp_floor: the least number of tokens that the rate propagates of a prompt (default: kv_floor's
        value, and 512 with a budget).
    tsp_reduction: how the weights of heads and window queries become a token's one score: `sum`
        (default, the paper's), or `max`, the largest of them. With tsp_layer=auto the default
        makes way for what was measured to keep answers at an earlier layer.
    after: generated tokens whose queries score the keys for retention, too. Until they are in,
        every entry stays that a layer has computed; they themselves always stay (default 0; at most
        64 with the window). Tokens that go on are chosen when the prompt is in, by the window.
    """

    name: ClassVar[str] = "fastkv"
    summary: ClassVar[str] = (
        "one layer chooses the tokens that go on, and each KV head the entries that stay"
    )
    paper: ClassVar[str] = "arXiv 2502.01068"
    served_as: ClassVar[str] = "fastkv:kv_rate=0.4"
    saves: ClassVar[tuple[str, ...]] = (PREFILL, KV_MEMORY, DECODE_READS)
    needs: ClassVar[str] = (
        "the model's TSP layer, which `vllm-kvx calibrate` or a first start measures"
    )
    slides: ClassVar[bool] = True
    selects_at: ClassVar[str] = "tsp_layer"
    selects_early: ClassVar[bool] = True
    to_measure: ClassVar[Measurement] = Measurement(
        "tsp_layer", "auto", "tsp_reduction", "tsp_rate"
    )

    tsp_layer: int | str = integer("auto", at_least=0, words=("auto",))
    tsp_rate: float | None = optional(rate(DEFAULT_TSP_RATE))
    tsp_reduction: str = choice("sum", tuple(WINDOW_FAMILIES))
    tsp_floor: int | None = optional(integer(at_least=0))
    after: int = integer(0, at_least=0, at_most=MAX_WINDOW - 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self, "after", self.window, self.after)
        set_own_floor(self, "tsp_floor", self.kv_floor)
        # Left open it is the measurement's as the layer is; where a layer is given it is known.
        if self.tsp_rate is None and self.tsp_layer != "auto":
            object.__setattr__(self, "tsp_rate", DEFAULT_TSP_RATE)

    def defaults(self) -> dict[str, Value]:
        known = {} if self.tsp_layer == "auto" else {"tsp_rate": DEFAULT_TSP_RATE}
        return {**super().defaults(), **known}

    @property
    def token_rate(self) -> float:
        """Share of the prompt's tokens that go on; the default where it is yet to be measured."""
        return DEFAULT_TSP_RATE if self.tsp_rate is None else self.tsp_rate

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in super().axes if a != "propagate" or self.tsp_rate != 1)

    def check_model(self, num_layers: int) -> None:
        check_layer(self, "tsp_layer", self.tsp_layer, num_layers)

    @property
    def last_full_layer(self) -> int:
        """The last layer that processes every token; PolicyError if it is not known yet."""
        if isinstance(self.tsp_layer, str):
            raise PolicyError(
                f"{self}: the TSP layer of this model is not known: write tsp_layer=<int>, or "
                "measure it once with `vllm-kvx calibrate MODEL`"
            )
        return self.tsp_layer

    def num_by_rate(self, prompt_len: int) -> int:
        """Tokens of a prompt that the rate propagates by itself, the window included."""
        return share_of(prompt_len, self.token_rate, self.window)

    def num_propagated(self, prompt_len: int) -> int:
        """Tokens of a prompt that go on, the window included."""
        floor = floor_of(self.tsp_floor, self.kv_floor)
        return share_of(prompt_len, self.token_rate, max(self.window, floor))

    @property
    def keeps_by(self) -> ScoreSpec:
        return waiting_for(super().keeps_by, self.after)

    @property
    def selects_by(self) -> ScoreSpec:
        family = WINDOW_FAMILIES[self.tsp_reduction]
        return ScoreSpec(family, self.window, self.kernel, over_heads=True)

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        return () if self.tsp_rate == 1 else (self.last_full_layer + 1,)

    def selection(self, prompt_len: int, num_layers: int) -> Selection | None:
        count = self.num_propagated(prompt_len)
        if count == prompt_len or self.last_full_layer == num_layers - 1:
            return None
        return Selection(self.selects_by, count, self.last_full_layer, self.last_full_layer + 1)
