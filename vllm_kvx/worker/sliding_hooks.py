"""The hook around the attention of a layer that slides: chosen tokens of prompts attend there."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_kvx.ops.prompt.sliding_rows import SlidingRows, attend_within


class SlidingHook:
    """Wraps the attention implementation of a layer that slides over a window.

    In a pass over chosen tokens it attends by their positions, and otherwise it is vLLM's.

    window: tokens that it sees at most, itself included.
    """

    def __init__(self, layer: Any) -> None:
        """layer: vLLM's attention layer."""
        stock: Callable[..., Any] = layer.impl.forward
        self.layer, self.window = layer, int(layer.sliding_window)
        name, window = layer.layer_name, self.window

        def forward(
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Any,
            *args: Any,
            **kw: Any,
        ) -> Any:
            if not (args and isinstance(args[0], SlidingRows)):
                return stock(layer, query, key, value, kv_cache, *args, **kw)
            impl, rows, out = layer.impl, args[0], kw["output"]
            query = query.view(query.shape[0], impl.num_heads, impl.head_size)
            if query.dtype.itemsize == 1:  # Quantized for the attention kernel.
                query = query.to(key.dtype) * float(layer._q_scale_float)
            key, value = rows.entries(name, key, value)
            cap = float(getattr(impl, "logits_soft_cap", None) or 0.0) or None
            seen, sinks = rows.within(window), getattr(impl, "sinks", None)
            attend_within(
                query, key, value, seen, out.view(query.shape), float(impl.scale), cap, sinks
            )
            return out

        layer.impl.forward = forward

    @property
    def carried_bytes(self) -> int:
        """What rows of one pass keep for the next, at most."""
        entry = 2 * self.layer.num_kv_heads * self.layer.head_size
        return int(entry * (self.window - 1) * self.layer.dtype.itemsize)

    def check_backend(self) -> None:
        """Raises RuntimeError where the attention backend stores entries only as it attends."""
        backend = self.layer.attn_backend
        if backend.forward_includes_kv_cache_update:
            raise RuntimeError(
                f"tokens that are selected attend by their positions where layers slide, and "
                f"attention backend {backend.get_name()} attends and stores at once: set "
                "--attention-backend to another one"
            )
