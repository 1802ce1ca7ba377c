"""From which length on one request's step that retrieves is faster than with stock attention."""

# More entries than any request has; lengths on the device are int32, and so is this.
NEVER = 1 << 30

# Entries of one request from which on a layer takes less time than stock FlashAttention, by the
# backend that scores and selects, and by (KV heads of the rank, bytes of a key and a value of one
# head). For 16-bit caches of 128 channels those are 512 bytes. Budgets of up to 2,048 tokens;
# larger ones: ``Retrieve.floor``. Measured on an H200 for 64 and 128 channels
# (benchmarks/results/ops/h200-retrieval-crossover.json), but for (8, 512): with a whole engine
# around it that shape gains from 16,384 on, where the layer alone gains from 12,288
# (h200-fier.json). The Triton ops' lengths are those from which on a layer gains more than
# `costs.IN_ENGINE_US` (h200-retrieval-crossover-triton.json); no engine has measured them for one
# request. `python -m benchmarks.ops.retrieval --crossover` measures again. On a CPU retrieval gains
# nothing, and every length may try it.
CROSSOVERS: dict[str, dict[tuple[int, int], int]] = {
    "cuda": {
        (2, 256): 65_536,
        (4, 256): 49_152,
        (8, 256): 24_576,
        (2, 512): 49_152,
        (4, 512): 32_768,
        (8, 512): 16_384,
    },
    "triton": {
        (2, 256): 262_144,
        (4, 256): 262_144,
        (8, 256): 131_072,
        (2, 512): 131_072,
        (4, 512): 98_304,
        (8, 512): 65_536,
    },
    "torch": {},
}


def crossover(
    backend: str, reduction: str, kv_heads: int, head_bytes: int, *, keeps_state: bool = False
) -> int:
    """Entries from which on one request's step is faster; NEVER if at no length, 0 for all.

    A shape that was not measured is taken for the nearest one with fewer KV heads or bytes, where
    stock attention reads less. Where none has fewer, stock attention is taken to read as many more
    entries in the same time as they are smaller, and retrieval to take the same, since its time is
    mostly latency.

    Args:
        backend: that scores and selects, one of ``backends.BACKENDS``.
        reduction: see ``equations.retrieval``.
        kv_heads: of this rank. head_bytes: of a key and a value of one head in the cache.
        keeps_state: whether other layers of the model keep a state. One request of such a model
            was slower at 130,000 entries: `costs.BESIDE_STATES_US`.
    """
    measured = CROSSOVERS[backend]
    if not measured:
        return 0
    if keeps_state:
        return NEVER
    # Softmax in Triton takes two passes over the units. By kernels of before they alone took longer
    # than stock attention at every length (h200-retrieval-ops.json); today's were not measured.
    if backend == "triton" and reduction == "softmax":
        return NEVER
    no_larger = [
        entries for (h, b), entries in measured.items() if h <= kv_heads and b <= head_bytes
    ]
    if no_larger:
        return min(no_larger)
    (heads, size), entries = min(measured.items(), key=lambda row: row[0][0] * row[0][1])
    return min(entries * max(heads * size // (kv_heads * head_bytes), 1), NEVER)
