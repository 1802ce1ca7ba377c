"""What is refused at start where the worker runs passes of its own after a step's, and why."""

from typing import TYPE_CHECKING

from vllm_kvx.config.policy_layers import is_mixed
from vllm_kvx.ops.paged import ONE_PLAN
from vllm_kvx.server.pipeline_checks import ONE_RANK, in_pipeline
from vllm_kvx.server.start_refusal import BACKEND, MODEL, ON_GPUS, Refusal, asked_backend

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def with_further_passes(what: str, without: str) -> tuple[Refusal, ...]:
    """Rows for tokens that are drafted in passes of one row each.

    what: drafts them, in words. without: how not to, as in "leave out lookahead=".
    """
    return (
        Refusal(
            in_pipeline,
            f"{what} drafts tokens within a step, and a pipeline's ranks run theirs one after the "
            f"other: {ONE_RANK}, or {without}",
        ),
        Refusal(
            lambda c: is_mixed(c.model_config),
            f"some layers of this model slide over a window or keep a state, and {what} has no "
            f"room there for tokens that go again: {without}",
            MODEL,
        ),
        Refusal(
            lambda c: c.model_config.uses_mrope,
            f"positions of this model have several parts (M-RoPE), with which {what} was never "
            f"tried: {without}",
            MODEL,
        ),
        Refusal(
            lambda c: c.lora_config,
            f"{what} was never tried beside LoRA adapters: drop --enable-lora, and serve a model "
            f"that the adapter is merged into, or {without}",
        ),
        Refusal(
            lambda c: _has_experts_in_lockstep(c),
            f"experts on data-parallel ranks run in lockstep, and {what} runs further passes on "
            f"one of them: set --data-parallel-size 1, or {without}",
        ),
        Refusal(
            lambda c: c.parallel_config.enable_eplb,
            f"{what} was never tried while experts are moved between ranks: drop --enable-eplb, "
            f"or {without}",
        ),
        Refusal(
            lambda c: asked_backend(c) in ONE_PLAN,
            f"FlashInfer holds the plan of one batch, and {what} plans further passes in the same "
            f"step: set --attention-backend to one of {ON_GPUS}, or {without}",
            BACKEND,
        ),
    )


def _has_experts_in_lockstep(c: "VllmConfig") -> bool:
    return c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe
