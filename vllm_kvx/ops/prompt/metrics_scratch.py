"""The scratch of StructKV's metrics: how much of a layer is measured at a time."""

from collections.abc import Iterator

from vllm.triton_utils import tl, triton

from vllm_kvx.ops.prompt.window_tiles import Turn, turns

# Probabilities held at a time. Rows of one tile are never parted, so a request of more than 2 ** 20
# keys needs more if its window has 64 rows, up to 256 bytes a key.
SCRATCH_BYTES = 1 << 28
# Rows of the scratch begin and end at multiples of it, for wide loads and stores.
ALIGNMENT: tl.constexpr = tl.constexpr(16)


def row_length(max_num_keys: int) -> int:
    """Floats of a row of the scratch."""
    return triton.cdiv(max_num_keys, ALIGNMENT.value) * ALIGNMENT.value


def parts(
    turn: Turn, num_requests: int, num_kv_heads: int, group: int, row_length: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Requests, KV heads and their query heads to be handled at a time, for a bounded scratch.

    Whole requests where they fit, else whole KV heads of one, else heads of one KV head, of which
    no fewer than a tile's are handled at a time.

    row_length: floats per row of the scratch.
    """
    fitting = SCRATCH_BYTES // (turn.num_rows * row_length * 4)
    num_together = max(fitting // (num_kv_heads * group), 1)
    kv_heads = max(fitting // group, 1)
    heads = group if fitting >= group else max(fitting // turn.head_tile, 1) * turn.head_tile
    for request in range(0, num_requests, num_together):
        for kv_head in range(0, num_kv_heads, kv_heads):
            last_kv_head = min(kv_head + kv_heads, num_kv_heads)
            for head in range(kv_head * group, (kv_head + 1) * group, heads):
                # More KV heads than one come only with all of their heads.
                last = last_kv_head * group
                last = min(head + heads, last) if heads < group else last
                together = slice(request, request + num_together)
                yield together, slice(kv_head, last_kv_head), slice(head, last)


def scratch_bytes(
    max_window: int, num_requests: int, num_kv_heads: int, group: int, max_num_keys: int
) -> int:
    """The most that `window_metrics` takes for its probabilities, in bytes, at such sizes.

    Many shorter prompts at once take no more than the bound that a part is cut to, or than one part
    of the longest.
    """
    most = 0
    for turn in turns(max_window, num_kv_heads, group):
        row = turn.num_rows * row_length(max_num_keys) * 4
        whole = row * num_kv_heads * group
        if num_requests * whole <= SCRATCH_BYTES:
            most = max(most, num_requests * whole)
            continue
        # Shorter prompts fill the bound better than the longest.
        most = max(most, SCRATCH_BYTES, row * min(turn.head_tile, group))
    return most
