"""vLLM's gated delta rule on CPU in float32, for tests.

vLLM 0.32's CPU kernels of it (`_causal_conv1d_fwd_cpu`, `chunk_gated_delta_rule_cpu`,
`fused_sigmoid_gating_delta_rule_update_cpu`) take bfloat16 alone: "CPU GDN attention requires
BF16". This runs the same step by transformers' token-by-token rule, one request after the other, on
the states that vLLM keeps.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


def run_delta_rule_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end, layers of Qwen3-Next's kind run on CPU in float32."""
    # Registered here so that a layer does not do it later, over what is set below.
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    gdn_attention.register_cpu_gdn_attention_ops()
    monkeypatch.setattr(torch.ops.vllm, "cpu_gdn_attention_core", _core)


def _core(mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, layer_name: Any) -> None:
    """In place of the operator: `out` (n, value heads, D) from (n, channels), (n, value heads)."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    context = get_forward_context()
    layer: Any = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    step: Any = context.attn_metadata[layer.prefix]
    assert step.spec_sequence_masks is None, "drafts are not for this stand-in"
    weight = gdn_attention._unpacked_conv_weight(layer)  # (channels, width)
    conv_states = gdn_attention._conv_buffer_view(layer)  # (slots, channels, width - 1)
    states = gdn_attention._ssm_state_view(layer)  # (slots, value heads, key D, value D)
    starts = step.non_spec_query_start_loc.tolist()
    slots = step.non_spec_state_indices_tensor.tolist()
    count = step.num_decodes + step.num_prefills
    for request in range(count):
        rows, slot = slice(starts[request], starts[request + 1]), slots[request]
        if rows.start == rows.stop:
            continue
        if request >= step.num_decodes and not step.has_initial_state[request]:
            conv_states[slot], states[slot] = 0, 0
        inputs = torch.cat([conv_states[slot].to(mixed_qkv), mixed_qkv[rows].T], dim=1)
        conv_states[slot] = inputs[:, 1 - weight.shape[1] :]
        mixed = silu(conv1d(inputs[None], weight[:, None], layer.conv1d.bias, groups=len(inputs)))
        query, key, value = layer.rearrange_mixed_qkv(mixed[0].T.contiguous())
        shared = value.shape[2] // key.shape[2]
        got, state = torch_recurrent_gated_delta_rule(
            query.repeat_interleave(shared, 2),
            key.repeat_interleave(shared, 2),
            value,
            (-layer.A_log.float().exp() * softplus(a[rows].float() + layer.dt_bias))[None],
            b[rows].sigmoid()[None],
            initial_state=states[slot][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        out[rows], states[slot] = got[0], state[0]
