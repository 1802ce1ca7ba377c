"""vLLM's Triton attention over whole contexts in 8 bits or 16, as its backend calls it.

What a server with `--kv-cache-dtype int8_per_token_head` runs, in prefill and in decode.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.retrieval_layer import DEVICE, Call
from vllm_kvx.ops.paged import PagedKV

# Parts of a context that get a program each in decode, and up to how many requests of 8 KV heads
# have such parts: what the backend sets.
_PARTS, _WITH_PARTS = 16, 16


def unified(
    query: Tensor,
    of: PagedKV,
    table: Tensor,
    starts: Tensor,
    lens: Tensor,
    longest: tuple[int, int],
    out: Tensor,
) -> Call:
    """What attends to all entries of each request; causal.

    query, out: (n, H, D), requests one after the other, from `starts` (R + 1,) int32. table:
    (R, blocks) int32. lens: (R,) int32 entries. longest: the most queries and entries of a request.
    """
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    scales: dict[str, Any] = {}
    if of.key_scales is not None and of.value_scales is not None:
        scales = {
            "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD,
            "k_scale_cache": of.key_scales.transpose(1, 2),
            "v_scale_cache": of.value_scales.transpose(1, 2),
        }
    parts = _WITH_PARTS, query.shape[1], _PARTS

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=DEVICE)

    return partial(
        unified_attention,
        q=query,
        k=of.keys.transpose(1, 2),
        v=of.values.transpose(1, 2),
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=longest[0],
        seqused_k=lens,
        max_seqlen_k=longest[1],
        softmax_scale=query.shape[2] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=_WITH_PARTS,
        num_par_softmax_segments=_PARTS,
        softmax_segm_output=floats(*parts, query.shape[2]),
        softmax_segm_max=floats(*parts),
        softmax_segm_expsum=floats(*parts),
        **scales,
    )
