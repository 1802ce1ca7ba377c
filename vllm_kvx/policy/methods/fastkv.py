"""FastKV: one layer chooses the tokens that go on; each KV head chooses the entries that stay."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.policy.parameters import PolicyError, Select, check_layer, integer, rate, share_of


@dataclass(frozen=True)
class FastKV(Select, SnapKV):
    """FastKV: token-selective propagation (TSP) and KV retention (Jo et al.).

    Layers 0..tsp_layer process all N prompt tokens, later layers the `max(int(N * tsp_rate),
    window)` most salient ones. Retention is SnapKV's, with its parameters kv_rate (default 0.1) or
    kv_budget, window (8) and kernel (7). The two rates are independent: tsp_rate = 1 only retains,
    kv_rate = 1 only propagates.

    tsp_layer: the last layer that processes every token, counted from 0 (default `auto`: the
        paper's for models that it names, otherwise calibrated by its Eq. 3).
    tsp_rate: share of the prompt's tokens that go on, in (0, 1] (default 0.2).
    """

    name: ClassVar[str] = "fastkv"

    tsp_layer: int | str = integer("auto", at_least=0, words=("auto",))
    tsp_rate: float = rate(0.2)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in super().axes if a != "propagate" or self.tsp_rate != 1)

    def check_model(self, num_layers: int) -> None:
        check_layer(self, "tsp_layer", self.tsp_layer, num_layers)

    @property
    def last_full_layer(self) -> int:
        if isinstance(self.tsp_layer, str):
            raise PolicyError(
                f"{self}: the TSP layer of this model is not known: write tsp_layer=<int>, or "
                "measure it once with `vllm-kvx calibrate MODEL --prompts FILE`"
            )
        return self.tsp_layer

    def num_propagated(self, prompt_len: int) -> int:
        return share_of(prompt_len, self.tsp_rate, self.window)

    def splits(self) -> tuple[int, ...]:
        return () if self.tsp_rate == 1 else (self.last_full_layer + 1,)
