"""The last layer that all prompt rows see runs those that go on; the others store their entries.

That answers are right either way the parity tests of each policy show: they run split layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import inside
from support.engine import running
from support.nightly import by_day
from support.parity import assert_close
from support.prompts import prompts_of

LENGTHS = (200, 33, 97, 150)
TOTAL = sum(LENGTHS)
DECODES = len(LENGTHS) * 3
SPLIT_OFF = {"kv_disable": ["split_layers"]}


def rows_by_layer(model: Path, policy: str, config: dict[str, Any] | None = None) -> list[int]:
    """Rows that each layer's MLP runs, in steps of 96 tokens with decodes between."""
    with running(model, policy, config=config or {}) as engine:
        rows = inside.watch_mlp_rows(engine)
        engine.generate(prompts_of(LENGTHS))
        computed = engine.stats()["policies"]
        engine.assert_idle()
    assert sum(each["layer_tokens_computed"] for each in computed.values()) == sum(rows)
    return rows


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    ("policy", "first", "above"),
    [
        ("speed-5:anchors=2,tail=3", 4, 5 * len(LENGTHS)),
        ("speed-5+snapkv:kv_floor=0", 4, 2 * len(LENGTHS)),
        ("selfonly-3", 2, 2 * len(LENGTHS)),
        ("fastkv:kv_floor=0,tsp_layer=3", 3, sum(n // 5 for n in LENGTHS if n > 40) + 8),
        ("structkv:pivot=3,kv_floor=0", 3, sum(n // 5 for n in LENGTHS if n > 40) + 8),
    ],
)
def test_rows_that_do_not_go_on_are_not_run(
    tiny: Callable[..., Path], policy: str, first: int, above: int
) -> None:
    """first: the layer that is split."""
    rows = rows_by_layer(tiny(), policy)
    assert rows == [TOTAL + DECODES] * first + [above + DECODES] * (8 - first)


@pytest.mark.usefixtures("dense_ops")
def test_a_filter_layer_runs_no_row_of_a_prompt(tiny: Callable[..., Path]) -> None:
    rows = rows_by_layer(tiny(), "gemfilter:layer=3,rate=0.4,kv_floor=0")
    again = sum(int(n * 0.4) for n in LENGTHS)
    assert rows == [TOTAL + again + DECODES] * 3 + [again + DECODES] * 5


@pytest.mark.parametrize("policy", ["swiftkv-5", "speed-1"])
def test_layers_that_cannot_be_split(tiny: Callable[..., Path], policy: str) -> None:
    """What is projected above layer K needs every row of K - 1, and below layer 0 is no state."""
    cutoff = int(policy[-1])
    rows = rows_by_layer(tiny(), policy)
    kept = len(LENGTHS) * (1 if cutoff == 5 else 2)
    assert rows == [TOTAL + DECODES] * cutoff + [kept + DECODES] * (8 - cutoff)


@pytest.mark.usefixtures("dense_ops")
def test_switched_off(tiny: Callable[..., Path]) -> None:
    rows = rows_by_layer(tiny(), "fastkv:kv_floor=0,tsp_layer=3", SPLIT_OFF)
    assert rows[2] == rows[3] == TOTAL + DECODES > rows[4]


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("arch", by_day(["llama", "mistral", "qwen2", "qwen3"], {3}))
def test_answers_are_the_same(tiny: Callable[..., Path], arch: str) -> None:
    """Policies of every kind beside each other, split at the same layer and at others."""
    names = [
        "fastkv:kv_floor=0,tsp_layer=3",
        "speed-4+snapkv:kv_floor=0",
        "speed-4",
        "full",
        "structkv:pivot=3,kv_floor=0,granularity=block",
        "gemfilter:layer=3,rate=0.4,kv_floor=0",
        "speed-5:anchors=3,tail=2",
        "snapkv:kv_floor=0",
        "structkv:pivot=4,kv_rate=1,kv_floor=0+snapkv:kv_floor=0",
        "speed-4+structkv:pivot=3,granularity=block,struct_rate=1,kv_floor=0",
    ]
    prompts = prompts_of([100 + 31 * i % 90 for i in range(len(names))])
    answers = []
    for off in ({}, SPLIT_OFF):
        config = {"kv_layout": names, **off}
        with running(tiny(arch), names[0], config=config, max_num_seqs=16) as engine:
            answers.append(engine.generate(prompts, max_tokens=6, policies=names))
            engine.assert_idle()
    assert_close(*answers)
