"""The model as its own drafter, against the dense references.

What it drafts is what it would answer if it read as the drafter does, and what it answers is what
it answers without drafts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.fier import FULL as ALL
from reference.fier import Retrieve, load, prefill
from support import inside, options
from support.configs import own_drafts
from support.drafts import Drafted, watch_own_drafts
from support.engine import Answer, Engine, keep_in_process, running
from support.expected import FULL, Policy, Read, named
from support.nightly import nightly
from support.parity import (
    ask,
    assert_close,
    assert_logprobs,
    assert_parity,
    assert_parity_preempted,
    in_turn,
    room_for,
)
from support.prompts import prompts_of
from vllm.exceptions import VLLMValidationError

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker.warm_up import warm_up

DRAFTER, COUNT = Retrieve(32), 4
POLICIES: list[Policy] = [FULL, Read(Retrieve(64)), FULL]
# Answers cross the end of a block, which is that of a group of 32, and one prompt ends there. The
# last answer is as long as the longest context.
LENGTHS, TOKENS, MOST = (97, 161, 65, 150, 31, 128, 210), 14, 224


def serve(model: Path, drafter: dict[str, Any], **others: Any) -> Any:
    """An engine that drafts for itself; prompts come in beside requests that run."""
    defaults: dict[str, Any] = dict(
        config=room_for(POLICIES),
        enable_prefix_caching=True,
        max_model_len=MOST,
        max_num_seqs=4,
        speculative_config=drafter,
    )
    return running(model, "full", **(defaults | others))


def assert_drafts(model: Path, found: Sequence[Drafted], retrieve: Retrieve) -> int:
    """Drafts are the reference's greedy tokens, but for near-ties. How many were compared."""
    loaded, compared = load(model), 0
    for each in found:
        store, _ = prefill(loaded, each.tokens[:-1], ALL)
        token = each.tokens[-1]
        for draft in each.drafts:
            row = store.step(loaded, token, retrieve)[-1]
            first, second = row.topk(2).values.tolist()
            certain = all(c.slack > 0 for layer in store.choices[-1] for c in layer)
            if not certain or first - second < 1e-4:
                break
            assert int(row.argmax()) == draft, (each.request, len(each.tokens), each.drafts)
            token, compared = draft, compared + 1
    return compared


def assert_accepted(engine: Engine, names: Sequence[str]) -> None:
    """Of the drafts of each policy some stay and some do not."""
    counted = engine.stats()["policies"]
    for name in names:
        found = counted[str(parse_policy(name))]
        assert 0 < found["tokens_accepted"] < found["tokens_drafted"], (name, found)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        inside.use_dense_ops(monkeypatch)
        with serve(model, own_drafts(COUNT)) as engine:
            inside.poison_free_blocks(engine)
            yield engine


@pytest.fixture(scope="module")
def each() -> list[Policy]:
    return in_turn(POLICIES, len(LENGTHS))


@pytest.fixture(scope="module")
def drafted(engine: Engine, each: list[Policy]) -> tuple[list[Answer], list[Drafted]]:
    """Answers in chunks and in a mixed batch, and what was drafted for them."""
    found = watch_own_drafts(engine)
    answers = ask(engine, prompts_of(LENGTHS, seed=7), each, max_tokens=TOKENS)
    engine.assert_idle()
    return answers, found[:]


def test_answers_are_those_without_drafts(
    engine: Engine, model: Path, each: list[Policy], drafted: tuple[list[Answer], Any]
) -> None:
    assert_parity(model, drafted[0], each, most=0)
    assert_accepted(engine, [named(policy) for policy in POLICIES])


def test_drafts_are_what_the_policy_would_read(
    model: Path, each: list[Policy], drafted: tuple[list[Answer], list[Drafted]]
) -> None:
    """Of requests under `full`, whose entries are the reference's."""
    answers, found = drafted
    prompts = [a.prompt for a, policy in zip(answers, each, strict=True) if policy == FULL]
    theirs = [one for one in found if any(one.tokens[: len(p)] == p for p in prompts)]
    assert all(len(one.drafts) == COUNT for one in found)
    # Those behind the longest context are cut, and never verified.
    whole = [one for one in theirs if len(one.tokens) + COUNT <= MOST]
    assert assert_drafts(model, whole, DRAFTER) > COUNT * len(whole) // 2


