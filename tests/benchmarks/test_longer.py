"""Estimates for prompts that were not measured: the arithmetic, and what it gives back."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import longer
from vllm_kvx.tools.ideal import work as counted
from vllm_kvx.tools.ideal.shape import Shape

SHAPE = Shape("llama", 4, 64, 4, 2, 16, 128, 1000, 1 << 20)
ENTRY = 2 * SHAPE.kv_heads * SHAPE.head_dim * 2


def content(engines: dict[str, dict[str, float]], tokens: int = 10_000) -> dict[str, Any]:
    """A result of `benchmarks.engine.compare`, by engine and case the median."""
    return {
        "model": SHAPE.as_dict(),
        "engines": {
            name: {
                "cases": {case: {"median": median} for case, median in cases.items()},
                "pool": {"tokens": tokens},
            }
            for name, cases in engines.items()
        },
    }


def milliseconds(length: int) -> float:
    """Of a machine with other rates for what grows with the length and with its square."""
    linear, square = longer._prefill_parts(SHAPE, length)
    return 1e3 * (linear / 1e9 + square / 3e8)


def test_stock_is_the_machine_whose_times_were_measured() -> None:
    measured = {f"ttft:{n}": milliseconds(n) for n in (1000, 4000)}
    (found,) = longer.estimates(content({"stock": measured}), [32_000])
    assert found.ttft_s == pytest.approx(milliseconds(32_000) / 1e3)
    assert found.tpot_ms is None and not found.fits
    assert found.memory == longer.Memory(32_000 * 4 * ENTRY, 32_000 * 4 * ENTRY, 0, 0)


def test_a_policy_keeps_the_share_of_its_ideal() -> None:
    stock = {f"ttft:{n}": milliseconds(n) for n in (1000, 4000)} | {"tpot:1000": 2, "tpot:4000": 5}
    gain = counted.prefill_ratio(SHAPE, "speed-2", 4000)
    assert gain is not None
    ours = {"ttft:4000": milliseconds(4000) / gain / 0.9, "tpot:4000": 4.0, "ttft:1000@full": 1.0}
    found = longer.estimates(content({"stock": stock, "speed-2": ours}), [4000, 8000])
    (_, _, here, beyond) = found
    assert here.ttft_s == pytest.approx(ours["ttft:4000"] / 1e3)
    assert here.tpot_ms == pytest.approx(4.0)
    there = counted.prefill_ratio(SHAPE, "speed-2", 8000)
    assert there is not None
    assert beyond.ttft_s == pytest.approx(milliseconds(8000) / 1e3 / (there * 0.9))
    assert beyond.fits and not found[1].memory.stash


def test_a_prompt_that_selects_holds_the_lower_layers_whole_and_its_states() -> None:
    memory = longer.memory_of(SHAPE, "fastkv:tsp_layer=1,tsp_rate=0.2,kv_rate=0.1", 10_000)
    assert memory.most == (2 * 10_000 + 2 * 2_000) * ENTRY
    assert memory.kept == 4 * 1_000 * ENTRY
    assert memory.stash == 10_000 * SHAPE.hidden * 2
    assert memory.needed == memory.most + memory.stash + 2 * 4 * SHAPE.kv_heads * 10_000


def test_what_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="two prompt lengths"):
        longer.estimates(content({"stock": {"ttft:1000": 1.0}}), [2000])
    with pytest.raises(ValueError, match="not known before"):
        longer.memory_of(SHAPE, "structkv:pivot=online,min_layer=1,max_layer=2", 2000)


@pytest.mark.parametrize("text", [None, "{", '{"engines": {}}'])
def test_files_that_are_no_results(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        longer.main([str(path)])
    assert ended.value.code == 2
    assert "give results of benchmarks.engine.compare" in capsys.readouterr().err


def test_the_table_names_every_estimate() -> None:
    stock = {f"ttft:{n}": milliseconds(n) for n in (1000, 4000)}
    shown = longer.table(longer.estimates(content({"stock": stock}), [8000, 32_000]))
    assert shown.count("`stock`") == 2 and "**no**" in shown and "| 32,000 |" in shown
