"""What a policy could gain at best: FLOPs, bytes, KV entries.

The model is a decoder with grouped-query attention and gated MLPs, dense or experts. Counted are
matrix products and the bytes of weights and KV cache; norms, activations and biases are left out,
far below a percent at the shapes measured here. A policy enters through `Work` alone, which is
counted from what its methods answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from vllm_kvx.policy.axes import Retrieve
from vllm_kvx.policy.cache_dtype import INT8, SLIDING_WINDOW, split_skipped
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import reads_part, skipped_of, storage_of
from vllm_kvx.tools.ideal.devices import Device
from vllm_kvx.tools.ideal.shape import Shape

T = TypeVar("T")
# Bytes of a cached value: in all layers, or in each.
Bytes = float | tuple[float, ...]
# Entries of a KV block where whole blocks stay: vLLM's default.
BLOCK_SIZE = 16
# Bytes of a cached value by vLLM's `--kv-cache-dtype`; `INT8` has scales besides. Others that
# quantise by token and head are left out, and so have no ideal.
KV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What one prompt of N tokens costs; every field is a tuple over the L layers.

    rows: prompt rows that the layer computes in prefill. Of the last layer that sees the whole
        prompt they are those that go on: the others need keys and values there.
    pairs: query-key pairs of these rows under causal attention.
    stored: prompt entries that the layer's KV cache holds after prefill.
    read: prompt entries that one decode step reads, in units of a full K and V entry.
    projected: prompt entries that the layer projects without running their rows; () is none.
    sidecar: the part of `read` that is an index of 16-bit numbers and bits, whatever the cache's
        dtype; () is none.
    """

    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    stored: tuple[int, ...]
    read: tuple[float, ...]
    projected: tuple[int, ...] = ()
    sidecar: tuple[float, ...] = ()


def full_work(layers: int, length: int) -> Work:
    """Stock vLLM: N rows in each layer, all stored and read."""
    rows = (length,) * layers
    return Work(rows, tuple(_pairs(n) for n in rows), rows, rows)


def work_of(policy: str | None, layers: int, length: int) -> Work | None:
    """The work of a policy by name; None is stock.

    Counted from what the policy's methods answer, so a new method needs nothing here. None where
    the name does not say which layer selects: that is left to measurement, or to the pass.
    """
    parsed = parse_policy(policy or "full")
    try:
        selection = parsed.selection(length, layers)
        by_layer = [
            storage_of(parsed, length, layer, BLOCK_SIZE, layers) for layer in range(layers)
        ]
    except PolicyError:
        return None
    if selection is not None and selection.online is not None:
        return None
    count = _by_position if selection is None else _by_choice
    of_layers = [count(parsed, layer, layers, length) for layer in range(layers)]
    rows, pairs, projected = zip(*of_layers, strict=True)
    stored = tuple(storage.kept for storage in by_layer)
    read = tuple(_read(parsed.retrieve, layer, entries) for layer, entries in enumerate(stored))
    sidecar = tuple(_scanned(parsed.retrieve, layer, n) for layer, n in enumerate(stored))
    made = projected if any(projected) else ()
    return Work(rows, pairs, stored, read, made, sidecar if any(sidecar) else ())


def work_in(shape: Shape, policy: str | None, length: int) -> Work | None:
    """The work of a policy on a model of this shape, whose layers may slide; None as `work_of`.

    Where one propagates, its layers are all layers of the model, and those that slide among them.
    """
    if shape.window and parse_policy(policy or "full").propagate is not None:
        work = work_of(policy, shape.layers, length)
        return None if work is None else _sliding(work, shape)
    work = work_of(policy, shape.full_layers, length)
    return None if work is None else with_windows(work, shape, length)


def with_windows(work: Work, shape: Shape, length: int) -> Work:
    """`work` in the layers with full attention, and that of the layers that slide behind it.

    They run every row, see the last `window` tokens of each, and hold and read as many.
    """
    count = shape.layers - shape.full_layers
    if not count:
        return work
    seen = min(length, shape.window)
    pairs = _pairs(seen) + (length - seen) * seen
    return Work(
        work.rows + (length,) * count,
        work.pairs + (pairs,) * count,
        work.stored + (seen,) * count,
        work.read + (seen,) * count,
        work.projected + (0,) * count if work.projected else (),
        work.sidecar + (0,) * count if work.sidecar else (),
    )


def _sliding(work: Work, shape: Shape) -> Work:
    """`work` of all layers, of which those that slide see, hold and read a window at most."""

    def of(values: Sequence[T], capped: Callable[[int, T], T]) -> tuple[T, ...]:
        # The last of so many layers has full attention.
        slides = ((layer + 1) % shape.full_every for layer in range(shape.layers))
        return tuple(
            capped(layer, each) if is_one else each
            for layer, (each, is_one) in enumerate(zip(values, slides, strict=True))
        )

    def pairs(layer: int, all_of_them: int) -> int:
        rows = work.rows[layer]
        seen = min(rows, shape.window)
        return min(all_of_them, _pairs(seen) + (rows - seen) * seen)

    return replace(
        work,
        pairs=of(work.pairs, pairs),
        stored=of(work.stored, lambda _, each: min(each, shape.window)),
        read=of(work.read, lambda _, each: min(each, shape.window)),
    )


