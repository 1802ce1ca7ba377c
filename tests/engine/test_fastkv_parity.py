"""FastKV, SnapKV and StreamingLLM against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from reference.fastkv import Keep
from support import inside
from support.engine import running
from support.expected import FULL, Policy, named
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import EDGES, prompts_of

FAST = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)  # The defaults of `fastkv:tsp_layer=3`.
SNAP = Keep(kv_rate=0.1)
STREAM = Keep(sinks=4, recent=20)


@pytest.mark.usefixtures("dense_ops")
def test_layers_and_rates(tiny: Callable[..., Path]) -> None:
    """Every place of the TSP layer with rates in any relation, on one server."""
    model = tiny()
    rates = [(0.2, 0.1), (0.05, 1.0), (1.0, 0.05), (0.1, 0.5), (0.5, 0.5), (0.3, 0.31), (0.9, 0.95)]
    keeps = [
        Keep(tsp_layer=layer, tsp_rate=tsp, kv_rate=kv)
        for layer, (tsp, kv) in product((0, 3, 6, 7), rates)
    ]
    keeps += [Keep(tsp_layer=layer, tsp_rate=0.4, kv_budget=33) for layer in (0, 6)]
    keeps += [Keep(tsp_layer=3, tsp_rate=0.4, kv_budget=500), Keep(kv_budget=8)]
    lengths = [60 + 37 * i % 190 for i in range(len(keeps))]
    prompts = prompts_of(lengths)
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config=room_for(keeps),
        max_num_seqs=16,
        max_num_batched_tokens=200,
    ) as engine:
        answers = ask(engine, prompts, keeps)
        engine.assert_idle()
    assert_parity(model, answers, keeps)


@pytest.mark.usefixtures("dense_ops")
def test_rates_of_one_are_the_other_policy(tiny: Callable[..., Path]) -> None:
    """tsp_rate = 1 is SnapKV, kv_rate = 1 keeps all, both are `full`."""
    model = tiny()
    (prompt,) = prompts_of((230,))
    names = [
        "fastkv:kv_floor=0,tsp_layer=3,tsp_rate=1",
        "snapkv:kv_floor=0",
        "fastkv:tsp_layer=3,tsp_rate=1,kv_rate=1",
        "full",
        "fastkv:tsp_layer=7,kv_rate=1,kv_floor=0",
        "fastkv:tsp_layer=3,kv_rate=1,kv_floor=0",
        "fastkv:tsp_layer=3,kv_rate=1,kv_floor=0+snapkv:kv_rate=0.1,kv_floor=0",
        "fastkv:kv_floor=0,tsp_layer=3",
    ]
    with running(model, "fastkv:kv_floor=0,tsp_layer=3", config={"kv_layout": names}) as engine:
        answers = engine.generate([prompt] * len(names), policies=names)
        engine.assert_idle()
    assert_close(answers[0:1], answers[1:2])
    assert_close(answers[2:3] + answers[4:5], answers[3:4] * 2)
    assert_close(answers[6:7], answers[7:8])
    propagates = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=1.0)
    assert_parity(model, answers, [SNAP, SNAP, FULL, FULL, FULL, propagates, FAST, FAST])


@pytest.mark.usefixtures("dense_ops")
def test_windows_and_kernels(tiny: Callable[..., Path]) -> None:
    """Windows from one token to longer than the prompt, lengths around w, cap and M."""
    model = tiny()
    keeps, lengths = [], []
    for window, kernel in ((1, 1), (4, 13), (8, 3), (24, 13), (64, 3)):
        fast = Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.25, window=window, kernel=kernel)
        around = {1, window - 1, window, window + 1, window + 2, 2 * window + 1, 4 * window + 5}
        for length in sorted(around - {0}):
            keeps.append(fast)
            lengths.append(length)
        for length in (window + 17, 150):
            keeps.append(Keep(kv_rate=0.15, window=window, kernel=kernel))
            lengths.append(length)
        keeps.append(Keep(kv_budget=window, window=window, kernel=kernel))
        lengths.append(90 + window)
    prompts = prompts_of(lengths)
    with running(
        model, "fastkv:kv_floor=0,tsp_layer=3", config=room_for(keeps), max_num_seqs=16
    ) as engine:
        answers = ask(engine, prompts, keeps, max_tokens=3)
        engine.assert_idle()
    assert_parity(model, answers, keeps)


@pytest.mark.usefixtures("dense_ops")
def test_lengths_around_every_edge(tiny: Callable[..., Path]) -> None:
    """In a batch and alone: around the window, the block of 32 and the chunk of 96 tokens."""
    model = tiny()
    lengths = (1, 7, 8, 9, 10, 39, 41, 79, 80, 81, 89, 103, 104, 105, 200, *EDGES)
    wide = Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.6)
    picked = [lengths.index(n) for n in (9, 97, 103, 104, 105, 191, 193)]
    prompts = prompts_of(lengths)
    with running(model, named(FAST), max_num_seqs=16) as engine:
        together = engine.generate(prompts, max_tokens=3)
        others = ask(engine, [prompts[i] for i in picked], [wide] * len(picked), max_tokens=3)
        alone = [engine.generate([prompts[i]], max_tokens=3)[0] for i in picked]
        engine.assert_idle()
    assert_parity(model, [*together, *others], [FAST] * len(together) + [wide] * len(others))
    assert_close(alone, [together[i] for i in picked])


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_window_spread_over_chunks(tiny: Callable[..., Path]) -> None:
    """Steps with less room than a window: running requests leave two to eight tokens of ten."""
    model = tiny()
    keeps = [
        replace(FAST, tsp_rate=0.5, kv_rate=0.3),
        FAST,
        SNAP,
        replace(FAST, window=4, kernel=3, tsp_rate=0.6),
        Keep(kv_rate=0.4, window=5),
        FULL,
        STREAM,
    ]
    prompts = prompts_of((30, 41, 55, 23, 64, 17, 50, 38, 47, 29, 33, 60, 45))
    keeps = [keeps[i % len(keeps)] for i in range(len(prompts))]
    with running(
        model, "fastkv:kv_floor=0,tsp_layer=3", config=room_for(keeps), max_num_batched_tokens=10
    ) as engine:
        sizes = inside.watch_chunks(engine)
        answers = ask(engine, prompts, keeps, max_tokens=30)
        engine.assert_idle()
        # One token at a time, unforeseen at start: there is room for four such windows.
        sizes_then = dict(sizes)
        engine.scheduler.scheduler_config.long_prefill_token_threshold = 1
        slow = ask(engine, prompts_of((30,) * 7, seed=1), [FAST] * 7, max_tokens=2)
        engine.assert_idle()
    assert_parity(model, [*answers, *slow], [*keeps, *[FAST] * 7])
    # A chunk that begins within the window is a window in parts.
    spread = [
        any(0 < len(answer.prompt) - begin < keep.window for begin in begins)
        for begins, answer, keep in zip(sizes_then.values(), answers, keeps, strict=True)
        if keep not in (FULL, STREAM)
    ]
    assert sum(spread) >= 3, "too few windows were spread to show anything"


@pytest.mark.usefixtures("dense_ops")
def test_chunks_of_one_token(tiny: Callable[..., Path]) -> None:
    """Every chunk is one token and every window is spread over as many chunks as it has tokens."""
    model = tiny()
    keeps = [FAST, SNAP, replace(FAST, tsp_rate=0.6, kv_rate=0.4), FULL, SNAP, FAST]
    prompts = prompts_of((40, 21, 33, 12, 34, 9))
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config=room_for(keeps),
        max_num_batched_tokens=16,
        long_prefill_token_threshold=1,
    ) as engine:
        answers = ask(engine, prompts, keeps)
        engine.assert_idle()
    assert_parity(model, answers, keeps)


@pytest.mark.usefixtures("dense_ops")
def test_one_shot(tiny: Callable[..., Path]) -> None:
    """Whole prompts in one step, many at once; chunked prefill gives the same."""
    model = tiny()
    mixed = [FAST, SNAP, replace(FAST, tsp_rate=0.7, kv_rate=0.9), FULL, STREAM]
    prompts = prompts_of((600, 333, 450, 200, 301, *range(9, 39), 500))
    keeps = [mixed[i % len(mixed)] for i in range(len(prompts))]
    config = room_for(keeps)
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config=config,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
    ) as engine:
        steps = engine.watch_running()
        together = ask(engine, prompts, keeps, max_tokens=3)
        assert max(steps) == len(prompts)
        engine.assert_idle()
    with running(model, "fastkv:kv_floor=0,tsp_layer=3", config=config) as engine:
        chunked = ask(engine, prompts[:5], keeps[:5], max_tokens=3)
        engine.assert_idle()
    assert_parity(model, together, keeps)
    assert_close(chunked, together[:5])


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    ("arch", "heads", "kv_heads", "block_size"),
    by_day(
        [
            ("llama", 8, 2, 64),
            ("mistral", 4, 4, 32),
            ("qwen2", 4, 1, 32),
            ("qwen3", 8, 2, 32),
            ("qwen3", 4, 4, 64),
        ],
        {2, 4},
    ),
)
def test_architectures(
    tiny: Callable[..., Path], arch: str, heads: int, kv_heads: int, block_size: int
) -> None:
    model = tiny(arch, heads=heads, kv_heads=kv_heads)
    mixed = [FAST, Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.7), Keep(kv_rate=0.3, kernel=3)]
    prompts = prompts_of((150, 97, 200, 64, 131, 180))
    keeps = [mixed[i % 3] for i in range(len(prompts))]
    config = room_for(keeps)
    with running(model, named(FAST), config=config, block_size=block_size) as engine:
        answers = ask(engine, prompts, keeps)
        engine.assert_idle()
    assert_parity(model, answers, keeps)


MIXED: list[Policy] = [
    FULL,
    FAST,
    Keep(tsp_layer=5, tsp_rate=0.5, kv_rate=0.3, window=16, kernel=1),
    Keep(cutoff=2, anchors=2, tail=3),
    STREAM,
    Keep(kv_budget=50, window=24),
    Keep(cutoff=6),
    Keep(kv_rate=0.3, window=4, kernel=13),
    Keep(tsp_layer=1, tsp_rate=0.3, kv_rate=0.8, window=1, kernel=3),
]


@pytest.mark.kernels
@pytest.mark.parametrize(("keeps",), by_day([(MIXED,), (MIXED[:6],)], {1}), ids=["all", "six"])
def test_mixed_batch(tiny: Callable[..., Path], keeps: list[Policy]) -> None:
    """Policies with different windows, kernels and rates side by side, by the real kernels.

    The server has four segments, of which every request is cut at another.
    """
    model = tiny()
    prompts = prompts_of((100, 160, 140, 110, 90, 150, 130, 75, 120)[: len(keeps)])
    with running(
        model, "fastkv:kv_floor=0,tsp_layer=3", config=room_for(keeps), max_num_seqs=16
    ) as engine:
        chunked = ask(engine, prompts, keeps, max_tokens=6)
        (alone,) = ask(engine, prompts[2:3], keeps[2:3], max_tokens=6)
        segments = {group["segment"] for group in engine.stats()["layout"]["groups"]}
        engine.assert_idle()
    assert segments == {0, 1, 2, 3}
    assert_parity(model, chunked, keeps)
    assert_close([alone], [chunked[2]])


@pytest.mark.usefixtures("dense_ops")
def test_composed_with_speed(tiny: Callable[..., Path]) -> None:
    """Retention below the cutoff; above it SPEED's own choice stays."""
    model = tiny()
    kinds = [
        Keep(cutoff=4, kv_rate=0.1),
        Keep(cutoff=4, sinks=4, recent=20),
        Keep(cutoff=4, anchors=3, tail=12, kv_rate=0.2, window=4),
        Keep(cutoff=4, anchors=40, tail=1, kv_budget=30),
        Keep(cutoff=4, sinks=1, recent=1, anchors=0, tail=2),
        Keep(cutoff=4),
    ]
    keeps = [kind for kind in kinds for _ in range(4)]
    prompts = prompts_of((2, 9, 97, 200, 13, 41, 64, 161, 5, 16, 33, 129) * 2)
    with running(
        model,
        "speed-4+snapkv:kv_floor=0",
        config=room_for(keeps),
        max_num_seqs=16,
        enable_prefix_caching=True,
    ) as engine:
        answers = ask(engine, prompts, keeps, max_tokens=3)
        again = ask(engine, prompts[20:], keeps[20:], max_tokens=3)
        engine.assert_idle()
    assert_parity(model, answers, keeps)
    assert_close(again, answers[20:])
    assert [a.cached for a in again] == [0, 0, 32, 128]


