"""Retention that looks ahead, against the dense float32 reference."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from support import inside
from support.engine import Engine, running, schedule_ahead
from support.expected import FULL, Policy, Read, named
from support.nightly import nightly
from support.parity import (
    ATOL,
    ask,
    assert_close,
    assert_parity,
    assert_parity_and_again,
    assert_parity_preempted,
    in_turn,
    room_for,
)
from support.prompts import EDGES, prompts_of

from vllm_kvx.cache import admission

# One drafts a single token, one crosses blocks, and of one the shortest prompts keep all.
POLICIES: list[Policy] = [
    Lookahead(Keep(kv_rate=0.2), 4),
    Lookahead(Critical(kv_rate=0.2), 6),
    Lookahead(Keep(kv_rate=0.1, window=3, kernel=1), 1),
    Keep(kv_rate=0.2),
    Lookahead(Keep(kv_budget=40), 40),
    # Its lowest layer keeps the whole prompt.
    Lookahead(Pyramid(kv_rate=0.6, groups=8), 5),
    FULL,
]


@pytest.mark.usefixtures("dense_ops")
def test_parity(tiny: Callable[..., Path]) -> None:
    """In chunks and in a batch, at the edges of blocks and chunks; then over cached prefixes."""
    assert_parity_and_again(tiny(), [*EDGES, 5, 9, 150, 180], POLICIES, max_tokens=(24, 9))


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_beside_policies_that_run_in_passes(tiny: Callable[..., Path]) -> None:
    """On a server whose decoder runs in ranges of layers, and whose pages have a sidecar."""
    others: list[Policy] = [
        Lookahead(Keep(kv_rate=0.2), 5),
        Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.5),
        Lookahead(Critical(kv_rate=0.3), 3),
        Read(Retrieve(64)),
    ]
    assert_parity_and_again(tiny(), [180, 150, 129, 170, 90, 140, 160, 97], others)


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_by_cuda_graphs(tiny: Callable[..., Path]) -> None:
    """One, three and more prompts that end in one step, of which some have no graph."""
    model, prompts = tiny(), prompts_of((65, 33, 90, 97, 129, 64, 40, 180))
    config, each = room_for(POLICIES), in_turn(POLICIES, 8)
    with running(model, "full", config=config, max_num_batched_tokens=512) as engine:
        inside.poison_free_blocks(engine)
        with inside.replaying_drafts(engine, (1, 2, 4)) as counts:
            answers = ask(engine, prompts, each, max_tokens=9)
            answers += ask(engine, prompts[2:3], POLICIES[:1], max_tokens=9)
            answers += ask(engine, prompts[3:6], POLICIES[:3], max_tokens=9)
        engine.assert_idle()
    assert all(counts[size] for size in (1, 2, 4)), counts
    assert_parity(model, answers, [*each, POLICIES[0], *POLICIES[:3]])


@pytest.mark.usefixtures("dense_ops")
@nightly
def test_preempted(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that comes in again is drafted again; two of them draft in one step at most."""
    monkeypatch.setattr(admission, "GENERATED_WINDOWS", 2)
    schedule_ahead(monkeypatch, True)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    assert_parity_preempted(tiny(), POLICIES[:4], **options)


# What samplers keep of a request's tokens, and look at.
SAMPLING = dict(temperature=1.0, seed=7, min_tokens=3, presence_penalty=1.5, top_p=0.9)


@pytest.mark.usefixtures("dense_ops")
def test_nothing_else_sees_the_draft(tiny: Callable[..., Path]) -> None:
    prompts = prompts_of([180, 150, 90, 129])
    some, more = (named(policy) for policy in (POLICIES[0], POLICIES[4]))
    with running(tiny(), "full", config=room_for(POLICIES), max_model_len=256) as engine:
        # The first token comes of the whole prompt, as without a policy.
        for sampling in ({}, SAMPLING | {"min_tokens": 1}):
            firsts = [
                engine.generate([prompt], 1, policies=[name], **sampling)[0]
                for prompt in prompts[:2]
                for name in ("full", some, more)
            ]
            for full, *others in zip(*[iter(firsts)] * 3, strict=True):
                assert {tuple(other.tokens) for other in others} == {tuple(full.tokens)}
                assert all((o.logprobs - full.logprobs).abs() < ATOL for o in others)
        # Sampled tokens are those that a request has alone, whoever drafts beside it.
        names = [some, "full", more, some]
        alone = [
            engine.generate([prompt], 12, policies=[name], **SAMPLING)[0]
            for prompt, name in zip(prompts, names, strict=True)
        ]
        beside = engine.generate(prompts, 12, policies=names, **SAMPLING)
        assert [a.tokens for a in beside] == [a.tokens for a in alone]
        # And those of a draft by CUDA graphs, whose rows are padded.
        plain = engine.generate(prompts, 12, policies=names)
        with inside.replaying_drafts(engine, (3,)) as counts:
            assert_close(engine.generate(prompts, 12, policies=names), plain)
        assert counts[3] > 40, counts
        _assert_prompt_logprobs(engine, prompts[1], ["full", more])
        # Requests that end while others draft, one of them before it does.
        ids = engine.submit(prompts, 6, names)
        engine.step(2)
        engine.abort(ids[:1])
        assert sorted(map(len, engine.answered.values())) == [6, 6, 6]
        _assert_room(engine, more)
        engine.assert_idle()


def _assert_prompt_logprobs(engine: Engine, prompt: list[int], names: list[str]) -> None:
    """They are of final states that come before the draft."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    found = []
    for name in names:
        params = SamplingParams(
            max_tokens=3, prompt_logprobs=0, detokenize=False, extra_args={"kv_policy": name}
        )
        (output,) = engine.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False
        )
        rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found.append(torch.tensor([row[token].logprob for row, token in rows]))
    assert (found[0] - found[1]).abs().max() < ATOL


def _assert_room(engine: Engine, name: str) -> None:
    """Forty drafted tokens fit into a context of 256, too."""
    from vllm.exceptions import VLLMValidationError

    long, fits = prompts_of([217, 216])
    with pytest.raises(VLLMValidationError, match="shorten the prompt to 216 tokens, or leave"):
        engine.generate([long], 2, policies=[name])
    (answer,) = engine.generate([fits], 40, policies=[name])
    assert len(answer.tokens) == 40
