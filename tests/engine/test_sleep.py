"""Sleep of level 2 discards what was allocated as the model loaded; answers and counters stay.

So they do where weights are loaded anew and where the prefix cache is emptied.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import inside
from support.engine import running
from support.nightly import by_day
from support.prompts import prompt_of

from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import parse_policy

# By server, the policies of its requests, the server's own first: every method is in one of them.
SERVERS = {
    "fier": (
        "criticalkv:kv_floor=0",
        *("fier-64:dense_below=0", "fastkv:kv_floor=0,tsp_layer=3", "structkv:pivot=3,kv_floor=0"),
        *(
            "snapkv:kv_floor=0",
            "streamingllm:recent=60",
            "pyramidkv:kv_floor=0,groups=4",
            "knorm:kv_floor=0",
            "gemfilter:layer=3,kv_floor=0",
        ),
        *("selfonly-3", "swiftkv-3", "speed-4+fier-64:dense_below=0", "full"),
    ),
    "quest": (
        "quest-64:dense_below=0",
        *(
            "structkv:pivot=3,kv_floor=0,granularity=block",
            "structkv:pivot=online,kv_floor=0,min_layer=2,max_layer=6",
        ),
        *("speed-4", "snapkv:kv_floor=0+quest-64:dense_below=0", "full"),
    ),
}


def test_every_method_sleeps() -> None:
    parts = [
        part for names in SERVERS.values() for name in names for part in parse_policy(name).parts
    ]
    assert {part.name for part in parts} == set(METHODS)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("server", by_day(list(SERVERS), {0}))
def test_level_2(tiny: Callable[..., Path], server: str) -> None:
    policies = SERVERS[server]
    room = {"kv_layout": list(policies[1:])}
    with running(tiny(), policies[0], config=room, enable_prefix_caching=True) as engine:
        prompts = [prompt_of(150, seed) for seed in range(len(policies))]
        before = engine.generate(prompts, policies=policies)
        worker = inside.worker(engine)
        counters = worker.kv_policy_stats()
        by_policy = counters["policies"]
        parsed = [parse_policy(name) for name in policies]
        assert list(by_policy) == list(dict.fromkeys(map(str, parsed)))
        for policy in parsed:
            retain, totals = policy.retain, by_policy[str(policy)]
            moves = retain is not None and retain.unit == "entry"
            assert (totals["kv_bytes_moved"] > 0) == moves, f"{policy}: what it caused is its own"
            if retain is not None:
                assert totals["seconds_in_retention"] > 0
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
        # What vLLM does as it sleeps: the cache that it discards holds no prefix any more.
        assert engine.llm.reset_prefix_cache()
        after = engine.generate(prompts, policies=policies)
        for name, old, new in zip(policies, before, after, strict=True):
            assert new.tokens == old.tokens, name
            torch.testing.assert_close(
                new.logprobs, old.logprobs, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert new.cached == 0
        if server == "quest":  # Its layers are split where SPEED cuts, so it shares prefixes.
            hits = engine.generate(prompts, policies=policies)
            assert any(answer.cached for answer in hits)
            assert engine.llm.reset_prefix_cache()
            again = engine.generate(prompts, policies=policies)
            for name, old, new in zip(policies, after, again, strict=True):
                assert new.tokens == old.tokens and new.cached == 0, name
        engine.assert_idle()


@pytest.mark.usefixtures("dense_ops")
def test_other_weights(tiny: Callable[..., Path]) -> None:
    """What is computed from weights follows them."""
    prompt = prompt_of(150, 0)
    other = tiny(seed=1)
    with running(other, "criticalkv:kv_floor=0") as engine:
        (expected,) = engine.generate([prompt])
    with running(tiny(), "criticalkv:kv_floor=0") as engine:
        (old,) = engine.generate([prompt])
        inside.worker(engine).reload_weights(weights_path=str(other))
        (new,) = engine.generate([prompt])
        torch.testing.assert_close(new.logprobs, expected.logprobs)
        assert new.tokens == expected.tokens
        assert not torch.allclose(old.logprobs, expected.logprobs)
