"""vLLM's choice of experts on CPU, completed for tests.

Without groups of experts, vLLM 0.32's CPU router knows softmax alone and adds no correction bias:
MiniMax-M2 (sigmoid) fails an assertion, and ERNIE 4.5 MoE answers as if the bias were 0. On GPUs
vLLM does both. One group of all experts, which the CPU router knows, is the same choice.
"""

from typing import Any

import pytest


def complete_cpu_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end, experts are chosen with scores and biases as on GPUs."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    stock = cpu_router.CPURouter._compute_routing

    def compute(self: Any, hidden_states: Any, router_logits: Any, *args: Any, **more: Any) -> Any:
        is_plain = not self.use_grouped_topk and self.custom_routing_function is None
        has_bias = self.e_score_correction_bias is not None
        if is_plain and (self.scoring_func == "sigmoid" or has_bias):
            return cpu_router._grouped_topk(
                gating_output=router_logits,
                topk=self.top_k,
                renormalize=self.renormalize,
                num_expert_group=1,
                topk_group=1,
                scoring_func=self.scoring_func,
                routed_scaling_factor=self.routed_scaling_factor,
                e_score_correction_bias=self.e_score_correction_bias,
            )
        return stock(self, hidden_states, router_logits, *args, **more)

    monkeypatch.setattr(cpu_router.CPURouter, "_compute_routing", compute)