def test_by_cuda_graphs(
    engine: Engine, each: list[Policy], drafted: tuple[list[Answer], list[Drafted]]
) -> None:
    """The same answers and drafts, of rows that are padded; groups are filled within a graph, too.

    Four rows run without one. Attention is planned before a graph, or within.
    """
    answers, found = drafted[0][:4], watch_own_drafts(engine)
    prompts = [answer.prompt for answer in answers]

    def draft() -> list[tuple[list[int], list[int]]]:
        assert_close(ask(engine, prompts, each[:4], max_tokens=TOKENS), answers)
        assert_close(ask(engine, prompts[:1], each[:1], max_tokens=TOKENS), answers[:1])
        made = [(one.tokens, one.drafts) for one in found]
        found.clear()
        return made

    by_python = draft()
    for plans in (True, False) if options.nightly() else (True,):
        with inside.replaying_drafts(engine, (1, 3), plans) as counts:
            assert draft() == by_python
        assert counts[1] and counts[3], counts
    engine.assert_idle()


def test_over_cached_prefixes(
    engine: Engine, model: Path, each: list[Policy], drafted: tuple[list[Answer], Any]
) -> None:
    longer = [[*answer.prompt, 7, 8, 9] for answer in drafted[0][:4]]
    again = ask(engine, longer, each[:4], max_tokens=6)
    assert any(answer.cached for answer in again)
    assert_parity(model, again, each[:4], most=0)


def test_ends_within_drafts(engine: Engine, drafted: tuple[list[Answer], Any]) -> None:
    """Requests that are thrown out, aborted, or stop at a token amid the drafts."""
    answers = drafted[0][:4]
    names = [named(policy) for policy in in_turn(POLICIES, 4)]
    prompts = [answer.prompt for answer in answers]
    ids = engine.submit(prompts, TOKENS, names)
    engine.step(5)
    engine.throw_out()
    engine.finish()
    assert [engine.answered[i] for i in ids] == [answer.tokens for answer in answers]
    ids = engine.submit(prompts, TOKENS, names)
    engine.step(4)
    engine.abort(ids[:2])
    assert [engine.answered[i] for i in ids[2:]] == [answer.tokens for answer in answers[2:]]
    for length in range(1, 8):
        stop = answers[0].tokens[length - 1]
        first = answers[0].tokens.index(stop) + 1
        (found,) = engine.generate(prompts[:1], TOKENS, policies=names[:1], stop_token_ids=[stop])
        assert found.tokens == answers[0].tokens[:first]
    engine.assert_idle()


def test_a_session_goes_on_as_without_drafts(engine: Engine) -> None:
    """What comes in later follows all of an answer but its last token.

    Drafts read all of so short a text, so that answers end amid those that stay.
    """
    text = list[int]()
    for part, length in zip(
        prompts_of((40, 9, 7, 5, 3, 8), seed=5), (14, 13, 12, 11, 9, 8), strict=True
    ):
        text += part
        (alone,) = engine.generate([text], length, policies=["full"])
        found = engine.go_on("session", part, length)
        assert found == alone.tokens
        text += found[:-1]
    engine.end("session")
    engine.assert_idle()


def test_sampled_tokens_are_the_models(engine: Engine, model: Path) -> None:
    """A draft that is rejected gives way to a token of the same distribution."""
    sampling = {"temperature": 1.0, "seed": 3}
    samples = engine.generate(prompts_of((97, 65)), 12, policies=["full"] * 2, **sampling)
    assert_logprobs(model, samples, FULL)


@pytest.mark.parametrize(
    "policy", ["snapkv:kv_rate=0.1", "speed-4", "streamingllm:recent=1020+fier-64"]
)
def test_requests_that_leave_entries_out_are_refused(engine: Engine, policy: str) -> None:
    with pytest.raises(VLLMValidationError, match="leaves some out: use full, fier or quest"):
        engine.generate(prompts_of((40,)), 2, policies=[policy])


def test_logprobs_that_verified_steps_leave_out_are_refused(engine: Engine) -> None:
    with pytest.raises(VLLMValidationError, match="logprob_token_ids: this server drafts tokens"):
        engine.generate(prompts_of((40,)), 2, logprobs=1, logprob_token_ids=[3])


