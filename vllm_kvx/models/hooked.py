"""Stock models whose attention layers have hooks: all that retention and retrieval need."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from vllm_kvx.models.attention import attention_layers, output_projections
from vllm_kvx.models.passes import StepPlan


class Build(NamedTuple):
    """What the worker that loads a model says of it.

    model_state: the class of vLLM's model state that goes with it.
    row_cuts: the layers where segments begin, by the layers' attention; see ``Segments``.
    online_cuts: the same for passes that find their pivot meanwhile.
    """

    model_state: Callable[..., Any]
    row_cuts: Callable[[Sequence[Attention]], Sequence[int]]
    online_cuts: tuple[int, ...]


class HookedModel(nn.Module):
    """Mixin over any model of vLLM's, which runs whole, inside the hooks that a step has.

    build: set before a model is loaded; vLLM makes the model itself.
    """

    build: ClassVar[Build]
    _plan: StepPlan
    _is_dummy_step: bool

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        build = HookedModel.build
        self._model_state = build.model_state
        self._attention_layers = attention_layers(vllm_config)
        self.begin_step(StepPlan())

    def attention_layers(self) -> list[Attention]:
        """The attention of every policy layer, in order; see ``models/attention``."""
        return self._attention_layers

    def every_layer(self) -> list[Attention]:
        """The attention of every layer that passes know of, in order: here the policy layers'."""
        return self._attention_layers

    def output_projections(self) -> list[nn.Module]:
        """What projects the output of each of them; ValueError where it is not known."""
        return output_projections(self, self.attention_layers())

    def begin_step(self, plan: StepPlan) -> None:
        """Says what the next forward pass runs.

        Whether it is a dummy step holds until the next one begins: vLLM warms up and captures with
        one preparation.
        """
        # Past ``nn.Module``, which would look among its parameters for both, in every step.
        self.__dict__.update(_plan=plan, _is_dummy_step=plan.is_dummy)

    def take_plan(self) -> StepPlan:
        """The plan, once: a dummy run that prepares no attention must not see an old one."""
        plan = self._plan
        self.__dict__["_plan"] = StepPlan()
        return plan

    def get_model_state_cls(self) -> Callable[..., Any]:
        return self._model_state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not `forward`: some models are compiled as they stand, and hooks have no place in that.
        plan = self.take_plan()
        assert plan.passes is None
        with plan.hooks:
            return super().__call__(*args, **kwargs)
