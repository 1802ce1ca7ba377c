"""FIER: 1-bit keys choose the tokens that a decode step reads."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.parameters import Retrieve, choice, integer


@dataclass(frozen=True)
class FIER(Retrieve):
    """FIER: token-level retrieval by 1-bit quantised keys (Wang et al.).

    Every entry stays stored; a decode step reads, for each KV head, the tokens of the quantisation
    group still filling and the best-scoring others. A context no longer than the budget is read
    whole.

    budget: tokens that a decode step reads for each KV head, at least 64. Required.
    group: tokens that share a scale and a zero for each channel, a multiple of 32 (default 32).
    reduction: how scores of the query heads that share a KV head become one: `max` (default),
        `sum` or `softmax` (sum of softmax mass).
    dense_below: contexts shorter than this many tokens are read whole (default 0).
    """

    name: ClassVar[str] = "fier"
    number: ClassVar[str] = "budget"
    letter: ClassVar[str] = "BUDGET"
    example: ClassVar[str] = "fier-1024"
    sidecar: ClassVar[bool] = True

    budget: int = integer(at_least=64)
    group: int = integer(32, at_least=32, multiple_of=32)
    reduction: str = choice("max", ("max", "sum", "softmax"))
    dense_below: int = integer(0, at_least=0)
