"""What a layer of a decode step does beside attention, for benchmarks that time attention there.

Between two layers' attention a step streams some hundred MB of weights through L2 and runs other
kernels: what attention reads, its own code among it, may then be in no cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.ops.layer_shapes import LayerShape
from benchmarks.ops.retrieval_layer import DEVICE, DTYPE, Call, Decode


@dataclass(frozen=True)
class RestOfLayer:
    """A layer's weights and the states that they are for, in torch's operators.

    Attributes:
        qkv, out, up, down: (inputs, outputs). states: (B, hidden), which no operator changes.
    """

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    states: Tensor

    @classmethod
    def of(cls, shape: LayerShape, batch: int) -> "RestOfLayer":
        """batch: B, requests of a step."""
        heads, hidden, intermediate = shape.heads, shape.hidden, shape.intermediate

        def weights(inputs: int, outputs: int) -> Tensor:
            return torch.randn(inputs, outputs, dtype=DTYPE, device=DEVICE) * inputs**-0.5

        attended = heads.heads * heads.head_dim
        return cls(
            weights(hidden, attended + 2 * heads.kv_heads * heads.head_dim),
            weights(attended, hidden),
            weights(hidden, 2 * intermediate),
            weights(intermediate, hidden),
            torch.randn(batch, hidden, dtype=DTYPE, device=DEVICE),
        )

    @property
    def weight_bytes(self) -> int:
        """What a step reads of them."""
        return sum(each.nbytes for each in (self.qkv, self.out, self.up, self.down))

    def before(self, step: Decode) -> None:
        """Norm, queries, keys and values, and the cache's entry of each request's last token."""
        shape, dim = step.layer.shape, step.layer.shape.head_dim
        made = _norm(self.states) @ self.qkv
        heads = made.view(step.batch, -1, dim)
        turned = heads * torch.cos(heads)  # of rotary embeddings' size
        keys = turned[:, shape.heads : shape.heads + shape.kv_heads]
        last = step.length - 1
        block = step.table[:, last // shape.block_size].long()
        paged, slot = step.layer.paged, last % shape.block_size
        paged.keys[block, :, slot] = keys
        paged.values[block, :, slot] = turned[:, -shape.kv_heads :]

    def after(self, step: Decode) -> None:
        """Output, norm and MLP."""
        states = self.states + step.out.view(step.batch, -1) @ self.out
        gate, up = (_norm(states) @ self.up).chunk(2, -1)
        states + (functional.silu(gate) * up) @ self.down

    def around(self, step: Decode, attention: Call) -> Call:
        def run() -> None:
            self.before(step)
            attention()
            self.after(step)

        return run


def _norm(states: Tensor) -> Tensor:
    return functional.rms_norm(states, (states.shape[-1],))
