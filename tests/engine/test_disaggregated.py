"""Prompts that one engine prefills and another goes on with, by vLLM's NIXL connector.

Without its package (`pip install nixl`) these tests are skipped.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.fier import Retrieve
from support.engine import BLOCK, keep_in_process, running
from support.expected import FULL, Read
from support.parity import ask, assert_close, assert_parity, room_for
from support.prefiller import Prefiller, prefilling
from support.prompts import prompts_of

from benchmarks.common.nixl import NIXL, PORT
from benchmarks.common.server import free_port

pytest.importorskip("nixl", reason="needs nixl, which hands KV blocks over")

TOKENS = 34
FIER = Read(Retrieve(64, dense_below=0))
QUEST = Read(Retrieve(64, group=32, pages=True, dense_below=0))
# Of one token, below, at and above the end of a block.
LENGTHS = (200, 1, 63, 64, 65, 300)


@pytest.mark.parametrize(
    ("prefill", "decode", "policies"),
    [
        # Whose pages have a sidecar on one side alone: the first server is one without policies.
        (None, [FULL, FIER], [FULL, FIER]),
        ([FULL, QUEST], [FULL, FIER], [FIER, FULL]),
    ],
    ids=["from-stock", "from-another-policy"],
)
def test_what_one_prefills_another_goes_on_with(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    prefill: list[Any] | None,
    decode: list[Any],
    policies: list[Any],
) -> None:
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model, options = tiny(), {"max_model_len": 512, "max_num_batched_tokens": 128}
    first = {} if prefill is None else {"config": room_for(prefill)}
    prompts = [prompts_of(LENGTHS, seed=seed) for seed in range(len(policies))]
    with (
        prefilling(model, prefill and "full", **first, **options) as prefiller,
        running(
            model,
            "full",
            config=room_for(decode),
            kv_transfer_config=NIXL,
            enable_prefix_caching=True,
            **options,
        ) as engine,
    ):
        computed = _watch_computed(engine)
        for these, policy in zip(prompts, policies, strict=True):
            # Blocks are free that hold other prompts' entries.
            ask(engine, prompts_of(LENGTHS, seed=99), [FULL] * len(LENGTHS), max_tokens=1)
            computed.clear()
            transfers = prefiller.prefill(these, [None if prefill is None else "full"] * len(these))
            loaded = ask(
                engine, these, [policy] * len(these), max_tokens=TOKENS, transfers=transfers
            )
            # The last token's state is computed here.
            assert max(computed[:1]) <= len(LENGTHS)
            assert_parity(model, loaded, [policy] * len(these))
            again = ask(engine, these, [policy] * len(these), max_tokens=TOKENS)
            assert_close(again, loaded)
            engine.assert_idle()
        _wait_for_freed(prefiller)


def test_blocks_of_another_length(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is fetched, and vLLM does what it is told to do then: here it computes the prompt."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model, options = tiny(), {"max_model_len": 512, "max_num_batched_tokens": 128}
    with (
        prefilling(model, None, **options) as prefiller,
        running(
            model,
            "full",
            config=room_for([FIER]),
            kv_transfer_config=NIXL | {"kv_load_failure_policy": "recompute"},
            block_size=2 * BLOCK,
            **options,
        ) as engine,
    ):
        prompts, policies = prompts_of(LENGTHS), [FIER] * len(LENGTHS)
        transfers = prefiller.prefill(prompts, [None] * len(prompts))
        answers = ask(engine, prompts, policies, max_tokens=TOKENS, transfers=transfers)
        engine.assert_idle()
    assert_parity(model, answers, policies)


def _watch_computed(engine: Any) -> list[int]:
    """Grows by the number of tokens of every step that has any."""
    counts: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            counts.append(output.total_num_scheduled_tokens)
        return output

    engine.scheduler.schedule = watched
    return counts


def _wait_for_freed(prefiller: Prefiller) -> None:
    """Blocks are held until the other engine says that it has them."""
    for _ in range(100):
        if prefiller.free() == prefiller.blocks:
            return
        time.sleep(0.05)
    raise AssertionError(f"{prefiller.free()} of {prefiller.blocks} blocks are free")
