"""The paged cache itself, right after a prompt is in: which entries each layer and head kept."""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference import fastkv
from reference.fastkv import Keep
from support.engine import running
from support.expected import SALIENCY_TIE, named
from support.inside import entries_of
from support.prompts import prompts_of
from torch import Tensor

# Float32 rounding of two implementations; far below the distance of two keys.
CLOSE = 5e-5


@pytest.mark.parametrize(
    "keep",
    [
        Keep(kv_rate=0.2, window=4, kernel=5),
        Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.2),
        Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.5),
        Keep(sinks=5, recent=37),
    ],
    ids=named,
)
def test_cache_holds_the_reference_s_entries(tiny: Callable[..., Path], keep: Keep) -> None:
    model = tiny()
    prompt, other = prompts_of((200, 130), seed=2)
    context, _ = fastkv.prefill(fastkv.load(model), prompt, keep)
    assert context.slack > SALIENCY_TIE, "a near-tie shows nothing; choose another seed"
    with running(model, named(keep)) as engine:
        # Another prompt in the same steps, so that blocks are not in order.
        engine.submit([other, prompt], 3, ["full", None])
        by_length = {r.num_prompt_tokens: r for r in engine.scheduler.requests.values()}
        request = by_length[len(prompt)]
        while request.num_computed_tokens < len(prompt):
            engine.step()
        for layer, (keys, values) in enumerate(context.stored):
            count = keys.shape[1]
            stored_keys, stored_values = entries_of(engine, request.request_id, layer, count)
            for head, positions in enumerate(context.retained[layer]):
                where = f"layer {layer}, KV head {head}"
                distances = (stored_keys[head][:, None] - keys[head]).abs().amax(dim=2)
                error, match = distances.min(dim=1)
                assert error.max() < CLOSE, where
                assert closest(keys[head]) > 100 * CLOSE, where
                found = [positions[i] for i in match.tolist()]
                assert sorted(found) == positions, where
                assert (stored_values[head] - values[head, match]).abs().max() < CLOSE, where
        engine.finish()
        engine.assert_idle()


def closest(keys: Tensor) -> float:
    """The least distance of two of the keys (n, D), by their largest difference in a channel."""
    distances = (keys[:, None] - keys).abs().amax(dim=2)
    return float(distances.fill_diagonal_(float("inf")).min())
