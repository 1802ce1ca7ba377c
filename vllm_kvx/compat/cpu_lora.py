"""Requests without an adapter, in a batch with some that have one, on vLLM 0.32's CPU build.

There the operators of LoRA take the adapter's number, -1 for none, as an index: into the weights of
the last slot. If that slot is in use, such requests get the answers of its adapter. 0.33 masks
these rows, and GPUs never had the fault.
"""

from collections.abc import Callable
from typing import Any

from vllm_kvx.compat.wrapping import wrap_once

_EXPANDS = ("bgmv_expand", "bgmv_expand_slice")


def leave_rows_without_adapter() -> None:
    """Makes vLLM's CPU operators add nothing to rows without an adapter, in this process."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for owner in (lora_ops, punica_cpu):
        for name in _EXPANDS:
            wrap_once(owner, name, _masked)


def _masked(expand: Callable[..., None]) -> Callable[..., None]:
    def masked(inputs: Any, weights: Any, output: Any, numbers: Any, *args: Any, **kw: Any) -> None:
        has_none = (numbers < 0).unsqueeze(-1)
        expand(inputs.masked_fill(has_none, 0), weights, output, numbers, *args, **kw)

    return masked
