"""What a server refuses of a model: for what its layers are, and never for its name.

What only shows once a model is loaded, ``models/attention`` and ``models/layer_ranges`` refuse.
"""

from typing import TYPE_CHECKING

from vllm_kvx.config.policy_layers import (
    is_mixed,
    num_policy_layers,
    own_configs,
    shares_keys,
    sliding_layers,
)
from vllm_kvx.policy.beside_windows import beside_windows
from vllm_kvx.server.pipeline_checks import has_rank_without_policy_layers
from vllm_kvx.server.start_refusal import (
    BACKEND,
    MODEL,
    ON_GPUS,
    RANGES,
    Refusal,
    asked_backend,
    asked_connector,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvx.config.settings import KVSettings

# Under any policy but `full`.
OF_MODEL: tuple[Refusal, ...] = (
    Refusal(
        lambda c: _multimodal(c, "enable_mm_embeds") and not asked_connector(c),
        "policies serve images, and no embeddings of images: drop --enable-mm-embeds",
    ),
    Refusal(
        lambda c: _multimodal(c, "enable_mm_embeds") and asked_connector(c),
        "this model also reads images, and vLLM lets a server that takes KV from others take "
        "embeddings of images, which policies do not serve: drop --kv-transfer-config and "
        "--kv-offloading-size, or serve a model of text",
    ),
    Refusal(
        lambda c: _multimodal(c, "mm_encoder_only"),
        "an encoder alone generates nothing that a KV policy could save: drop --mm-encoder-only",
    ),
    Refusal(
        lambda c: c.model_config.is_multimodal_raw_input_only_model,
        "this model takes no text alone, and its own kind of input in every step, which policies "
        "do not know: serve another model, or drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: c.model_config.is_encoder_decoder,
        "encoder-decoder models are not supported: serve a decoder-only model",
        MODEL,
    ),
    Refusal(
        lambda c: c.model_config.use_mla,
        "multi-head latent attention is not supported yet, and full alone remains: serve another "
        "model, or drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: shares_keys(c.model_config.hf_text_config),
        "its last layers read the keys and values of earlier ones (num_kv_shared_layers), and full "
        "alone remains: serve another model, or drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: _values_differ(c.model_config.hf_text_config) and not c.model_config.use_mla,
        "its values have another number of dimensions than its keys, and policies need as many: "
        "serve another model, or drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: not num_policy_layers(c.model_config),
        "every layer of this model slides over a window, so that its cache does not grow: set "
        "--disable-sliding-window (which caps the context at the window), serve another model, or "
        "drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: c.model_config.is_attention_free,
        "this model keeps states and no keys or values: drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: c.model_config.uses_alibi,
        "ALiBi counts stored entries and not positions: serve another model, or drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: getattr(c.model_config.hf_text_config, "attention_chunk_size", None),
        "attention within chunks is not supported yet: serve another model, or drop the KV policy",
        MODEL,
    ),
    Refusal(
        lambda c: getattr(c.model_config.hf_text_config, "dual_chunk_attention_config", None),
        "dual chunk attention is not supported: remove dual_chunk_attention_config from the "
        "model's config.json",
        MODEL,
    ),
    Refusal(
        has_rank_without_policy_layers,
        "a rank of the pipeline would have no layer with full attention, and nothing to hold for a "
        "policy: set --pipeline-parallel-size to less, or VLLM_PP_LAYER_PARTITION to other layers",
    ),
)

_DROP = (
    "drop the policies that propagate (speed, fastkv, structkv, gemfilter, swiftkv, selfonly) from "
    "the KV policy and kv_layout"
)
_OTHERS = (
    f"{_DROP}; those that only retain or retrieve (snapkv, criticalkv, fier and others) run on "
    "this model"
)

# vLLM's backend whose operators write the KV cache outside of attention.
_FUSED = "HPC_ATTN"

# Where rows leave the batch between two layers, so that the decoder runs in ranges of layers.
WITH_PROPAGATION: tuple[Refusal, ...] = (
    Refusal(
        lambda c: is_mixed(c.model_config) and not sliding_layers(c.model_config),
        "some layers of this model keep a state, or its configuration does not say which slide "
        "over a window, and tokens cannot be dropped without changing what these layers compute "
        f"(`vllm-kvx doctor` says above which layer they could): {_OTHERS}",
        RANGES,
    ),
    Refusal(
        lambda c: c.model_config.using_transformers_backend(),
        "vLLM runs this model by Transformers' own code, which cannot be asked for a range of its "
        f"layers: set --model-impl vllm, if vLLM has this model, or {_OTHERS}",
        RANGES,
    ),
    Refusal(
        lambda c: not c.model_config._model_info.supports_pp,
        "vLLM's code of this model does not support pipeline parallelism (SupportsPP), so that it "
        f"cannot be asked for a range of its layers: {_OTHERS}",
        RANGES,
    ),
    Refusal(
        lambda c: c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe,
        "experts run in lockstep over data-parallel ranks, which drop different rows: set "
        f"--data-parallel-size 1, or {_OTHERS}",
    ),
    Refusal(
        lambda c: c.compilation_config.fast_moe_cold_start,
        "with fast_moe_cold_start vLLM counts a forward pass's experts from its first layer, and "
        "ranges of layers begin elsewhere: set --compilation-config "
        "'{\"fast_moe_cold_start\": false}'",
    ),
    # It is never vLLM's own choice.
    Refusal(
        lambda c: asked_backend(c) == _FUSED,
        f"with {_FUSED} layers such as HY-V3's rotate and store keys by the plan of a whole batch, "
        "before their attention, and rows leave the batch between layers: set --attention-backend "
        f"to one of {ON_GPUS}",
        BACKEND,
    ),
)


def _values_differ(text_config: object) -> bool:
    """Whether a configuration says that values are smaller or larger than keys."""
    for each in own_configs(text_config) or [text_config]:
        sizes = [getattr(each, name, None) for name in ("head_dim", "v_head_dim")]
        if None not in sizes and sizes[0] != sizes[1]:
            return True
    return False


def beside_sliding_layers(settings: "KVSettings") -> list[str]:
    """What keeps the policies of a server that propagates from a model some of whose layers slide.

    Each cut has to leave a layer with full attention below it, which holds every token.
    """
    if (windows := settings.layout.windows) is None:
        return []
    count, sliding = settings.num_layers, windows.layers
    found = (beside_windows(policy, windows, count) for policy in settings.policies)
    problems = dict.fromkeys(filter(None, found))
    first = next(layer for layer in range(count) if layer not in sliding)
    by_position = (
        policy.propagate
        for policy in settings.policies
        if policy.propagate is not None and policy.propagate.selects_by is None
    )
    cuts = [cut for propagate in by_position for cut in propagate.row_cuts(count)]
    if min(cuts, default=count) <= first:
        problems[
            f"layers 0 to {first - 1} slide over a window, and below its cut speed-K needs a layer "
            f"with full attention: use speed-{first + 1} or a higher cut"
        ] = None
    return list(problems)


def _multimodal(c: "VllmConfig", name: str) -> bool:
    """Whether the flag `name` of multimodal models is set."""
    return bool(getattr(c.model_config.multimodal_config, name, False))
