"""Quest: per-page bounds choose the pages that a decode step reads."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.parameters import PolicyError, Retrieve, integer


@dataclass(frozen=True)
class Quest(Retrieve):
    """Quest: page-level retrieval by bounds on the keys (Tang et al., arXiv 2406.10774).

    Every entry stays stored with the channel-wise minimum and maximum of each page's keys. A page's
    score is the sum over channels of the larger of query x minimum and query x maximum; a decode
    step reads the best pages.

    budget: tokens that a decode step reads for each KV head, at least 64. Required.
    page: tokens in a page (default 16).
    """

    name: ClassVar[str] = "quest"
    number: ClassVar[str] = "budget"
    letter: ClassVar[str] = "BUDGET"
    example: ClassVar[str] = "quest-1024"
    sidecar: ClassVar[bool] = True

    budget: int = integer(at_least=64)
    page: int = integer(16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page > self.budget:
            raise PolicyError(
                f"quest: page must be no larger than the budget of {self.budget} tokens, "
                f"got {self.page}"
            )
