"""StructKV at a given pivot against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from reference.fastkv import Keep
from reference.structkv import Struct
from support import inside
from support.engine import running
from support.expected import FULL, Policy, named
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import EDGES, prompts_of

STRUCT = Struct(pivot=3)  # The defaults of `structkv:pivot=3`.
PAPER = replace(STRUCT, kernel=1)  # The paper's form of retention (Eq. 13).
OWN = replace(STRUCT, heads="own")
FORMS = (STRUCT, OWN, PAPER, replace(OWN, kernel=1))
FAST = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)
SNAP = Keep(kv_rate=0.1)
STREAM = Keep(sinks=4, recent=20)


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_pivots_and_rates(tiny: Callable[..., Path]) -> None:
    """The first, a middle and the last pivots with rates in any relation, on one server."""
    model = tiny()
    rates = [(0.2, 0.1), (0.05, 1.0), (1.0, 0.05), (0.1, 0.5), (0.5, 0.5), (0.3, 0.31), (0.9, 0.95)]
    policies = [
        replace(FORMS[(pivot + i) % 4], pivot=pivot, struct_rate=struct_rate, kv_rate=kv_rate)
        for pivot, (i, (struct_rate, kv_rate)) in product((0, 3, 6, 7), enumerate(rates))
    ]
    prompts = prompts_of([60 + 37 * i % 190 for i in range(len(policies))])
    with running(
        model, "structkv:pivot=3,kv_floor=0", config=room_for(policies), max_num_seqs=16
    ) as engine:
        answers = ask(engine, prompts, policies)
        engine.assert_idle()
    assert_parity(model, answers, policies)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("pivot", [0, 7])
def test_one_pivot_alone(tiny: Callable[..., Path], pivot: int) -> None:
    """A server of one policy has no other segments; the last pivot leaves nothing above."""
    model = tiny()
    prompts = prompts_of((9, 40, 97, 130, 200, 333))
    with running(model, f"structkv:pivot={pivot},kv_floor=0") as engine:
        answers = engine.generate(prompts)
        segments = {group["segment"] for group in engine.stats()["layout"]["groups"]}
        engine.assert_idle()
    assert segments == ({0} if pivot == 7 else {0, 1})
    assert_parity(model, answers, [Struct(pivot)] * len(prompts))


@pytest.mark.usefixtures("dense_ops")
def test_rates_of_one(tiny: Callable[..., Path]) -> None:
    """struct_rate = 1 has no use for the pivot, kv_rate = 1 keeps all, both are `full`."""
    model = tiny()
    (prompt,) = prompts_of((230,))
    names = [
        "structkv:pivot=3,struct_rate=1,kv_floor=0",
        "structkv:pivot=7,kv_floor=0",
        "structkv:pivot=5,struct_rate=1,kv_floor=0,decay=0.5",
        "structkv:pivot=3,kv_rate=1,kv_floor=0",
        "structkv:pivot=3,struct_rate=1,kv_rate=1",
        "structkv:pivot=7,kv_rate=1,kv_floor=0",
        "full",
        "structkv:pivot=3,kv_floor=0",
    ]
    with running(model, "structkv:pivot=3,kv_floor=0", config={"kv_layout": names}) as engine:
        answers = engine.generate([prompt] * len(names), policies=names)
        engine.assert_idle()
    assert_close(answers[:2], answers[1:3])
    assert_close(answers[4:6], answers[5:7])
    retains, propagates = replace(STRUCT, struct_rate=1), replace(STRUCT, kv_rate=1)
    assert_parity(model, answers, [retains] * 3 + [propagates] + [FULL] * 3 + [STRUCT])


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_windows_and_decays(tiny: Callable[..., Path]) -> None:
    """Windows from one token to longer than the prompt, lengths around w, cap and M; kernels."""
    model = tiny()
    policies: list[Policy] = []
    lengths = []
    for window, decay in ((1, 0.9), (4, 1.0), (8, 0.3), (24, 0.01), (64, 0.5)):
        struct = Struct(3, 0.5, 0.25, window=window, decay=decay, heads="own")
        around = {1, window - 1, window, window + 1, window + 2, 2 * window + 1, 4 * window + 5}
        for length in sorted(around - {0}):
            policies.append(struct)
            lengths.append(length)
        for length in (window + 17, 150):
            policies.append(replace(struct, struct_rate=1, kv_rate=0.15, heads="shared", kernel=1))
            lengths.append(length)
        policies.append(replace(struct, kv_budget=window + 20))
        lengths.append(140)
        policies.append(replace(struct, kv_rate=0.1, kv_floor=window + 30, heads="shared"))
        lengths.append(145)
        policies.append(replace(struct, pivot=6, struct_rate=0.01, kv_rate=0.01))
        lengths.append(90 + window)
        # Wider than what is kept, and the widest.
        policies.append(replace(struct, heads="shared", kernel=31))
        lengths.append(window + 70)
        policies.append(replace(struct, kernel=127))
        lengths.append(window + 110)
    with running(
        model, "structkv:pivot=3,kv_floor=0", config=room_for(policies), max_num_seqs=16
    ) as engine:
        answers = ask(engine, prompts_of(lengths), policies, max_tokens=3)
        engine.assert_idle()
    assert_parity(model, answers, policies)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    "struct",
    by_day([STRUCT, PAPER, replace(OWN, pivot=5, struct_rate=0.4, kv_rate=0.6)], {0, 2}),
    ids=named,
)
def test_lengths_around_every_edge(tiny: Callable[..., Path], struct: Struct) -> None:
    """In a batch and alone: around the window, the block of 32 and the chunk of 96 tokens."""
    model = tiny()
    lengths = (1, 7, 8, 9, 10, 39, 41, 79, 80, 81, 89, 103, 104, 105, 200, *EDGES)
    prompts = prompts_of(lengths)
    with running(model, named(struct), max_num_seqs=16) as engine:
        together = engine.generate(prompts, max_tokens=3)
        picked = [together[lengths.index(n)] for n in (1, 9, 97, 103, 104, 105, 191, 193)]
        alone = [engine.generate([answer.prompt], max_tokens=3)[0] for answer in picked]
        engine.assert_idle()
    assert_parity(model, together, [struct] * len(prompts))
    assert_close(alone, picked)


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_window_spread_over_chunks(tiny: Callable[..., Path]) -> None:
    """Steps with less room than a window: running requests leave two to eight tokens."""
    model = tiny()
    kinds = [
        replace(STRUCT, struct_rate=0.5, kv_rate=0.3),
        STRUCT,
        FAST,
        replace(STRUCT, pivot=6, struct_rate=0.6, kv_rate=1),
        replace(OWN, pivot=7, window=6, kv_rate=0.4),
        replace(PAPER, kv_rate=0.4),
        FULL,
    ]
    prompts = prompts_of((30, 41, 55, 23, 64, 17, 50, 38, 47, 29, 33))
    policies = [kinds[i % len(kinds)] for i in range(len(prompts))]
    with running(
        model, "structkv:pivot=3,kv_floor=0", config=room_for(policies), max_num_batched_tokens=10
    ) as engine:
        begins = inside.watch_chunks(engine)
        answers = ask(engine, prompts, policies, max_tokens=30)
        engine.assert_idle()
    assert_parity(model, answers, policies)
    # A chunk that starts after the window does is a window in parts.
    spread = [
        answer
        for answer, policy, mine in zip(answers, policies, begins.values(), strict=True)
        if isinstance(policy, Struct)
        and any(len(answer.prompt) - policy.window < b < len(answer.prompt) for b in mine)
    ]
    assert len(spread) >= 3, "no window was spread: the test shows nothing"


@pytest.mark.usefixtures("dense_ops")
def test_chunks_of_one_token(tiny: Callable[..., Path]) -> None:
    """Every chunk is one token and every window is spread over as many chunks as it has tokens."""
    model = tiny()
    policies = [STRUCT, replace(OWN, struct_rate=0.6, kv_rate=0.4), FAST, PAPER]
    with running(
        model,
        "structkv:pivot=3,kv_floor=0",
        config=room_for(policies),
        max_num_batched_tokens=16,
        long_prefill_token_threshold=1,
    ) as engine:
        answers = ask(engine, prompts_of((40, 21, 33, 9)), policies)
        engine.assert_idle()
    assert_parity(model, answers, policies)


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_one_shot(tiny: Callable[..., Path]) -> None:
    """Whole prompts in one step, many at once; chunked prefill gives the same."""
    model = tiny()
    mixed: list[Policy] = [STRUCT, FAST, replace(OWN, struct_rate=0.7, kv_rate=0.5), FULL, PAPER]
    mixed.append(SNAP)
    prompts = prompts_of((600, 333, 450, 200, 301, *range(9, 39, 3)))
    policies = [mixed[i % len(mixed)] for i in range(len(prompts))]
    config = room_for(policies)
    with running(
        model,
        "structkv:pivot=3,kv_floor=0",
        config=config,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
    ) as engine:
        steps = engine.watch_running()
        together = ask(engine, prompts, policies, max_tokens=3)
        assert max(steps) == len(prompts)
        engine.assert_idle()
    with running(model, "structkv:pivot=3,kv_floor=0", config=config) as engine:
        chunked = ask(engine, prompts[:5], policies[:5], max_tokens=3)
        engine.assert_idle()
    assert_parity(model, together, policies)
    assert_close(chunked, together[:5])


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    ("arch", "heads", "kv_heads"),
    by_day([("llama", 8, 2), ("mistral", 4, 4), ("qwen2", 4, 2), ("qwen3", 4, 1)], {1, 3}),
)
def test_architectures(tiny: Callable[..., Path], arch: str, heads: int, kv_heads: int) -> None:
    model = tiny(arch, heads=heads, kv_heads=kv_heads)
    mixed = [
        STRUCT,
        Struct(3, struct_rate=0.5, kv_rate=0.7),
        replace(OWN, pivot=7, kv_rate=0.3, decay=0.5),
        PAPER,
    ]
    prompts = prompts_of((150, 97, 200, 64, 131, 180, 119, 143))
    policies = [mixed[i % 4] for i in range(len(prompts))]
    with running(model, "structkv:pivot=3,kv_floor=0", config=room_for(policies)) as engine:
        answers = ask(engine, prompts, policies)
        engine.assert_idle()
    assert_parity(model, answers, policies)


MIXED: list[Policy] = [
    STRUCT,
    FULL,
    Struct(5, struct_rate=0.5, kv_rate=0.3, window=16, decay=0.6),
    Struct(1, struct_rate=0.3, kv_rate=0.8, window=1),
    FAST,
    OWN,
    Keep(tsp_layer=5, tsp_rate=0.4, kv_rate=0.2, window=4, kernel=13),
    PAPER,
    Keep(kv_rate=0.3, window=4, kernel=13),
    STREAM,
    Keep(cutoff=6),
    Struct(7, kv_rate=0.25, window=24),
    Struct(5, struct_rate=0.3, kv_rate=1),
    Struct(5, struct_rate=0.5, kv_rate=0.3, window=16, heads="own", kernel=3),
]


@pytest.mark.kernels
@pytest.mark.parametrize(("policies",), by_day([(MIXED,), (MIXED[:6],)], {1}), ids=["all", "six"])
def test_mixed_batch(tiny: Callable[..., Path], policies: list[Policy]) -> None:
    """Policies with different windows and rates side by side, by the real kernels.

    The server has four segments, so that centrality runs over several of them, and beside it
    FastKV scores by one layer and each KV head by itself.
    """
    model = tiny()
    lengths = (150, 75, 160, 110, 130, 155, 90, 145, 140, 120, 100, 150, 125, 135)
    prompts = prompts_of(lengths[: len(policies)])
    with running(
        model, "structkv:pivot=3,kv_floor=0", config=room_for(policies), max_num_seqs=16
    ) as engine:
        chunked = ask(engine, prompts, policies, max_tokens=6)
        alone = [
            ask(engine, prompts[i : i + 1], policies[i : i + 1], max_tokens=6)[0] for i in (2, 3)
        ]
        segments = {group["segment"] for group in engine.stats()["layout"]["groups"]}
        engine.assert_idle()
    assert segments == {0, 1, 2, 3}
    assert_parity(model, chunked, policies)
    assert_close(alone, chunked[2:4])


@pytest.mark.usefixtures("dense_ops")
def test_selected_tokens_take_several_passes(tiny: Callable[..., Path]) -> None:
    """More selected tokens than a step may have, of one prompt and of several together."""
    model = tiny()
    policies = [
        Struct(3, struct_rate=0.9, kv_rate=0.2),
        Struct(3, struct_rate=0.9, kv_rate=0.2, window=1),
        Struct(5, struct_rate=0.8, kv_rate=0.95),
        Struct(3, struct_rate=0.8, kv_rate=1, window=64),
        FAST,
        STRUCT,
    ]
    prompts = prompts_of((600, 260, 300, 217, 150, 170))
    with running(model, "structkv:pivot=3,kv_floor=0", config=room_for(policies)) as engine:
        together = ask(engine, prompts, policies)
        alone = [ask(engine, prompts[i : i + 1], policies[i : i + 1])[0] for i in range(4)]
        engine.assert_idle()
    assert_parity(model, together, policies)
    assert_close(alone, together[:4])


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(("kv_heads", "heads"), [(1, "shared"), (2, "own")])
def test_retention_is_snapkv(tiny: Callable[..., Path], kv_heads: int, heads: str) -> None:
    """Of each head's own set, and of the only head's; above a SPEED cutoff that one's stays."""
    model = tiny(heads=4, kv_heads=kv_heads)
    prompts = prompts_of((230, 97, 230, 97))
    retains = f"structkv:pivot=3,struct_rate=1,kv_rate=0.2,kv_floor=0,heads={heads}"
    unpooled = f"{retains},kernel=1"
    names = [retains, unpooled, f"speed-4+{retains}", f"speed-4+{unpooled}"]
    with running(model, "speed-4", config={"kv_layout": names}) as engine:
        answers = engine.generate(prompts, policies=names)
        engine.assert_idle()
    snapkv = [Keep(kv_rate=0.2), Keep(kv_rate=0.2, kernel=1)]
    assert_parity(model, answers, [*snapkv, *(replace(keep, cutoff=4) for keep in snapkv)])


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    """A pool that is too small: prompts come in anew, and generated tokens after them."""
    model = tiny()
    policies = [
        Struct(3, struct_rate=0.5, kv_rate=0.6),
        FULL,
        Struct(3, struct_rate=0.3, kv_rate=1),
        replace(FAST, tsp_rate=0.5, kv_rate=0.7),
        replace(OWN, struct_rate=0.8, kv_rate=0.8),
        Keep(kv_rate=0.5),
        replace(PAPER, struct_rate=0.4, kv_rate=0.9),
    ]
    prompts = prompts_of((180, 150, 200, 170, 190, 129, 140))
    with running(
        model,
        "structkv:pivot=3,kv_floor=0",
        config=room_for(policies),
        num_gpu_blocks_override=27,
        max_model_len=384,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=50)
        engine.assert_idle()
    ours = {p.generated > 0 for p in engine.preempted if "structkv" in p.policy}
    assert ours == {True, False}, (
        f"StructKV was meant to be preempted both in its prompt and after it: {engine.preempted}"
    )
    assert_parity(model, answers, policies)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("pivot", [3, 7])
