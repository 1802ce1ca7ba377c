"""What a server with `lookahead` refuses at start, and what to change: one row each.

Tokens are drafted behind a prompt within the step that ends it, in passes of the worker's own.
"""

from typing import TYPE_CHECKING

from vllm_kvx.config.policy_layers import is_mixed
from vllm_kvx.ops.paged import ONE_PLAN
from vllm_kvx.server.pipeline_checks import ONE_RANK, in_pipeline
from vllm_kvx.server.start_refusal import BACKEND, DRAFTS, MODEL, ON_GPUS, Refusal, asked_backend

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OR_WITHOUT = "or leave out lookahead= of the KV policy and kv_layout"

# Where tokens are drafted behind prompts (``Layout.lookahead``).
WITH_LOOKAHEAD: tuple[Refusal, ...] = (
    Refusal(
        lambda c: c.speculative_config,
        "tokens that lookahead= drafts were never tried beside speculative decoding: drop "
        f"--speculative-config, {_OR_WITHOUT}",
        DRAFTS,
    ),
    Refusal(
        in_pipeline,
        "lookahead= drafts tokens within a step, and a pipeline's ranks run theirs one after the "
        f"other: {ONE_RANK}, {_OR_WITHOUT}",
    ),
    Refusal(
        lambda c: is_mixed(c.model_config),
        "some layers of this model slide over a window or keep a state, and lookahead= has no room "
        "there for tokens that go again: leave out lookahead= of the KV policy and kv_layout",
        MODEL,
    ),
    Refusal(
        lambda c: c.model_config.uses_mrope,
        "positions of this model have several parts (M-RoPE), with which lookahead= was never "
        "tried: leave it out of the KV policy and kv_layout",
        MODEL,
    ),
    Refusal(
        lambda c: c.lora_config,
        "lookahead= was never tried beside LoRA adapters: drop --enable-lora, and serve a model "
        f"that the adapter is merged into, {_OR_WITHOUT}",
    ),
    Refusal(
        lambda c: _has_experts_in_lockstep(c),
        "experts on data-parallel ranks run in lockstep, and lookahead= runs further passes on one "
        f"of them: set --data-parallel-size 1, {_OR_WITHOUT}",
    ),
    Refusal(
        lambda c: c.parallel_config.enable_eplb,
        "lookahead= was never tried while experts are moved between ranks: drop --enable-eplb, "
        f"{_OR_WITHOUT}",
    ),
    Refusal(
        lambda c: asked_backend(c) in ONE_PLAN,
        "FlashInfer holds the plan of one batch, and lookahead= plans further passes in the same "
        f"step: set --attention-backend to one of {ON_GPUS}, {_OR_WITHOUT}",
        BACKEND,
    ),
)


def _has_experts_in_lockstep(c: "VllmConfig") -> bool:
    return c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe
