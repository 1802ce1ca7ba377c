"""Files that were measured side by side become one."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import merge
from benchmarks.engine.shapes import SHAPES

RUN = {
    "command": "python -m benchmarks.engine.compare",
    "date": "2026-11-24",
    "gpu": "NVIDIA H200, 580",
}


HEAD = {"what": "w", "command": RUN["command"], "date": RUN["date"], "commit": None}


def result(**engines: Any) -> dict[str, Any]:
    shape = SHAPES["llama-3.1-8b"].as_dict()
    settings = {"engine": {"dtype": "bfloat16"}, "tokens": 129, "steps": 64}
    of_model = {"name": "llama-3.1-8b", **shape}
    content = {"about": HEAD, "model": of_model, "settings": settings}
    return {**content, "runs": [RUN], "engines": engines}


def engine(run: int = 0, **cases: Any) -> dict[str, Any]:
    return {"run": run, "cases": {key.replace("_", ":"): value for key, value in cases.items()}}


def test_engines_of_two_gpus_meet(tmp_path: Path) -> None:
    stock = result(stock=engine(ttft_32768={"median": 12.0}, tpot_32768={"error": ["late"]}))
    ours = result(
        fastkv=engine(ttft_32768={"median": 6.0}),
        stock=engine(tpot_32768={"median": 9.0}, ttft_32768={"error": ["not run"]}),
    )
    for name, content in (("a", stock), ("b", ours)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    paths = [str(tmp_path / f"{name}.json") for name in ("c", "a", "b")]
    assert merge.main(paths) == 0
    merged = json.loads((tmp_path / "c.json").read_text())
    engines = merged["engines"]
    assert len(merged["runs"]) == 2 and engines["fastkv"]["run"] == 1
    # What one file has stays where the other failed.
    assert engines["stock"]["cases"]["ttft:32768"]["median"] == 12.0
    assert engines["stock"]["cases"]["tpot:32768"]["median"] == 9.0
    assert [engines["stock"]["cases"][case]["run"] for case in ("ttft:32768", "tpot:32768")] == [
        0,
        1,
    ]
    # And gains are over the stock of the other file.
    assert engines["fastkv"]["cases"]["ttft:32768"]["ratio_to_stock"] == 2.0


def test_servers_keep_their_runs() -> None:
    content = {key: value for key, value in result().items() if key != "engines"}
    first = {**content, "servers": {"stock": {"settings": {"1x8/8@inf": {"run": 0}}}}}
    second = {**content, "servers": {"snapkv": {"settings": {"1x8/8@inf": {"run": 0}}}}}
    merged = merge.merge([first, second])
    assert merged["servers"]["snapkv"]["settings"]["1x8/8@inf"]["run"] == 1
    assert second["servers"]["snapkv"]["settings"]["1x8/8@inf"]["run"] == 0


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    other = result()
    other["settings"] = {**other["settings"], "steps": 8}
    with pytest.raises(ValueError, match="differ in their settings"):
        merge.merge([result(), other])
    other = {**result(), "runs": [{**RUN, "gpu": "NVIDIA H100, 580"}]}
    with pytest.raises(ValueError, match="different GPUs"):
        merge.merge([result(), other])
    with pytest.raises(ValueError, match="give files of"):
        merge.merge([result(), {"cells": []}])
    with pytest.raises(SystemExit, match="No such file"):
        merge.main([str(tmp_path / "out"), str(tmp_path / "a"), str(tmp_path / "b")])
