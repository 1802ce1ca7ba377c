"""Puts a model with hooks, or one in segments, in the place of the one that vLLM would load."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from vllm_kvx.models.hooked import Build

_ALIAS = "Kvx"


def use_policy_model(
    model_config: "ModelConfig", build: "Build", in_segments: bool, in_pipeline: bool = False
) -> None:
    """Makes this process load a class over the model's own, built so.

    The class is registered under a name of its own, so a stock engine in the same process keeps
    the stock class.

    Args:
        in_segments: whether it runs in passes over ranges of layers, see ``SegmentedModel``.
        in_pipeline: whether these ranges are those of a pipeline's ranks, see ``RankModel``.

    Raises:
        ValueError: the model has a model state of its own, in whose place ours would be.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_kvx.models.decoder import SegmentedModel
    from vllm_kvx.models.hooked import HookedModel
    from vllm_kvx.models.pipeline_rank import RankModel

    HookedModel.build = build
    hf_config = model_config.hf_config
    names = list(hf_config.architectures or [])
    if any(name.startswith(_ALIAS) for name in names):
        return
    stock, architecture = ModelRegistry.resolve_model_cls(names, model_config)
    if hasattr(stock, "get_model_state_cls"):
        raise ValueError(
            f"{architecture} prepares inputs of its own in every step (get_model_state_cls), which "
            "policies do not know: drop the KV policy, or serve another model"
        )
    mixin: type[HookedModel] = HookedModel
    if in_segments:
        mixin = RankModel if in_pipeline else SegmentedModel
    alias = f"{_ALIAS}{mixin.__name__.removesuffix('Model')}{architecture}"
    ModelRegistry.register_model(alias, type(alias, (mixin, stock), {}))
    hf_config.architectures = [alias]
    # Else vLLM would look for the alias among Transformers' models.
    model_config.model_impl = "auto"
