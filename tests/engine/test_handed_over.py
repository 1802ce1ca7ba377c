"""What one engine keeps of a prompt, and another goes on with, by vLLM's NIXL connector.

Without its package (`pip install nixl`) these tests are skipped.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.gemfilter import Filter
from reference.knorm import Norm
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from reference.selfonly import Alone
from reference.structkv import Struct
from reference.swiftkv import Swift
from support import inside
from support.engine import BLOCK, Answer, Engine, keep_in_process, running, schedule_ahead
from support.expected import FULL, Online, Policy, Read, Speed, named
from support.models import LOOKUP
from support.parity import ask, assert_close, assert_parity, in_turn, room_for
from support.prefiller import PATIENT, Prefiller, prefilling, wait_for_freed, watch_computed
from support.prompts import distinct_prompts, lookups, prompts_of
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.common.nixl import PORT
from benchmarks.common.server import free_port

pytest.importorskip("nixl", reason="needs nixl, which hands KV blocks over")

LENGTHS = (200, 1, 63, 64, 65, 300)
KEPT: list[Policy] = [
    Keep(kv_rate=0.25),
    Critical(kv_rate=0.3),
    Norm(kv_budget=33),
    Keep(sinks=4, recent=60),
    Keep(kv_rate=0.1, kv_floor=90),
    Read(Retrieve(64, dense_below=0), keep=Keep(kv_rate=0.5)),
]
# Of some all is kept, which is then handed over as under `full`.
KEPT_LENGTHS = (200, 65, 128, 333, 1, 97, 64)


def test_what_one_keeps_another_goes_on_with(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that one server compacts, in chunks, beside others; the other runs none of them."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model = tiny()
    options = {"max_model_len": 512, "max_num_batched_tokens": 128, "enable_prefix_caching": True}
    config, policies = room_for(KEPT), in_turn(KEPT, len(KEPT_LENGTHS))
    names = [named(policy) for policy in policies]
    # No token comes twice in one: in layer 0 a token's keys have one norm.
    prompts = distinct_prompts(KEPT_LENGTHS)
    with (
        prefilling(model, "full", config=config, **options) as prefiller,
        running(
            model,
            "full",
            config=config,
            kv_transfer_config=PATIENT | {"kv_load_failure_policy": "recompute"},
            **options,
        ) as engine,
    ):
        computed = watch_computed(engine)
        ask(engine, prompts_of(KEPT_LENGTHS, seed=99), [FULL] * len(prompts), max_tokens=1)
        computed.clear()
        transfers = prefiller.prefill(prompts, names)
        held = [len(transfer["remote_block_ids"][0]) for transfer in transfers]
        assert sum(held) < sum(len(prompt) // BLOCK for prompt in prompts)
        loaded = ask(engine, prompts, policies, max_tokens=9, transfers=transfers)
        assert max(computed) <= len(prompts)  # Not one chunk of a prompt.
        assert_parity(model, loaded, policies)
        alone = ask(engine, prompts, policies, max_tokens=9)
        assert_close(alone, loaded)
        engine.assert_idle()
        some = slice(3)
        these = Handed(prompts[some], policies[some], names[some], loaded[some])
        _end_with_the_first_token(engine, prefiller, these)
        _sample(engine, prefiller, these)
        _preempt(engine, prefiller, these)
        _fail_to_load_and_abort(engine, prefiller, these)
        engine.assert_idle()
        wait_for_freed(prefiller)


def test_layers_that_keep_different_shares(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyramidKV's: every KV group hands over blocks of its own number."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model, policy = tiny(), Pyramid(kv_rate=0.3, groups=4)
    options = {"max_model_len": 512, "max_num_batched_tokens": 128}
    prompts, policies = prompts_of(LENGTHS), [policy] * len(LENGTHS)
    with (
        prefilling(model, named(policy), **options) as prefiller,
        running(model, named(policy), kv_transfer_config=PATIENT, **options) as engine,
    ):
        computed = watch_computed(engine)
        transfers = prefiller.prefill(prompts, [None] * len(prompts))
        held = [[len(group) for group in each["remote_block_ids"]] for each in transfers]
        assert len(held[-1]) == 4 and held[-1] == sorted(held[-1], reverse=True)
        assert held[-1][0] > held[-1][-1]
        loaded = ask(engine, prompts, policies, max_tokens=9, transfers=transfers)
        assert max(computed) <= len(prompts)
        assert_parity(model, loaded, policies)
        engine.assert_idle()
        wait_for_freed(prefiller)


# Of these some keep all of a short prompt, behind which nothing is drafted.
DRAFTING: list[Policy] = [
    Lookahead(Keep(kv_rate=0.2), 4),
    Lookahead(Pyramid(kv_rate=0.3, groups=4), 9),
    Lookahead(Critical(kv_rate=0.3), 6),
]
# The first two end in one step; drafts cross the ends of blocks.
DRAFTING_LENGTHS = (60, 62, 200, 129, 300, 94, 5, 333, 97)


@pytest.mark.usefixtures("dense_ops")
def test_what_drafts_have_chosen(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server drafts behind prompts and throws the drafts away, the other goes on."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model, policies = tiny(), in_turn(DRAFTING, len(DRAFTING_LENGTHS))
    options = {"max_model_len": 512, "max_num_batched_tokens": 128, "enable_prefix_caching": True}
    options |= {"max_num_seqs": 16, "config": room_for(DRAFTING)}
    names, prompts = [named(policy) for policy in policies], prompts_of(DRAFTING_LENGTHS)
    patches = partial(schedule_ahead, is_async=True), inside.use_dense_ops
    with (
        prefilling(model, "full", patches=patches, **options) as prefiller,
        running(model, "full", kv_transfer_config=PATIENT, **options) as engine,
    ):
        # From then on the other server has these prompts in its prefix cache, too.
        alone = ask(engine, prompts, policies, max_tokens=9)
        computed = watch_computed(engine)
        interrupted = prefiller.prefill_interrupted(prompts, names)
        assert interrupted[0] is None
        for first, transfers in enumerate((prefiller.prefill(prompts, names), interrupted[1:])):
            some = slice(first, None)
            loaded = ask(engine, prompts[some], policies[some], max_tokens=9, transfers=transfers)
            assert max(computed) <= len(prompts)  # Not one chunk of a prompt.
            assert_close(loaded, alone[some])
        assert_parity(model, alone, policies)
        _preempt(engine, prefiller, Handed(prompts, policies, names, alone))
        engine.assert_idle()
        wait_for_freed(prefiller)


PROPAGATING: list[Policy] = [
    Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.25),
    # Layers above keep fewer entries than those below.
    Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.5),
    Keep(tsp_layer=3, tsp_rate=0.4),
    Struct(3, kv_rate=0.3),
    Struct(3, kv_rate=0.3, block_size=BLOCK),
    Online(2, 4, Struct(0, kv_rate=0.2)),
    Filter(3, rate=0.3),
    Speed(4, anchors=3, tail=4),
    Alone(4),
    # Its layers above have the entries of all tokens.
    Swift(4),
    Keep(cutoff=4, kv_rate=0.3),
    Read(Retrieve(64, dense_below=0), keep=Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.5)),
    FULL,
]
PROPAGATING_LENGTHS = (200, 300, 129, 180, 333, 97, 64, 65, 150, 90, 260, 128, 66, 40, 5, 1)


@pytest.mark.usefixtures("dense_ops")
def test_what_propagates_and_what_is_kept(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers above keep the entries of chosen tokens, in KV groups of their own."""
    keep_in_process(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    model, policies = tiny(), in_turn(PROPAGATING, len(PROPAGATING_LENGTHS))
    options = {"max_model_len": 512, "max_num_batched_tokens": 128, "enable_prefix_caching": True}
    options |= {"max_num_seqs": 16, "config": room_for(PROPAGATING)}
    names, prompts = [named(policy) for policy in policies], prompts_of(PROPAGATING_LENGTHS)
    patches = partial(schedule_ahead, is_async=True), inside.use_dense_ops
    with (
        prefilling(model, "full", patches=patches, **options) as prefiller,
        running(
            model,
            "full",
            kv_transfer_config=PATIENT | {"kv_load_failure_policy": "recompute"},
            **options,
        ) as engine,
    ):
        alone = ask(engine, prompts, policies, max_tokens=9)
        computed = watch_computed(engine)
        interrupted = prefiller.prefill_interrupted(prompts, names)
        assert interrupted[0] is None
        for first, transfers in enumerate((prefiller.prefill(prompts, names), interrupted[1:])):
            some = slice(first, None)
            loaded = ask(engine, prompts[some], policies[some], max_tokens=9, transfers=transfers)
            assert max(computed) <= len(prompts)  # Not one chunk of a prompt.
            assert_close(loaded, alone[some])
        assert_parity(model, alone, policies)
        these = Handed(prompts, policies, names, alone)
        _preempt(engine, prefiller, these)
        _fail_to_load_and_abort(engine, prefiller, these)
        engine.assert_idle()
        wait_for_freed(prefiller)


class Handed(NamedTuple):
    """Prompts, their policies and these policies' names, and the answers that are right."""

    prompts: list[list[int]]
    policies: list[Policy]
    names: list[str]
    answers: list[Answer]


def _end_with_the_first_token(engine: Engine, prefiller: Prefiller, these: Handed) -> None:
    """Answers of one token, and one that the first token ends: nothing runs."""
    computed = watch_computed(engine)
    transfers = prefiller.prefill(these.prompts, these.names)
    for stops in (False, True):
        name, first = these.names[stops], these.answers[stops].tokens[0]
        sampling: dict[str, Any] = {"stop_token_ids": [first]} if stops else {}
        (found,) = engine.generate(
            [these.prompts[stops]],
            9 if stops else 1,
            [name],
            transfers=[transfers[stops]],
            **sampling,
        )
        assert found.tokens == [first]
        assert torch.equal(found.logprobs, these.answers[stops].logprobs[:1])
    assert not computed
    # What is aborted before it was scheduled is fetched by nobody, and given back.
    engine.abort(engine.submit(these.prompts[2:], 5, these.names[2:], transfers=transfers[2:]))


def _sample(engine: Engine, prefiller: Prefiller, these: Handed) -> None:
    """Tokens that are drawn, the first one on the other server, are those of one server."""
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "seed": 11, "logprobs": 2}
    transfers = prefiller.prefill(these.prompts, these.names, **sampling)
    told = [transfer["kvx"] for transfer in transfers]
    assert {len(each["logprobs"]) for each in told} == {3}
    drawn = engine.generate(these.prompts, 5, these.names, transfers=transfers, **sampling)
    assert_close(drawn, engine.generate(these.prompts, 5, these.names, **sampling))
    assert [answer.tokens for answer in drawn] != [answer.tokens[:5] for answer in these.answers]


