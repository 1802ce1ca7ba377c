"""What kernels do to attention's logits as `equations.softmax` does: soft caps, and sinks.

Kernels take the cap and the sinks as None where a model has none, which Triton compiles without.
"""

from vllm.triton_utils import tl, triton

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def factors(scale: float, soft_cap: float | None, base: float = 1.0) -> tuple[float, float | None]:
    """What products are multiplied with, and what `capped` takes for the cap.

    scale: of products. base: factor of the logits that come out: log2(e) for a softmax in powers
        of two. Without a cap the first number makes logits of products.
    """
    if soft_cap is None:
        return scale * base, None
    return 2 * LOG2_E.value * scale / soft_cap, soft_cap * base


@triton.jit
def capped(exponent, soft_cap):
    """``soft_cap * tanh(x)`` of ``exponent = 2 * x * log2(e)``; it saturates and never is NaN."""
    return soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(exponent))


@triton.jit
def add_sinks(maximum, total, sinks, head, exists):
    """A softmax's running maximum and sum, in powers of two, with each head's sink added."""
    sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32) * LOG2_E
    larger = tl.maximum(maximum, sink)
    return larger, total * tl.exp2(maximum - larger) + tl.exp2(sink - larger)
