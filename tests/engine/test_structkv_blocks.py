"""StructKV that keeps whole blocks, against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from reference.structkv import Struct

from .conftest import EDGES, Answer, Engine, prompts_of, running
from .test_structkv_parity import FAST, FULL, Policy, assert_parity, named

BLOCK = 32  # What these engines take on CPU.


def blocks(pivot: int = 3, struct_rate: float = 0.2, kv_rate: float = 0.1) -> Struct:
    return Struct(pivot, struct_rate, kv_rate, block_size=BLOCK)


def name_of(policy: Policy) -> str:
    whole = isinstance(policy, Struct) and policy.block_size
    return named(policy) + (",granularity=block" if whole else "")


def ask(
    engine: Engine, prompts: list[list[int]], policies: Sequence[Policy], **kw: int
) -> list[Answer]:
    return engine.generate(prompts, policies=[name_of(policy) for policy in policies], **kw)


@pytest.mark.usefixtures("dense_ops")
def test_pivots_and_rates(tiny: Callable[..., Path]) -> None:
    """First, middle and last pivots, rates in any relation, mixed with other policies."""
    rates = [(0.2, 0.1), (0.05, 1.0), (1.0, 0.05), (0.1, 0.5), (0.5, 0.5), (0.9, 0.4)]
    policies: list[Policy] = [
        blocks(*each) for each in ((p, *r) for p, r in product((0, 3, 7), rates))
    ]
    policies += [Struct(3), FAST, FULL, blocks(), FULL, blocks(0)]
    prompts = prompts_of([60 + 37 * i % 230 for i in range(len(policies))])
    config = {"kv_layout": sorted({name_of(p) for p in policies}), "kv_debug": True}
    model = tiny()
    with running(model, name_of(blocks()), config=config, max_num_seqs=16) as engine:
        # Long enough that blocks are appended to the re-linked ones.
        answers = ask(engine, prompts, policies, max_tokens=24)
        engine.assert_idle()
    assert_parity(model, answers, policies)


@pytest.mark.usefixtures("dense_ops")
def test_lengths_around_edges(tiny: Callable[..., Path]) -> None:
    """Lengths around blocks, chunks and windows; nothing is moved, and blocks come back."""
    model = tiny()
    lengths = sorted({*EDGES, *range(24, 76, 5), 128, 129, 167, 168, 169, 300, 643})
    prompts = prompts_of(lengths)
    policies = [blocks()] * len(prompts)
    with running(model, name_of(blocks()), config={"kv_debug": True}) as engine:
        answers = ask(engine, prompts, policies, max_tokens=20)
        stats = engine.stats()
        assert {group["block_size"] for group in stats["layout"]["groups"]} == {BLOCK}
        engine.assert_idle()
    assert stats["kv_bytes_moved"] == 0
    assert next(iter(stats["policies"].values()))["blocks_freed"] > 0
    assert_parity(model, answers, policies)