def _preempt(engine: Engine, prefiller: Prefiller, these: Handed) -> None:
    """Thrown out, they compute their prompts, and what they have answered after them."""
    transfers = prefiller.prefill(these.prompts, these.names)
    ids = engine.submit(these.prompts, 9, these.names, transfers=transfers)
    while len(engine.scheduler.running) < len(ids):
        engine.step()
    engine.step(2)
    engine.throw_out()
    engine.finish()
    assert [engine.answered[name] for name in ids] == [answer.tokens for answer in these.answers]


def _fail_to_load_and_abort(engine: Engine, prefiller: Prefiller, these: Handed) -> None:
    """Where a server cannot be reached the other one computes the prompts; then two are fetched
    and one of them is given up meanwhile."""
    transfers = prefiller.prefill(these.prompts, these.names)
    gone = {"remote_engine_id": "gone", "remote_port": free_port()}
    failed = engine.generate(
        these.prompts, 9, these.names, transfers=[transfer | gone for transfer in transfers]
    )
    assert [answer.tokens for answer in failed] == [answer.tokens for answer in these.answers]
    ids = engine.submit(these.prompts, 9, these.names, transfers=transfers)
    engine.step()
    engine.abort(ids[:1])
    assert [engine.answered[name] for name in ids[1:]] == [
        answer.tokens for answer in these.answers[1:]
    ]


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"const": 7}}}