@pytest.mark.usefixtures("dense_ops")
def test_streamingllm_edges(tiny: Callable[..., Path]) -> None:
    """Sinks and recent tokens around the prompt's length, each other and a block's end."""
    model = tiny()
    cases = [
        (sinks, recent, length)
        for sinks, recent in ((1, 1), (4, 28), (33, 31), (2, 90), (64, 1), (50, 60))
        for length in (1, sinks + recent - 1, sinks + recent, sinks + recent + 1, 130, 193)
    ]
    keeps = [Keep(sinks=sinks, recent=recent) for sinks, recent, _ in cases]
    prompts = prompts_of([length for *_, length in cases])
    with running(model, "streamingllm:recent=1020", max_num_seqs=16) as engine:
        answers = ask(engine, prompts, keeps, max_tokens=3)
        full = engine.generate(prompts[-1:], policies=["full"])
        default = engine.generate(prompts[-1:])  # 4 + 1020: nothing goes.
        engine.assert_idle()
        assert inside.upper_managers(engine) == []
    assert_parity(model, [*answers, *full, *default], [*keeps, FULL, FULL])


@pytest.mark.usefixtures("dense_ops")
def test_selected_tokens_take_several_passes(tiny: Callable[..., Path]) -> None:
    """More selected tokens than a step may have, of one prompt and of several together."""
    model = tiny()
    keeps = [
        Keep(tsp_layer=3, tsp_rate=0.9, kv_rate=0.2),
        Keep(tsp_layer=3, tsp_rate=0.9, kv_rate=0.2, window=1),
        Keep(tsp_layer=5, tsp_rate=0.8, kv_rate=0.95),
        Keep(tsp_layer=3, tsp_rate=0.8, kv_rate=1.0, window=64, kernel=3),
        FAST,
    ]
    prompts = prompts_of((600, 260, 300, 217, 150))
    with running(model, "fastkv:kv_floor=0,tsp_layer=3", config=room_for(keeps)) as engine:
        passes = inside.watch_passes(engine)
        together = ask(engine, prompts, keeps)
        counts = list(passes)
        alone = [ask(engine, prompts[i : i + 1], keeps[i : i + 1])[0] for i in range(4)]
        engine.assert_idle()
    assert max(counts) >= 6, counts  # 540 tokens in passes of 96.
    assert_parity(model, together, keeps)
    assert_close(alone, together[:4])


@pytest.mark.usefixtures("dense_ops")
def test_selected_tokens_share_passes(tiny: Callable[..., Path]) -> None:
    """Prompts that end in one step: their selected tokens fill passes, cut where they must be."""
    model = tiny()
    prompts = prompts_of((31, 27, 12, 9, 40, 22, 35, 18, 11, 45, 13, 30))
    keep = replace(FAST, tsp_rate=0.95, kv_rate=0.5, window=4)
    keeps = [keep, replace(keep, window=8), replace(keep, tsp_layer=5)] * 4
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config=room_for(keeps),
        max_num_batched_tokens=300,
        max_num_seqs=16,
    ) as engine:
        inside.limit_pass(engine, 17)
        passes = inside.watch_passes(engine)
        answers = ask(engine, prompts, keeps)
        engine.assert_idle()
    assert max(passes) >= 10, passes
    assert_parity(model, answers, keeps)