def test_prefixes_beside_full(tiny: Callable[..., Path], pivot: int) -> None:
    """Up to the pivot, and states; `full` reads what was computed in all layers."""
    model = tiny()
    struct = Struct(pivot)
    policies = [struct, FULL, struct, replace(struct, kv_rate=1), FULL]
    prompts = prompts_of((300,)) * len(policies)
    with running(
        model, named(struct), config=room_for(policies), enable_prefix_caching=True
    ) as engine:
        answers = [
            ask(engine, [prompt], [policy], max_tokens=3)[0]
            for prompt, policy in zip(prompts, policies, strict=True)
        ]
        engine.assert_idle()
    assert_parity(model, answers, policies)
    cached = [answer.cached for answer in answers]
    assert cached == ([0, 288, 288, 288, 288] if pivot == 7 else [0, 0, 256, 256, 288])


@pytest.mark.usefixtures("dense_ops")
def test_aborted_prompts_leave_nothing(tiny: Callable[..., Path]) -> None:
    """No centrality of a prompt that is gone, and none that a later one of that name takes up."""
    model = tiny()
    with running(model, "structkv:pivot=3,kv_floor=0") as engine:
        for steps in range(6):
            ids = engine.submit(prompts_of((300, 20, 150), seed=steps), max_tokens=20)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
        prompts = prompts_of((100, 33, 200))
        answers = engine.generate(prompts)
        engine.assert_idle()
        inside.assert_no_centrality(engine)
    assert_parity(model, answers, [STRUCT] * 3)
