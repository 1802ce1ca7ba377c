"""Rows over the prompts of several result files."""

from typing import Any

import pytest

from benchmarks.answers.pooled import markdown, pooled


def file(length: int, model: str = "m", **scores: str) -> dict[str, Any]:
    lines = [
        {"policy": policy, "task": "notes", "length": length, "scores": text}
        for policy, text in scores.items()
    ]
    return {"model": model, "scores": lines}


def test_each_prompt_is_paired_with_full_of_its_own_file() -> None:
    short = file(512, full="1 1 0.5", snapkv="1 0 0.5", knorm="0 0 0")
    # One prompt was not answered.
    long = file(1024, full="0 1", snapkv="- 1")
    pairs = pooled([short, long])
    assert pairs == {
        "full": [(1, 1), (1, 1), (0.5, 0.5), (0, 0), (1, 1)],
        "snapkv": [(1, 1), (0, 1), (0.5, 0.5), (1, 1)],
    }
    assert "| `snapkv` | 4 | 62.5 " in markdown(pairs)
    assert "71.4 [" in markdown(pairs)  # 2.5 of 3.5
    with pytest.raises(SystemExit, match="two files"):
        pooled([short, short])
    with pytest.raises(SystemExit, match="model is 'other'"):
        pooled([short, file(1024, "other", full="1")])
    with pytest.raises(SystemExit, match="no score"):
        pooled([short, {"model": "m"}])