def _by_position(policy: KVPolicy, layer: int, layers: int, length: int) -> tuple[int, int, int]:
    """Rows, pairs and projected entries of a layer, where positions decide which rows go on."""
    gap, first = skipped_of(policy, length, layer), policy.projects_from
    if first is not None:
        # Every row runs up to there, since its state after that makes the entries above.
        entries = length if layer >= first else 0
        return length - gap.size, entries or _pairs(length), entries
    above = skipped_of(policy, length, layer + 1) if layer + 1 < layers else gap
    rows = length - above.size
    if above == gap:
        return rows, _pairs(rows), 0
    # Rows in the gap stop here, and the others see their entries.
    unseen = _pairs(above.start + above.size) - _pairs(above.start)
    return rows, _pairs(length) - unseen, above.size


def _by_choice(policy: KVPolicy, layer: int, layers: int, length: int) -> tuple[int, int, int]:
    """The same where one layer's scores decide, which its projected entries are enough for."""
    selection = policy.selection(length, layers)
    assert selection is not None
    chosen, restarts = selection.count, selection.resumes_at == 0
    again = (chosen, _pairs(chosen)) if restarts or layer > selection.after else (0, 0)
    if layer < selection.after:
        return length + again[0], _pairs(length) + again[1], 0
    if layer > selection.after or restarts:
        return *again, length if layer == selection.after else 0
    # Chosen rows are all over the prompt, and see what is before them.
    return chosen, chosen * (length + 1) // 2, length - chosen


def _pairs(rows: int) -> int:
    """Query-key pairs of n rows under causal attention."""
    return rows * (rows + 1) // 2


def _read(method: Retrieve | None, layer: int, entries: int) -> float:
    """What a decode step reads of a layer's `entries`: those of the budget, and the sidecar."""
    if method is None or not reads_part(method, layer, entries):
        return entries
    return min(entries, method.budget) + _scanned(method, layer, entries)


def _scanned(method: Retrieve | None, layer: int, entries: int) -> float:
    """The sidecar's share of `_read`."""
    if method is None or not reads_part(method, layer, entries):
        return 0
    if not method.retrieving.chooses(layer):
        return 0
    index = method.index
    # In units of a 16-bit key and value: two float16 a channel and group, and one bit a token.
    codes = 1 / 32 if index.name == "one_bit" else 0
    return entries * (1 / index.group + codes)


def attention_flops(shape: Shape, work: Work, kv_bytes: Bytes = 2) -> float:
    """FLOPs of 16-bit products that attention takes of `prefill_flops`.

    sum over layers of 4 H d pairs; H query heads of size d (q k^T and p v, 2 FLOPs each). Over an
    fp8 cache both products count half: on Hopper FlashAttention 3 multiplies in fp8 then, at twice
    the peak.
    """
    each = zip(work.pairs, _by_layer(kv_bytes, work), strict=True)
    pairs = sum(pairs / 2 if size == 1 else pairs for pairs, size in each)
    return 4.0 * shape.heads * shape.head_dim * pairs


def prefill_flops(shape: Shape, work: Work, kv_bytes: Bytes = 2) -> float:
    """FLOPs of 16-bit products from prompt to first token.

    sum over layers of 2 W rows, and attention, plus 2 h V once; W elements of a layer's matrices
    that a token uses, h hidden size, V vocabulary. A projected entry costs 2 h 2 G d, with G KV
    heads of size d.
    """
    linear = 2 * sum(shape.weights_of(layer) * rows for layer, rows in enumerate(work.rows))
    attention = attention_flops(shape, work, kv_bytes)
    entry = 4 * shape.hidden * shape.kv_heads * shape.head_dim
    projected = entry * sum(work.projected)
    return float(linear + attention + projected + 2 * shape.head_weights)


def decode_bytes(
    shape: Shape,
    work: Work,
    batch: int = 1,
    generated: float = 0,
    weight_bytes: float = 2,
    kv_bytes: Bytes = 2,
) -> float:
    """Bytes that one decode step of `batch` requests has to read.

    (L W + h V) weight_bytes + batch * sum over layers of (read + generated) * 2 G d kv_bytes, with
    G KV heads; `generated` tokens are in the cache of every layer with full attention. A sidecar
    keeps its 16 bits. Of experts those are read that some token of the batch chooses.
    """
    weights = shape.all_read(batch)
    entries, sizes = 0.0, _by_layer(kv_bytes, work)
    for layer, (read, size) in enumerate(zip(work.read, sizes, strict=True)):
        entries += (read + (generated if layer < shape.full_layers else 0)) * size
    entries += sum(map(lambda held, size: held * (2 - size), work.sidecar, sizes))
    return weights * weight_bytes + batch * entries * 2 * shape.kv_heads * shape.head_dim


