"""Prompts that one engine prefills and another goes on with, by vLLM's NIXL connector.

Without its package (`pip install nixl`) these tests are skipped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from support.engine import BLOCK, keep_in_process, running
from support.expected import FULL, Policy, Read, named
from support.parity import ask, assert_close, assert_parity, room_for
from support.prefiller import PATIENT, prefilling, wait_for_freed, watch_computed
from support.prompts import prompts_of
from vllm.exceptions import VLLMValidationError

from benchmarks.common.nixl import PORT
from benchmarks.common.server import free_port

pytest.importorskip("nixl", reason="needs nixl, which hands KV blocks over")

TOKENS = 34
FIER = Read(Retrieve(64, dense_below=0))
KEPT = Keep(kv_rate=0.25)
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
            kv_transfer_config=PATIENT,
            enable_prefix_caching=True,
            **options,
        ) as engine,
    ):
        computed = watch_computed(engine)
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
        wait_for_freed(prefiller)


@pytest.mark.parametrize(
    ("first", "room", "policy", "block_size"),
    [
        (None, [FIER], FIER, 2 * BLOCK),
        (None, [KEPT], FULL, BLOCK),
        # Both have four KV groups of two layers, which are not the same ones.
        (
            [KEPT, Keep(tsp_layer=1, tsp_rate=0.5)],
            [KEPT, Keep(tsp_layer=5, tsp_rate=0.5)],
            KEPT,
            BLOCK,
        ),
    ],
    ids=["blocks-of-another-length", "one-retains", "groups-of-other-layers"],
)
def test_servers_that_do_not_meet(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    first: list[Policy] | None,
    room: list[Policy],
    policy: Policy,
    block_size: int,
) -> None:
    """Nothing is fetched, and vLLM does what it is told to do then: here it computes the prompt."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model, options = tiny(), {"max_model_len": 512, "max_num_batched_tokens": 128}
    of_first = {} if first is None else {"config": room_for(first)}
    with (
        prefilling(model, first and "full", **of_first, **options) as prefiller,
        running(
            model,
            "full",
            config=room_for(room),
            kv_transfer_config=PATIENT | {"kv_load_failure_policy": "recompute"},
            block_size=block_size,
            **options,
        ) as engine,
    ):
        prompts, policies = prompts_of(LENGTHS), [policy] * len(LENGTHS)
        asked = None if first is None else named(policy)
        transfers = prefiller.prefill(prompts, [asked] * len(prompts))
        if policy == FULL:
            with pytest.raises(VLLMValidationError, match="handed over a whole prompt"):
                ask(engine, prompts[:1], room, transfers=transfers[:1])
        computed = watch_computed(engine)
        answers = ask(engine, prompts, policies, max_tokens=9, transfers=transfers)
        assert max(computed) > len(prompts)
        engine.assert_idle()
    assert_parity(model, answers, policies)
