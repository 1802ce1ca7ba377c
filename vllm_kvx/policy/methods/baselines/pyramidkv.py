"""PyramidKV: SnapKV with larger budgets in lower layers."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import ClassVar

from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.policy.parameters import integer


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV (Cai et al., arXiv 2406.02069): per-layer budgets that fall linearly.

    SnapKV's are window, kernel, score, after and lookahead. So is the mean over the layers of what
    they keep, by kv_rate and kv_floor or by kv_budget; outside the window the last layer keeps
    1 / beta of that mean, the first one 2 - 1 / beta of it, but no layer more than there is.

    beta: how much less than the mean the last layer keeps outside the window (default 20).
    groups: neighbouring layers share a budget, in at most so many stages, each a KV cache group
        with block tables of its own (default 8; as many as layers is the paper's).
    """

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "SnapKV with larger budgets in lower layers"
    paper: ClassVar[str] = "arXiv 2406.02069"
    served_as: ClassVar[str] = "pyramidkv:kv_rate=0.2,after=32"

    beta: int = integer(20)
    groups: int = integer(8)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return () if self.kv_rate == 1 else tuple(range(0, num_layers, self._size(num_layers)))[1:]

    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        stage = layer // self._size(num_layers)
        return min(_caps(self, prompt_len, num_layers)[stage], rows)

    def _size(self, num_layers: int) -> int:
        """Layers of a stage."""
        return ceil(num_layers / self.groups)


@lru_cache(maxsize=4096)
def _caps(method: PyramidKV, prompt_len: int, num_layers: int) -> tuple[int, ...]:
    """Entries that a layer keeps, by stage, the window included.

    What a stage's rounding leaves goes to the stage above it.
    """
    outside = max(prompt_len - method.window, 0)
    mean = Fraction(max(method.cap(prompt_len) - method.window, 0))
    last = mean / method.beta
    first = min(2 * mean - last, Fraction(outside))
    step = 2 * (first - mean) / (num_layers - 1) if num_layers > 1 else Fraction(0)
    budgets = [first - step * layer for layer in range(num_layers)] if step else [mean] * num_layers
    size = method._size(num_layers)
    caps, left = [], Fraction(0)
    for start in range(0, num_layers, size):
        stage = budgets[start : start + size]
        left += sum(stage)
        each = floor(left / len(stage))
        left -= each * len(stage)
        caps.append(min(method.window + each, prompt_len))
    return tuple(caps)
