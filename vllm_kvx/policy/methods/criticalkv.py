"""CriticalKV: SnapKV whose scores also ask how much a value changes the layer's output."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.methods.snapkv import SnapKV


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """CriticalKV (Feng et al., arXiv 2502.03805) on SnapKV's attention.

    A key that gets attention matters as much as its value moves the layer's output. Each layer and
    KV head keeps as many entries as under SnapKV, the window included. Half of those outside the
    window are chosen by attention alone; the rest by attention times the norm of the value after
    the layer's output projection, the mean over the KV head's query heads.

    The paper takes the L1 norm of the projected value, for which every value has to be projected:
    as much work as the projection of the whole prompt for each query head. Here it is the L2 norm,
    which a factor of D x D weights gives exactly: see ``ops/prompt/value_norms.py``.

    It is `snapkv:score=critical` by its own name, and its other parameters are SnapKV's, with
    SnapKV's defaults: kv_rate, kv_budget, kv_floor, window, kernel, after,
    lookahead.
    """

    name: ClassVar[str] = "criticalkv"
    summary: ClassVar[str] = "SnapKV whose scores ask how much a value moves the output, too"
    paper: ClassVar[str] = "arXiv 2502.03805"
    served_as: ClassVar[str] = "criticalkv:kv_rate=0.2,after=32"
    needs: ClassVar[str] = "memory for factors of the output projections"

    # No parameter any more.
    score: ClassVar[str] = "critical"  # type: ignore[misc]
