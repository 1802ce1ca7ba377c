"""What a server with policies refuses of speculative decoding, and what to change: one row each."""

from typing import TYPE_CHECKING

from vllm_kvx.config.drafts import METHOD, STAND_IN
from vllm_kvx.config.policy_layers import is_mixed
from vllm_kvx.server.further_passes import with_further_passes
from vllm_kvx.server.int8_cache import is_int8
from vllm_kvx.server.pipeline_checks import in_pipeline
from vllm_kvx.server.start_refusal import DRAFTS, MODEL, Refusal, asked_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What drafts tokens by the text alone, and what by the hidden states of the model.
BY_TEXT = ("ngram", "ngram_gpu", "draft_model")
BY_STATES = ("eagle", "eagle3", "mtp")
# The ways to accept drafts after which an answer is the model's own. vLLM has others: `synthetic`
# accepts by a rate that a benchmark makes up, and `fly` of 0.33 what is nearly right.
_TRUE_TO_THE_MODEL = ("standard", "block")


def has_layers(c: "VllmConfig") -> bool:
    """Whether the drafter has attention layers of its own."""
    drafter = c.speculative_config
    return drafter is not None and drafter.method in ("draft_model", *BY_STATES)


def _drafts_otherwise(c: "VllmConfig") -> bool:
    """Whether tokens are drafted in a form that no test has."""
    drafter = c.speculative_config
    if drafter is None or drafter.method not in (*BY_TEXT, *BY_STATES):
        return False
    return (
        drafter.parallel_drafting
        or drafter.enable_adaptive_verification
        or drafter.use_multi_module_mtp()
        or drafter.use_gemma4_mtp()
    )


def _drafts_ahead_otherwise(c: "VllmConfig") -> bool:
    """Whether steps are planned before it is known which drafts stay, in a form no test has."""
    drafter = c.speculative_config
    if drafter is None or not c.scheduler_config.async_scheduling:
        return False
    by_rows = c.model_config.uses_mrope
    return not has_layers(c) or is_mixed(c.model_config) or by_rows or is_int8(c)


def _accepts_otherwise(c: "VllmConfig") -> bool:
    """Whether drafts are accepted that the model would not have given."""
    drafter = c.speculative_config
    return drafter is not None and drafter.rejection_sample_method not in _TRUE_TO_THE_MODEL


def _has_mtp_by_rows(c: "VllmConfig") -> bool:
    """Whether the model's own MTP layers draft, and its positions have several rows."""
    drafter = c.speculative_config
    is_mtp = drafter is not None and drafter.method == "mtp"
    # Hybrids are refused whatever their positions are.
    return is_mtp and c.model_config.uses_mrope and not is_mixed(c.model_config)


# Where tokens are drafted (``Layout.drafts``).
WITH_DRAFTS: tuple[Refusal, ...] = (
    Refusal(
        _drafts_ahead_otherwise,
        "asynchronous scheduling only knows how many tokens a request has at most while tokens are "
        "drafted. That was tried with a draft model, EAGLE or MTP, full attention in every layer, "
        "positions of one part and no int8 cache: set --no-async-scheduling",
        DRAFTS,
    ),
    Refusal(
        lambda c: (
            c.speculative_config and c.speculative_config.method not in (*BY_TEXT, *BY_STATES)
        ),
        "this method of --speculative-config was never tried beside policies: set it to "
        f"{', '.join(sorted({*BY_TEXT, *BY_STATES} - {'ngram_gpu'}))}, or drop "
        "--speculative-config",
        DRAFTS,
    ),
    Refusal(
        _drafts_otherwise,
        "drafts in parallel, by several MTP layers or over the model's own keys and values, and "
        "adaptive verification, were never tried beside policies: take parallel_drafting and "
        "enable_adaptive_verification out of --speculative-config, set its "
        "num_speculative_tokens to 1 where the model has several MTP layers, or its method to "
        "ngram",
        DRAFTS,
    ),
    Refusal(
        lambda c: has_layers(c) and is_mixed(c.model_config),
        "some layers of this model slide over a window or keep a state, and a drafter with layers "
        "of its own was never tried beside them: set the method of --speculative-config to ngram, "
        "or drop it",
        MODEL,
    ),
    Refusal(
        lambda c: c.speculative_config and c.model_config.is_hybrid,
        "some layers of this model keep a state, which has to be taken back when drafted tokens "
        "are rejected, and that is not supported yet: drop --speculative-config",
    ),
    Refusal(
        lambda c: c.speculative_config and in_pipeline(c),
        "no test drafts tokens in a pipeline: drop --speculative-config, or set "
        "--pipeline-parallel-size 1",
    ),
    Refusal(
        lambda c: c.speculative_config and asked_connector(c),
        "no test drafts tokens beside a KV connector: drop --speculative-config, or "
        "--kv-transfer-config and --kv-offloading-size",
    ),
    Refusal(
        _has_mtp_by_rows,
        "positions of this model have several parts (M-RoPE), with which no test drafts by the "
        "model's own MTP layers: set the method of --speculative-config to ngram, or drop it",
        MODEL,
    ),
    Refusal(
        _accepts_otherwise,
        "this rejection_sample_method of --speculative-config accepts drafts that the model would "
        "not have given, so that answers are not those of the policy: set it to "
        f"{' or '.join(_TRUE_TO_THE_MODEL)}, or leave it out",
        DRAFTS,
    ),
)

# Where the model drafts for itself (``Layout.own_drafts``).
WITH_OWN_DRAFTS: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.speculative_config is None or c.speculative_config.method != STAND_IN,
        f"kv_drafts of additional_config is what the server makes of method {METHOD}: remove it, "
        f"and set the method of --speculative-config to {METHOD}",
        DRAFTS,
    ),
    *with_further_passes(
        f"method {METHOD} of --speculative-config",
        "set the method of --speculative-config to ngram, or drop it",
    ),
)
