"""FIER: 1-bit keys choose the tokens that a decode step reads."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import REDUCTIONS, IndexSpec
from vllm_kvx.policy.methods.by_groups import (
    MAX_BUDGET,
    MAX_DENSE,
    MAX_REUSE,
    MIN_BUDGET,
    RetrieveByGroups,
)
from vllm_kvx.policy.parameters import choice, integer
from vllm_kvx.policy.retrieval_layers import OF_PAPERS

GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True)
class FIER(RetrieveByGroups):
    """FIER: token-level retrieval by 1-bit quantised keys (Wang et al.).

    Every entry stays stored; above the dense layers a decode step reads, for each KV head, the
    tokens of the newest quantisation group and the best-scoring others. A context no longer than
    the budget is read whole.

    budget: tokens that a decode step reads for each KV head, 32 to 8192. Required.
    group: tokens that share a scale and a zero for each channel: 32 (default), 64, 128 or 256, and
        no more than the budget. KV blocks are whole groups.
    reduction: how scores of the query heads that share a KV head become one: `max` (default),
        `sum` or `softmax` (sum of softmax mass).
    dense_below: contexts shorter than this many tokens are read whole; `auto` (default) retrieves
        where that was measured to be faster than reading everything, for one request or a batch.
    reuse_layers: layers that read by one choice, 1 to 8 (default 1): the first of so many that
        retrieve makes it, and the others of these read the same entries, head by head.
    dense_layers: the first layers, which read everything, 0 to 128 (default 2, as in the paper).
    """

    name: ClassVar[str] = "fier"
    summary: ClassVar[str] = "1-bit keys choose the tokens that a decode step reads"
    paper: ClassVar[str] = "arXiv 2508.08256"
    example: ClassVar[str] = "fier-1024"
    group_key: ClassVar[str] = "group"
    index_name: ClassVar[str] = "one_bit"
    index_words: ClassVar[str] = "1-bit keys in groups"

    budget: int = integer(at_least=MIN_BUDGET, at_most=MAX_BUDGET)
    group: int = choice(32, GROUPS)
    reduction: str = choice("max", REDUCTIONS)
    dense_below: int | str = integer("auto", at_least=0, words=("auto",))
    reuse_layers: int = integer(1, at_least=1, at_most=MAX_REUSE)
    dense_layers: int = integer(OF_PAPERS.dense, at_least=0, at_most=MAX_DENSE)

    @property
    def index(self) -> IndexSpec:
        return IndexSpec(self.index_name, self.group, unit=1)
