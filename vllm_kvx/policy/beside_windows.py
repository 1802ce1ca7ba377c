"""Which policies run on a server that propagates where some layers slide over a window."""

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.windows import Windows


def beside_windows(policy: KVPolicy, windows: Windows, num_layers: int) -> str | None:
    """Why `policy` cannot run above or below layers that slide, on a server that propagates.

    None if it can.
    """
    propagate, retain = policy.propagate, policy.retain
    if propagate is not None and not propagate.slides:
        return (
            "some layers of this model slide over a window, in which positions follow one another: "
            "of the policies that propagate speed-K, fastkv, structkv and gemfilter can run, not "
            f"{propagate}; those that only retain or retrieve can (snapkv, fier and others)"
        )
    if policy.retrieve is not None:
        return (
            "some layers of this model slide over a window, where policies that propagate run "
            "beside nothing that retrieves: leave retrieval out, or give it a server without "
            "speed-K, fastkv, structkv and gemfilter"
        )
    by_position = propagate is not None and propagate.selects_by is None
    if retain is not None and by_position:
        return (
            "some layers of this model slide over a window, where speed-K runs beside nothing that "
            "retains: name it alone, or retain on a server without speed-K"
        )
    if retain is not None and set(retain.stages(num_layers)) - _cuts(policy, num_layers):
        return (
            f"some layers of this model slide over a window, and {retain} divides layers where "
            "policies that propagate count those that slide, too: give it a server without them"
        )
    if retain is not None and retain.unit == "block":
        return (
            "which blocks stay was never compared with a reference where layers slide over a "
            "window, as some of this model do: use granularity=token"
        )
    if propagate is None or by_position:
        return None
    if propagate.online_rule(num_layers) is not None:
        return (
            "pivot=online looks at the attention of every layer, and some layers of this model "
            "slide over a window: use pivot=calibrated or pivot=<int>"
        )
    return _selects_above(policy, windows, num_layers)


def _cuts(policy: KVPolicy, num_layers: int) -> set[int]:
    """The first layers that some rows do not run; also one above the last layer."""
    return set() if policy.propagate is None else set(policy.propagate.row_cuts(num_layers))


def _selects_above(policy: KVPolicy, windows: Windows, num_layers: int) -> str | None:
    """Why the layer that selects tokens cannot; None if it can: keys of all tokens are there."""
    full = [layer for layer in range(num_layers) if layer not in windows.layers]
    for cut in _cuts(policy, num_layers):
        layer = cut - 1
        # After the last layer nothing is left to select for.
        if layer not in windows.layers or cut == num_layers:
            continue
        assert policy.propagate is not None
        name = policy.propagate.selects_at
        below = [f"{name}={each}" for each in full if each < layer][-1:]
        above = [f"{name}={each}" for each in full if each > layer][:1]
        return (
            f"layer {layer} slides over a window, and tokens are selected by the keys of a layer "
            f"with full attention: use {' or '.join(below + above)}"
        )
    return None
