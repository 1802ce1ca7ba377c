"""Decoders that vllm-kvx can run in segments, and how one is put in a stock model's place."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from vllm_kvx.models.decoder import Build

# Architecture as in config.json -> where its segmented class lives. A dense decoder whose layers
# take (positions, hidden_states, residual) needs one row here and one line in decoder.py.
SEGMENTED: dict[str, str] = {
    "LlamaForCausalLM": "vllm_kvx.models.decoder:SegmentedLlamaForCausalLM",
    "MistralForCausalLM": "vllm_kvx.models.decoder:SegmentedMistralForCausalLM",
    "Qwen2ForCausalLM": "vllm_kvx.models.decoder:SegmentedQwen2ForCausalLM",
    "Qwen3ForCausalLM": "vllm_kvx.models.decoder:SegmentedQwen3ForCausalLM",
}


def use_segmented_model(model_config: "ModelConfig", build: "Build") -> None:
    """Makes this process load the segmented class of the model's architecture, built so.

    The class is registered under a name of its own, so a stock engine in the same process keeps
    the stock class.

    Raises:
        ValueError: the architecture is not in ``SEGMENTED``.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_kvx.models.decoder import SegmentedModel

    SegmentedModel.build = build
    hf_config = model_config.hf_config
    names = [name for name in hf_config.architectures or [] if name in SEGMENTED]
    if not names:
        if any(name.startswith("Kvx") for name in hf_config.architectures or []):
            return
        raise ValueError(
            f"KV policies cannot segment {hf_config.architectures}; "
            f"supported: {', '.join(sorted(SEGMENTED))}"
        )
    alias = f"Kvx{names[0]}"
    ModelRegistry.register_model(alias, SEGMENTED[names[0]])
    hf_config.architectures = [alias]
