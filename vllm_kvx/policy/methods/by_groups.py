"""What FIER and Quest share: an index over groups of entries chooses what a decode step reads."""

from abc import ABC
from typing import ClassVar, Self

from vllm_kvx.policy.axes import DECODE_READS, Retrieve
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.retrieval_layers import RetrievalLayers

MIN_BUDGET = 32
MAX_BUDGET = 8192
MAX_REUSE = 8
# Those of the deepest models; a policy that reads that many whole saves nothing.
MAX_DENSE = 128


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

    def notice(self, num_layers: int) -> str | None:
        if num_layers > self.dense_layers:
            return None
        return (
            f"saves nothing on this model: it reads the first {self.dense_layers} layers with full "
            f"attention whole, and there are {num_layers}: set a lower dense_layers in the policy, "
            "down to 0"
        )

    @classmethod
    def of_index(
        cls, group: int, budget: int, reduction: str, below: int | str, layers: RetrievalLayers
    ) -> Self:
        parameters = {"budget": budget, "reduction": reduction, "dense_below": below}
        parameters |= {"reuse_layers": layers.reuse, "dense_layers": layers.dense}
        return cls(**{cls.group_key: group, **parameters})