def test_off_where_it_would_lose(engine: Engine, drafted: tuple[list[Answer], Any]) -> None:
    """Steps whose requests hold too little are not drafted for, and answers stay the same."""
    found = watch_own_drafts(engine)
    answers = [drafted[0][0], drafted[0][2]]
    prompts = [answer.prompt for answer in answers]
    # Of two requests at once, of 97 and 65 tokens and their answers.
    inside.draft_from(engine, 150)
    try:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_close(engine.generate([prompt], TOKENS, policies=["full"]), [answer])
        assert not found
        names = ["full"] * 2
        assert_close(engine.generate(prompts, TOKENS, policies=names), answers)
    finally:
        inside.draft_from(engine, 0)
    assert len({one.request for one in found}) == 2


@nightly
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("pages", [False, True])
def test_other_numbers_and_pages(
    model: Path, dense_ops: None, each: list[Policy], count: int, pages: bool
) -> None:
    size = 16 if pages else 32
    policies = [FULL, Read(Retrieve(64, group=size, pages=pages))]
    drafter = own_drafts(count, f"quest-32:page={size}" if pages else "fier-32")
    each = in_turn(policies, len(LENGTHS))
    with serve(model, drafter, config=room_for(policies)) as engine:
        inside.poison_free_blocks(engine)
        found = watch_own_drafts(engine)
        answers = ask(engine, prompts_of(LENGTHS, seed=9), each, max_tokens=TOKENS)
        assert_parity(model, answers, each, most=0)
        prompts = [answer.prompt for answer in answers[::2]]
        theirs = [
            one
            for one in found
            if any(one.tokens[: len(p)] == p for p in prompts) and len(one.tokens) + count <= MOST
        ]
        assert assert_drafts(model, theirs, Retrieve(32, group=size, pages=pages)) > len(theirs) / 2
        engine.assert_idle()


@nightly
def test_a_number_for_each_size_of_batch(
    model: Path, dense_ops: None, each: list[Policy], drafted: tuple[list[Answer], Any]
) -> None:
    sizes = {"num_speculative_tokens_per_batch_size": [(1, 1, 4), (2, 2, 2), (3, 4, 0)]}
    with serve(model, own_drafts(COUNT, **sizes)) as engine:
        found = watch_own_drafts(engine)
        answers = ask(engine, prompts_of(LENGTHS, seed=7), each, max_tokens=TOKENS)
        assert_close(answers, drafted[0])
        assert found
        engine.assert_idle()


@nightly
def test_a_pool_that_is_too_small(model: Path, dense_ops: None) -> None:
    small = dict(num_gpu_blocks_override=34, max_model_len=288, max_num_seqs=6)
    drafter = own_drafts(3)
    assert_parity_preempted(model, POLICIES, speculative_config=drafter, **small)


@nightly
def test_it_drafts_while_the_server_warms_up(
    model: Path, dense_ops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: in vLLM's steps and ours, whatever they hold, and by the rule from then on."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    stock, found = CPUWorker.compile_or_warm_up_model, list[str]()

    @wraps(stock)
    def as_on_a_gpu(worker: Any) -> Any:
        times, runner = stock(worker), worker.model_runner
        drafter = runner.speculator
        propose = drafter.propose

        def watched(*args: Any, **options: Any) -> Any:
            drafts = propose(*args, **options)
            found.extend(drafter.drafted)
            return drafts

        drafter.propose = watched
        step = worker.execute_model, worker.sample_tokens
        warmup_kernels(runner, *step)
        ran = warm_up(runner, *step, runner.model_state.settings)
        assert [str(policy) for policy in ran] == ["full"]
        return times

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", as_on_a_gpu)
    never = own_drafts(COUNT, cache_to_weights=1e6)
    with serve(model, never, config={}) as engine:
        assert any(name.startswith("_kvx_warm_up") for name in found)
        assert not all(name.startswith("_kvx_warm_up") for name in found)
        before = len(found)
        engine.generate(prompts_of((97,)), 8)
        assert len(found) == before
        engine.assert_idle()


@nightly
def test_two_ranks(model: Path, each: list[Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with serve(model, own_drafts(COUNT), tensor_parallel_size=2) as engine:
        answers = ask(engine, prompts_of(LENGTHS, seed=7), each, max_tokens=TOKENS)
        assert_accepted(engine, [named(policy) for policy in POLICIES])
        engine.assert_idle()
    assert_parity(model, answers, each, most=0)
    assert all(torch.isfinite(answer.logprobs).all() for answer in answers)
