"""Prefix sharing compiled, under CUDA graphs, and with 8-bit caches. Skipped without a GPU."""

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.fastkv import Keep
from reference.structkv import Struct
from support import inside
from support.engine import Answer, Engine, running
from support.expected import FULL, Policy, Speed, named
from support.gpu import COMPILED, EXACT, NEAR_TIE
from support.models import LOOKUP
from support.parity import ATOL, ask, assert_parity, largest_difference, room_for
from support.prompts import lookups, prompt_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCK = EXACT["block_size"]
SERVERS: dict[str, list[Policy]] = {
    "tokens": [
        Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.2),
        Struct(3, struct_rate=0.5, kv_rate=0.3),
        Keep(kv_rate=0.3),
        Keep(sinks=4, recent=60),
        FULL,
    ],
    "blocks": [Struct(3, struct_rate=0.5, kv_rate=0.3, block_size=BLOCK), FULL],
    "speed": [Speed(4), FULL],
}
_SALTS = count()


def salts(prompts: Sequence[list[int]]) -> list[str]:
    """Under which nothing is shared."""
    return [str(next(_SALTS)) for _ in prompts]


def differing(some: Sequence[Answer], others: Sequence[Answer]) -> int:
    """Answers whose tokens or logprobs differ. A choice between near-ties falls either way."""
    return sum(
        a.tokens != b.tokens or not torch.allclose(a.logprobs, b.logprobs, atol=ATOL)
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("server", SERVERS)
def test_hits_answer_as_cold_runs(tiny: Callable[..., Path], server: str) -> None:
    """Hits that end everywhere, three turns, and all policies at once; decode replays graphs."""
    model, policies = tiny(head_dim=64, hidden=128), SERVERS[server]
    hits: list[Answer] = []
    alone: list[Answer] = []
    asked: list[Policy] = []

    with running(
        model,
        named(policies[0]),
        config=room_for(policies),
        enable_prefix_caching=True,
        max_num_seqs=32,
        kv_cache_memory_bytes=256 << 20,
        **EXACT,
    ) as engine:
        counts = inside.count_graph_replays(engine)

        def compare(prompts: Sequence[list[int]], under: Sequence[Policy], least: int) -> None:
            """Adds answers with and without sharing; `least` tokens of each are hit."""
            answers = ask(engine, prompts, under, max_tokens=12)
            assert min(answer.cached for answer in answers) >= least
            hits.extend(answers)
            alone.extend(ask(engine, prompts, under, max_tokens=12, cache_salt=salts(prompts)))
            asked.extend(under)
            engine.assert_idle()

        grain = inside.state_tokens(engine) if server != "speed" else BLOCK
        for seed, policy in enumerate(policies):
            text = prompt_of(6 * grain + 77, seed)
            ask(engine, [text], [policy])
            ends = [3 * grain - 1, 3 * grain + 9, 5 * grain + BLOCK + 8, len(text)]
            prompts = [text[:end] for end in ends] + [[*text[:end], 5, 4, 3] for end in ends]
            compare(prompts, [policy] * len(prompts), least=2 * grain)
            prompt = text
            for turn in range(3):
                compare([prompt], [policy], least=(5 if turn else 0) * grain)
                prompt = [*prompt, *hits[-1].tokens, *prompt_of(20 + turn, seed + 90)]
        # All race for one prefix, which nobody has computed.
        text = prompt_of(4 * grain + 50, 77)
        everybody = [*policies, *policies]
        compare([text[: len(text) - 3 * i] for i in range(len(everybody))], everybody, least=0)
        compare([text] * len(everybody), everybody, least=3 * grain)
    near = assert_parity(model, [*hits, *alone], asked * 2, most=4, near_tie=NEAR_TIE)
    print(json.dumps({"server": server, "hits": len(hits), "near ties": near, **counts}))
    assert differing(hits, alone) <= 2
    assert counts["full"] > 0


EAGER = COMPILED | {"enforce_eager": True, "attention_config": {"backend": "TRITON_ATTN"}}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "options"),
    [("fp8_e4m3", COMPILED), ("fp8_e4m3", EAGER)],
    ids=["e4m3", "e4m3-triton"],
)
def test_what_states_leave_in_8_bit_blocks_is_harmless(
    kv_cache_dtype: str, options: dict[str, Any]
) -> None:
    """Bytes of states are NaN as 8-bit entries, and the last block of a request ends with such.

    First every free byte is a NaN of both formats, or an infinity of one; then states are kept, in
    a pool so small that their blocks soon hold entries.
    """
    prompts, expected, decode = lookups(40)
    policies = [
        "fastkv:kv_floor=0,tsp_layer=4",
        "structkv:pivot=4,kv_floor=0,granularity=block",
        "snapkv:kv_floor=0",
        "full",
    ]
    names = [policies[i % len(policies)] for i in range(len(prompts))]
    with running(
        LOOKUP,
        policies[0],
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=32,
        config={"kv_layout": policies},
        enable_prefix_caching=True,
        num_gpu_blocks_override=2400,
        **(options | {"max_num_batched_tokens": 2048}),
    ) as engine:

        def filled_with(byte: int) -> list[Answer]:
            assert engine.llm.reset_prefix_cache()
            inside.fill_free_blocks(engine, byte)
            return engine.generate(prompts, max_tokens=6, policies=names)

        zeros, again = filled_with(0x00), filled_with(0x00)
        noise = largest_difference(zeros, again)
        filled = {
            hex(byte): largest_difference(zeros, filled_with(byte)) for byte in (0x7F, 0xFF, 0x7C)
        }
        # Twice in a row each, so that the second one is a hit, while others push blocks out.
        turns = [
            ask_twice(engine, prompt, name) for prompt, name in zip(prompts, names, strict=True)
        ]
        states = engine.stats()["policies"][policies[0]]["prefix_states"]
        engine.assert_idle()
    firsts, seconds = [a for a, _ in turns], [b for _, b in turns]
    right = {
        name: [
            sum(
                decode(a.tokens[:2]) == e
                for a, e, n in zip(run, expected, names, strict=True)
                if n == name
            )
            for run in (zeros, firsts, seconds)
        ]
        for name in policies
    }
    report = {"noise": noise, "filled": filled, "right": right, "states": states}
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype, **report}))
    assert all(torch.isfinite(a.logprobs).all() for a in [*zeros, *firsts, *seconds])
    assert noise < 0.05, "two equal runs differ, so nothing can be seen here"
    assert max(filled.values()) <= max(2 * noise, 1e-3), filled
    assert states > 0 and all(answer.cached > 0 for answer in seconds)
    # A hit may round otherwise.
    assert all(max(found) - min(found) <= 2 for found in right.values()), right
    assert (
        min(
            min(right[name])
            for name in ("fastkv:kv_floor=0,tsp_layer=4", "snapkv:kv_floor=0", "full")
        )
        >= 8
    ), right


def ask_twice(engine: Engine, prompt: list[int], policy: str) -> tuple[Answer, Answer]:
    """A prompt's answer before and after it is cached."""
    (first,) = engine.generate([prompt], max_tokens=6, policies=[policy], cache_salt=policy)
    (second,) = engine.generate([prompt], max_tokens=6, policies=[policy], cache_salt=policy)
    return first, second
