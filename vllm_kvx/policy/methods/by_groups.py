"""What FIER and Quest share: an index over groups of entries chooses what a decode step reads."""

from abc import ABC
from typing import ClassVar, Self

from vllm_kvx.policy.axes import DECODE_READS, Retrieve
from vllm_kvx.policy.parameters import PolicyError

MIN_BUDGET = 32
MAX_BUDGET = 8192
MAX_REUSE = 8


class RetrieveByGroups(Retrieve, ABC):
    """Retrieval whose index keeps something for every group of neighbouring entries.

    The newest group is always read, so no group is larger than the budget; PolicyError if it is. A
    method declares its fields itself, as their order is that of its parameters.

    group_key: the field that holds the tokens in a group.
    """

    saves: ClassVar[tuple[str, ...]] = (DECODE_READS,)
    needs: ClassVar[str] = "CUDA ops, to gain early: vllm-kvx build-ops; without them Triton's run"
    number: ClassVar[str] = "budget"
    letter: ClassVar[str] = "BUDGET"
    group_key: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        key, group = self.group_key, getattr(self, self.group_key)
        if group > self.budget:
            raise PolicyError(
                f"{self.name}: the newest {key} is always read, so {key} must be no larger than "
                f"the budget of {self.budget} tokens, got {group}"
            )

    @classmethod
    def of_index(
        cls, group: int, budget: int, reduction: str, dense_below: int | str, reuse_layers: int = 1
    ) -> Self:
        parameters = {"budget": budget, "reduction": reduction, "dense_below": dense_below}
        return cls(**{cls.group_key: group, **parameters, "reuse_layers": reuse_layers})
