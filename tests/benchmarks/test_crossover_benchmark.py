"""The benchmark that says from which length on retrieval is faster."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ops import retrieval_crossover as bench
from benchmarks.ops.saliency import bytes_per_us


def case(length: int, stock: float, ours: dict[str, float], batch: int = 1) -> dict[str, Any]:
    named = {"shape": "12/2x128", "kv_heads": 2, "head_bytes": 512}
    return {**named, "batch": batch, "length": length, "stock": stock, "cuda": ours}


def test_crossovers_hold_for_all_greater_lengths() -> None:
    """A length where ours happens to be faster does not count while a greater one is slower."""
    cases = [
        case(4096, 10, {"256": 9, "2048": 30}),
        case(8192, 10, {"256": 11, "2048": 30}),
        case(16384, 20, {"256": 12, "2048": 30}),
        case(32768, 30, {"256": 13, "2048": 30}),
        case(2048, 10, {"256": 5}, batch=8),
    ]
    alone, eight = bench.crossovers(cases, ("cuda", "triton"))
    assert (alone["batch"], eight["batch"]) == (1, 8)
    assert alone["crossover"] == {"256": 16384, "512": None, "1024": None, "2048": None}
    assert eight["crossover"]["256"] == 2048
    text = bench.table({"cases": cases, "crossovers": [alone, eight]})
    assert "from {'256': 16384" in text and "(2, 512)" not in text
    cases[3]["cuda"]["2048"] = 29
    text = bench.table({"cases": cases, "crossovers": bench.crossovers(cases, ("cuda",))})
    assert "cuda: (2, 512): 32_768," in text


def test_the_dry_run_measures_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda run, repeats, before=None: (run(), 1.0)[1])
    bench.main({"device": "none"}, tmp_path / "out.json", 1, dry=True, time_limit=100)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["complete"] and len(report["cases"]) == 6
    assert all(set(case["torch"]) == {"16", "32"} for case in report["cases"])
    with pytest.raises(SystemExit, match="stopped after 0 s"):
        bench.main({}, tmp_path / "cut.json", 1, dry=True, time_limit=0)
    assert len(json.loads((tmp_path / "cut.json").read_text())["cases"]) == 1


def test_a_card_moves_what_its_data_sheet_says() -> None:
    assert bytes_per_us("NVIDIA H200") > bytes_per_us("NVIDIA H100 80GB HBM3") > 2e6
    with pytest.raises(ValueError, match="no bandwidth of 'NVIDIA H100 PCIe' is known: add it"):
        bytes_per_us("NVIDIA H100 PCIe")
