"""Quest: per-page bounds choose the pages that a decode step reads."""

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

PAGES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Quest(RetrieveByGroups):
    """Quest: page-level retrieval by bounds on the keys (Tang et al., arXiv 2406.10774).

    Every entry stays stored with the channel-wise minimum and maximum of each page's keys. A page's
    score is the sum over channels of the larger of query x minimum and query x maximum; above
    the dense layers a decode step reads the newest page and the best others.

    budget: tokens that a decode step reads for each KV head, 32 to 8192; `budget // page` whole
        pages. Required.
    page: tokens in a page: 8, 16 (default), 32 or 64, and no more than the budget.
    reduction: how scores of the query heads that share a KV head become one; see FIER.
    dense_below: contexts shorter than this many tokens are read whole; `auto` (default) retrieves
        where that was measured to be faster than reading everything, for one request or a batch.
    reuse_layers: layers that read by one choice, 1 to 8 (default 1): the first of so many that
        retrieve makes it, and the others of these read the same entries, head by head.
    dense_layers: the first layers, which read everything, 0 to 128 (default 2, as in the paper).
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "bounds of pages choose the pages that a decode step reads"
    paper: ClassVar[str] = "arXiv 2406.10774"
    example: ClassVar[str] = "quest-1024"
    group_key: ClassVar[str] = "page"
    index_name: ClassVar[str] = "page_bounds"
    index_words: ClassVar[str] = "bounds of pages"

    budget: int = integer(at_least=MIN_BUDGET, at_most=MAX_BUDGET)
    page: int = choice(16, PAGES)
    reduction: str = choice("max", REDUCTIONS)
    dense_below: int | str = integer("auto", at_least=0, words=("auto",))
    reuse_layers: int = integer(1, at_least=1, at_most=MAX_REUSE)
    dense_layers: int = integer(OF_PAPERS.dense, at_least=0, at_most=MAX_DENSE)

    @property
    def index(self) -> IndexSpec:
        return IndexSpec(self.index_name, self.page, unit=self.page)
