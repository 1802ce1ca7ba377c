"""Models that also read images or sound: whether a server with a policy serves these, too.

To policies that only retain or retrieve, the tokens of an image are prompt tokens like others: they
have keys, and the model runs whole. Policies that propagate run layers on some tokens, past the
model that puts images in. Where images cannot be served, or were not tried, the server sets vLLM's
--language-model-only by itself: no encoder is loaded, and the rest is a text model. Why it did so
goes into ``additional_config``, for the log and for those who send an image all the same.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvx.config.drafts import DRAFTS_KEY
from vllm_kvx.config.settings import TEXT_ALONE_KEY
from vllm_kvx.server.auto_policy import asks_for_auto
from vllm_kvx.server.validate import is_full_alone, named_policies

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Why a user's own --language-model-only is obeyed.
ASKED_FOR = (
    "it was started with --language-model-only; without that it serves images, or says at start "
    "why it cannot"
)


class _Row(NamedTuple):
    """What keeps images from a server, by its arguments: what it is, and what to change."""

    applies: Callable[[Any], Any]
    why: str


def _drafts(args: Any) -> bool:
    """Whether any flag asks for drafts, or the model is to draft for itself."""
    config = args.additional_config
    itself = isinstance(config, Mapping) and config.get(DRAFTS_KEY) is not None
    flags = args.speculative_config, args.spec_method, args.spec_model, args.spec_tokens
    return itself or any(flags)


# By vLLM's EngineArgs.
_BY_ARGUMENTS = (
    _Row(
        lambda args: asks_for_auto(args.additional_config),
        "auto may stand for a policy that propagates: name the policy in its place, one that only "
        "retains or retrieves (snapkv, fier and others), to serve images",
    ),
    _Row(
        lambda args: any(p.propagate is not None for p in named_policies(args.additional_config)),
        "policies that propagate (speed, fastkv, structkv, gemfilter, swiftkv, selfonly) run "
        "layers on some tokens of a text: drop them from the KV policy and kv_layout to serve "
        "images; those that only retain or retrieve (snapkv, fier and others) take these",
    ),
    _Row(
        lambda args: any(p.lookahead for p in named_policies(args.additional_config)),
        "images were not tried beside tokens that lookahead= drafts: leave it out of the KV policy "
        "and kv_layout to serve images",
    ),
    _Row(
        _drafts,
        "images were not tried beside drafted tokens: drop --speculative-config and --spec-method, "
        "--spec-model and --spec-tokens to serve images",
    ),
    _Row(
        lambda args: args.enable_lora,
        "images were not tried beside LoRA adapters: drop --enable-lora to serve images",
    ),
    _Row(
        lambda args: args.pipeline_parallel_size > 1,
        "images were not tried in a pipeline: set --pipeline-parallel-size 1 to serve images",
    ),
    _Row(
        lambda args: args.kv_transfer_config or args.kv_offloading_size,
        "images were not tried beside a KV connector: drop --kv-transfer-config and "
        "--kv-offloading-size to serve images",
    ),
    _Row(
        lambda args: args.video_pruning_rate,
        "videos from which tokens are pruned were not tried: drop --video-pruning-rate to serve "
        "images",
    ),
    _Row(
        lambda args: args.skip_tokenizer_init,
        "images are put into prompts by the tokenizer, too: drop --skip-tokenizer-init to serve "
        "images",
    ),
)

# By vLLM's ModelConfig.
_BY_MODEL = (
    _Row(
        lambda model: model.is_mm_prefix_lm,
        "tokens of an image see those behind them in this model, which policies do not know: "
        "drop the KV policy to serve images",
    ),
    _Row(
        lambda model: model.using_transformers_backend(),
        "vLLM runs this model by Transformers' own code, with which images were not tried: set "
        "--model-impl vllm, if vLLM has this model, to serve images",
    ),
)


def with_text_alone(make: Callable[[], "VllmConfig"], engine_args: Any) -> "VllmConfig":
    """What `make` makes of vLLM's `engine_args`, with --language-model-only where it has to be.

    Much of vLLM's configuration follows from it, and whether a model can serve images is not known
    before vLLM reads the model's own. Models of text ignore it.
    """
    given = engine_args.additional_config
    # A further API server is given what the first has found, and the policy in the place of auto.
    why: str | None = given.get(TEXT_ALONE_KEY)
    if engine_args.language_model_only or (why is None and is_full_alone(given)):
        return make()
    of_model = engine_args.create_model_config

    def create_model_config() -> "ModelConfig":
        nonlocal why
        if why is None and (why := _first(_BY_ARGUMENTS, engine_args)) is None:
            model = of_model()
            if not model.is_multimodal_model or (why := _first(_BY_MODEL, model)) is None:
                return model
        engine_args.language_model_only = True
        return of_model()

    engine_args.create_model_config = create_model_config
    try:
        vllm_config = make()
    finally:
        del engine_args.create_model_config
        # It is the caller's in Python, who may start other models with these arguments.
        engine_args.language_model_only = False
    if why is not None and is_text_alone(vllm_config):
        # Not in place, for the same reason.
        config: Any = vllm_config.additional_config
        vllm_config.additional_config = {**config, TEXT_ALONE_KEY: why}
        _say(why)
    return vllm_config


def _first(rows: tuple[_Row, ...], config: Any) -> str | None:
    return next((row.why for row in rows if row.applies(config)), None)


def _say(why: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.kvx").warning(
        "This model's text alone is served: its encoder is not loaded, and requests with images, "
        "audio or video are refused, as with --language-model-only: %s.",
        why,
    )


def is_text_alone(vllm_config: "VllmConfig") -> bool:
    """Whether a model of several modalities is served as a text model."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and multimodal.language_model_only


def why_text_alone(vllm_config: "VllmConfig") -> str | None:
    """Why a model of several modalities is served as a text model, and what to change.

    None where it is not.
    """
    if not is_text_alone(vllm_config):
        return None
    config: Any = vllm_config.additional_config
    return config.get(TEXT_ALONE_KEY) or ASKED_FOR


def check_text_alone(config: Mapping[str, Any]) -> None:
    """Raise ValueError if ``kv_text_alone`` in ``additional_config`` is no server's own."""
    why = config.get(TEXT_ALONE_KEY)
    if why is not None and why not in {row.why for row in (*_BY_ARGUMENTS, *_BY_MODEL)}:
        raise ValueError(
            f"{TEXT_ALONE_KEY} is what a server sets where it serves a model's text alone: remove "
            "it, and set --language-model-only"
        )
