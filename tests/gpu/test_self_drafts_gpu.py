"""The model as its own drafter, compiled, verified under CUDA graphs. Skipped without a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.fier import Retrieve
from support.configs import own_drafts
from support.drafts import Drafted, watch_own_drafts
from support.engine import running
from support.expected import FULL, Policy, Read, named
from support.gpu import COMPILED, EXACT
from support.inside import count_draft_replays, count_graph_replays, drafting_without_graphs
from support.parity import ask, assert_parity, in_turn, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNT = 4
TOKENS = 200
POLICIES: list[Policy] = [FULL, Read(Retrieve(64, dense_below=0)), FULL]
LENGTHS = (97, 161, 65, 150, 193, 90, 31, 128, 300, 500, 33, 250, 64, 200)
OPTIONS = EXACT | {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
}


def test_answers_are_those_without_drafts(tiny: Callable[..., Path]) -> None:
    """In a batch, and over cached prefixes; alone, `full` verifies under FULL graphs."""
    model = tiny(head_dim=64, hidden=256)
    prompts, each = prompts_of(LENGTHS, seed=7), in_turn(POLICIES, len(LENGTHS))
    with running(
        model,
        "full",
        config=room_for(POLICIES),
        speculative_config=own_drafts(COUNT, "fier-64"),
        **OPTIONS,
    ) as engine:
        found, replays = watch_own_drafts(engine), count_draft_replays(engine)
        answers = ask(engine, prompts, each, max_tokens=40)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], each, max_tokens=8)
        counts = count_graph_replays(engine)
        alone = ask(engine, prompts[:1], each[:1], max_tokens=40)
        print("steps and replays of full:", counts)
        print("passes that draft, by their graph's rows:", dict(replays))
        assert replays[1] and replays[16] and not replays[0]
        by_graphs = drafts_of(found)
        with drafting_without_graphs(engine):
            plain = ask(engine, prompts, each, max_tokens=40)
        assert replays[0] == 0
        assert_alike(by_graphs, drafts_of(found))
        counted = engine.stats()["policies"]
        print({name: (c["tokens_accepted"], c["tokens_drafted"]) for name, c in counted.items()})
        assert all(counted[named(FULL)][key] for key in ("tokens_drafted", "tokens_accepted"))
        engine.assert_idle()
    assert by_graphs and any(answer.cached for answer in again)
    theirs = [*answers, *again, *alone, *plain]
    assert_parity(model, theirs, [*each, *each, each[0], *each], most=3)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_drafts_are_those_without_graphs(tiny: Callable[..., Path], kv_cache_dtype: str) -> None:
    """In bf16, by FlashAttention and the CUDA ops; more rows than graphs have run without."""
    model, prompts = tiny(head_dim=128, hidden=512), prompts_of(LENGTHS, seed=8)
    with running(
        model,
        "full",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        speculative_config=own_drafts(COUNT, "fier-64"),
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 20, 40]},
        **(COMPILED | {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 16}),
    ) as engine:
        found, replays = watch_own_drafts(engine), count_draft_replays(engine)
        for count in (1, 3, 6, len(prompts)):
            # Long enough that all of the last ones decode at once.
            engine.generate(
                prompts[:count], 40 if count < len(prompts) else TOKENS, ["full"] * count
            )
        assert all(replays[rows] for rows in (0, 1, 4, 8)), dict(replays)
        by_graphs = drafts_of(found)
        with drafting_without_graphs(engine):
            engine.generate(prompts, TOKENS, ["full"] * len(prompts))
        assert_alike(by_graphs, drafts_of(found), least=0.8)
        engine.assert_idle()


def drafts_of(found: list[Drafted]) -> dict[tuple[int, ...], list[int]]:
    """What was drafted behind which tokens; `found` is empty then."""
    drafts = {tuple(one.tokens): one.drafts for one in found}
    found.clear()
    return drafts


def assert_alike(
    some: dict[tuple[int, ...], list[int]],
    others: dict[tuple[int, ...], list[int]],
    least: float = 0.95,
) -> None:
    """Nearly all drafts behind the same tokens are the same: near-ties may fall either way."""
    both = some.keys() & others.keys()
    same = sum(some[tokens] == others[tokens] for tokens in both)
    print(f"{same} of {len(both)} drafts are the same")
    assert both and same >= least * len(both)