def test_grammars_go_on_behind_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structured outputs of the pair are those of one server."""
    keep_in_process(monkeypatch)
    inside.use_dense_ops(monkeypatch)
    monkeypatch.setenv(PORT, str(free_port()))
    prompts, words, read = lookups(3)
    prompts = [prompt[:200] for prompt in prompts]
    keep = Keep(kv_rate=0.2)
    policies: list[Policy] = [keep, Lookahead(keep, 4), Keep(tsp_layer=3, tsp_rate=0.2)]
    names = [named(policy) for policy in policies]
    options: dict[str, Any] = {"skip_tokenizer_init": False, "config": room_for(policies)}
    with (
        prefilling(LOOKUP, "full", patches=[inside.use_dense_ops], **options) as prefiller,
        running(
            LOOKUP,
            "full",
            kv_transfer_config=PATIENT | {"kv_load_failure_policy": "recompute"},
            **options,
        ) as engine,
    ):
        for grammar in (
            {"regex": "[0-9]{4}-[a-z]{9}"},
            {"choice": [" nothing.", *words]},
            {"json": SCHEMA},
        ):
            # A new one each time: vLLM changes some of them where it admits them.
            asked = partial(StructuredOutputsParams, **grammar)
            alone = engine.generate(prompts, 12, names, structured_outputs=asked())
            computed = watch_computed(engine)
            transfers = prefiller.prefill(prompts, names, structured_outputs=asked())
            for gone in ({}, {"remote_engine_id": "gone", "remote_port": free_port()}):
                loaded = engine.generate(
                    prompts,
                    12,
                    names,
                    transfers=[transfer | gone for transfer in transfers],
                    structured_outputs=asked(),
                )
                assert gone or max(computed) <= len(prompts)
                assert_close(loaded, alone)
            with pytest.raises(VLLMValidationError, match="structured_outputs: the server that"):
                engine.generate(prompts[:1], 12, names[:1], transfers=transfers[:1])
        assert {read(answer.tokens)[:1] for answer in alone} == {"{"}
        # Another token than the first server's ends the request, as vLLM does with such tokens.
        (transfer,) = prefiller.prefill(prompts[:1], names[:1], structured_outputs=asked())
        transfer["kvx"] |= {"token": 5, "logprob_ids": [5]}
        (ended,) = engine.generate(
            prompts[:1], 12, names[:1], transfers=[transfer], structured_outputs=asked()
        )
        assert ended.tokens == [5]
        engine.assert_idle()
        wait_for_freed(prefiller)
