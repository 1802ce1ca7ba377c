"""A prompt that one GPU prefills and another goes on with, over NIXL. Skipped without two GPUs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from support.engine import keep_in_process, running
from support.expected import FULL, Policy, Read, Speed, named
from support.gpu import EXACT
from support.parity import ask, assert_parity, in_turn, room_for
from support.prefiller import prefilling
from support.prompts import distinct_prompts, prompts_of

from benchmarks.common.nixl import NIXL, PORT
from benchmarks.common.server import free_port

pytest.importorskip("nixl", reason="needs nixl, which hands KV blocks over")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FIER = Read(Retrieve(64, dense_below=0))
LENGTHS = (200, 1, 63, 64, 65, 300)


@pytest.mark.parametrize("prefill", [None, [FULL, FIER]], ids=["stock", "fier"])
def test_what_one_prefills_another_goes_on_with(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, prefill: list[Policy] | None
) -> None:
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model = tiny(head_dim=64, hidden=256)
    options = EXACT | dict(block_size=32, max_model_len=512, max_num_seqs=8)
    first = {} if prefill is None else {"config": room_for(prefill)}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    policies: list[Policy] = [FULL, FIER]
    with (
        prefilling(model, prefill and "full", gpus[1], **first, **options) as prefiller,
        running(
            model,
            "full",
            config=room_for(policies),
            kv_transfer_config=NIXL,
            enable_prefix_caching=True,
            **options,
        ) as engine,
    ):
        for seed, policy in enumerate(policies):
            # Blocks are free that hold other prompts' entries.
            ask(engine, prompts_of(LENGTHS, seed=99), [FULL] * len(LENGTHS), max_tokens=1)
            prompts = prompts_of(LENGTHS, seed=seed)
            asked = None if prefill is None else named(policy)
            transfers = prefiller.prefill(prompts, [asked] * len(prompts))
            each = [policy] * len(prompts)
            loaded = ask(engine, prompts, each, max_tokens=40, transfers=transfers)
            assert_parity(model, loaded, each)
            engine.assert_idle()


KEPT: list[Policy] = [
    Keep(kv_rate=0.25),
    Critical(kv_rate=0.3),
    Keep(sinks=4, recent=60),
    Read(Retrieve(64, dense_below=0), keep=Keep(kv_rate=0.5)),
]
KEPT_LENGTHS = (200, 65, 128, 300, 1, 97, 400, 64)


# The former by CUDA graphs; of the others layers above keep the entries of chosen tokens.
DRAFTING: list[Policy] = [Lookahead(Keep(kv_rate=0.2), 4), Lookahead(Critical(kv_rate=0.3), 6)]
PROPAGATING: list[Policy] = [
    Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.25),
    Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.5),
    Speed(4),
]


@pytest.mark.parametrize(
    "policies",
    [KEPT, [Pyramid(kv_rate=0.3, groups=4)], DRAFTING, PROPAGATING],
    ids=["one-stage", "pyramid", "drafts", "propagates"],
)
def test_what_one_keeps_another_goes_on_with(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, policies: list[Policy]
) -> None:
    """And as one server answers, beside prompts that are compacted there."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model = tiny(head_dim=64, hidden=256)
    options = EXACT | dict(block_size=32, max_model_len=512, max_num_seqs=16)
    options |= dict(max_num_batched_tokens=128, enable_prefix_caching=True)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    config, each = room_for(policies), in_turn(policies, len(KEPT_LENGTHS))
    prompts, others = distinct_prompts(KEPT_LENGTHS), distinct_prompts(KEPT_LENGTHS, seed=1)
    with (
        prefilling(model, "full", gpus[1], config=config, **options) as prefiller,
        running(model, "full", config=config, kv_transfer_config=NIXL, **options) as engine,
    ):
        transfers = prefiller.prefill(prompts, [named(policy) for policy in each])
        transfers += [{}] * len(others)
        loaded = ask(engine, [*prompts, *others], each * 2, max_tokens=40, transfers=transfers)
        assert_parity(model, loaded, each * 2, least=0.6)
        alone = ask(engine, prompts, each, max_tokens=40)
        assert [a.tokens for a in alone] == [a.tokens for a in loaded[: len(prompts)]]
        engine.assert_idle()
