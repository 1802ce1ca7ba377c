"""Sleep of level 2 discards what was allocated as the model loaded; answers and counters stay."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from world import inside
from world.engine import running
from world.prompts import prompt_of

POLICIES = ("criticalkv", "fier-64:dense_below=0", "fastkv:tsp_layer=3", "full")


@pytest.mark.usefixtures("dense_ops")
def test_level_2(tiny: Callable[..., Path]) -> None:
    room = {"kv_layout": list(POLICIES[1:])}
    with running(tiny(), POLICIES[0], config=room) as engine:
        prompts = [prompt_of(150, seed) for seed in range(len(POLICIES))]
        before = engine.generate(prompts, policies=POLICIES)
        worker = inside.worker(engine)
        counters = worker.kv_policy_stats()
        by_policy = counters["policies"]
        assert list(by_policy) == list(POLICIES)
        moving = ("criticalkv", "fastkv:tsp_layer=3")
        for name, totals in by_policy.items():
            for counter in ("kv_bytes_moved", "seconds_in_retention"):
                assert (totals[counter] > 0) == (name in moving), "what a policy caused is its own"
        for counter in ("kv_bytes_moved", "seconds_in_retention"):
            parts = sum(totals[counter] for totals in by_policy.values())
            assert parts == pytest.approx(counters[counter]) and parts > 0

        worker.sleep(level=2)
        assert inside.discard_memory(engine) > 10
        assert worker.kv_policy_stats() == counters, "a scrape may come while it sleeps"
        worker.wake_up(tags=["weights"])
        worker.reload_weights()
        worker.wake_up(tags=["kv_cache"])
        assert not inside.tickets(engine).any()
        assert worker.kv_policy_stats() == counters
        for old, new in zip(before, engine.generate(prompts, policies=POLICIES), strict=True):
            assert new.tokens == old.tokens
            torch.testing.assert_close(new.logprobs, old.logprobs)


@pytest.mark.usefixtures("dense_ops")
def test_other_weights(tiny: Callable[..., Path]) -> None:
    """What is computed from weights follows them."""
    prompt = prompt_of(150, 0)
    other = tiny(seed=1)
    with running(other, "criticalkv") as engine:
        (expected,) = engine.generate([prompt])
    with running(tiny(), "criticalkv") as engine:
        (old,) = engine.generate([prompt])
        inside.worker(engine).reload_weights(weights_path=str(other))
        (new,) = engine.generate([prompt])
        torch.testing.assert_close(new.logprobs, expected.logprobs)
        assert new.tokens == expected.tokens
        assert not torch.allclose(old.logprobs, expected.logprobs)