def entry_bytes(
    dtype: str | None, weight_bytes: float = 2, head_dim: int | None = None
) -> float | None:
    """Bytes of a cached value; None or `auto`: the model's dtype. None where it is not known.

    head_dim: values that share a scale, where the dtype has one for each token and head.
    """
    if dtype == INT8:
        return None if head_dim is None else 1 + _SCALE_BYTES / head_dim
    return weight_bytes if dtype in (None, "auto") else KV_BYTES.get(dtype)


def entry_bytes_of(
    name: str | None, num_layers: int, weight_bytes: float = 2, head_dim: int | None = None
) -> Bytes | None:
    """The same in each layer, where some may skip the cache: `fp8-skip-0-1`.

    None also where it is the layers that slide over a window which skip it.
    """
    dtype, skipped = split_skipped(name or "auto")
    most = entry_bytes(dtype, weight_bytes, head_dim)
    if most is None or not skipped:
        return most
    if SLIDING_WINDOW in skipped:
        return None
    skip = set(map(int, skipped))
    return tuple(weight_bytes if layer in skip else most for layer in range(num_layers))


def mean_bytes(kv_bytes: Bytes) -> float:
    """Of all layers, for those that hold as many entries."""
    return sum(kv_bytes) / len(kv_bytes) if isinstance(kv_bytes, tuple) else kv_bytes


def mean_entry_bytes(
    name: str | None, num_layers: int, head_dim: int | None = None
) -> float | None:
    """The mean of `entry_bytes_of`, beside 16-bit weights."""
    found = entry_bytes_of(name, num_layers, head_dim=head_dim)
    return None if found is None else mean_bytes(found)


def _by_layer(kv_bytes: Bytes, work: Work) -> tuple[float, ...]:
    return kv_bytes if isinstance(kv_bytes, tuple) else (kv_bytes,) * len(work.rows)


def prefill_ratio(
    shape: Shape,
    policy: str | None,
    length: int,
    kv_bytes: Bytes = 2,
    stock_kv_bytes: Bytes | None = None,
) -> float | None:
    """FLOPs of stock over FLOPs of the policy: the ideal speed-up of time to first token.

    Stock's cache has the same dtype, unless `stock_kv_bytes` says otherwise.
    """
    work = work_in(shape, policy, length)
    if work is None:
        return None
    stock = with_windows(full_work(shape.full_layers, length), shape, length)
    of_stock = prefill_flops(shape, stock, stock_kv_bytes or kv_bytes)
    return of_stock / prefill_flops(shape, work, kv_bytes)


def decode_ratio(
    shape: Shape,
    policy: str | None,
    length: int,
    batch: int = 1,
    stock_batch: int | None = None,
    stock_kv_bytes: Bytes | None = None,
    kv_bytes: Bytes = 2,
    **options: float,
) -> float | None:
    """The ideal gain in decode tokens per second: (B / bytes) of the policy over that of stock.

    With the same batch it is the ratio of step times. `options` go to `decode_bytes`; stock's
    cache has the same dtype, unless `stock_kv_bytes` says otherwise.
    """
    work = work_in(shape, policy, length)
    if work is None:
        return None
    stock_batch = stock_batch or batch
    whole = with_windows(full_work(shape.full_layers, length), shape, length)
    stock = decode_bytes(shape, whole, stock_batch, kv_bytes=stock_kv_bytes or kv_bytes, **options)
    ours = decode_bytes(shape, work, batch, kv_bytes=kv_bytes, **options)
    return (batch / ours) / (stock_batch / stock)


def pool_ratio(shape: Shape, policy: str | None, length: int = 1 << 20) -> float | None:
    """Prompt tokens that a KV pool holds, over stock: N L / (entries stored in all L layers).

    Windows hold the same for every prompt that is long, and are left out.
    """
    work = work_of(policy, shape.full_layers, length)
    return None if work is None else length * shape.full_layers / sum(work.stored)


def least_time(
    shape: Shape,
    work: Work,
    output: int,
    device: Device,
    pool: float,
    most: int,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
) -> float:
    """Seconds that a request takes at the least of a device that always has requests to run.

    They are its prefill FLOPs over the peak, and one B-th of what every decode step of B requests
    reads, over the bandwidth, times the `output`. B is what the pool holds, at most `most`.

    pool: entries of all layers that it holds, of `kv_bytes` a value. output: tokens.
    """
    batch = batch_of(shape, work, output, pool, most)
    own = decode_bytes(shape, work, 1, output / 2, weight_bytes, kv_bytes)
    cache = own - weight_bytes * shape.all_read(1)
    prefill = prefill_flops(shape, work, kv_bytes) / device.flops
    # Of experts, more are read by a larger batch.
    step = weight_bytes * shape.all_read(batch) / batch + cache
    return prefill + output * step / device.bandwidth


def batch_of(shape: Shape, work: Work, output: int, pool: float, most: int) -> float:
    """Requests that run at a time: what a pool of so many entries holds, 1 to `most`."""
    return max(1.0, min(most, pool / (sum(work.stored) + output * shape.layers)))
