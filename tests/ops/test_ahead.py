"""Kernels are compiled ahead: by Triton itself, for a GPU that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.nightly import by_day

# In a process of its own: the tests' Triton interprets kernels.
RUN = [sys.executable, "-m", "support.compiles_ahead"]
TESTS = Path(__file__).resolve().parent.parent
SELECTS = {"_select_kernel", "_count_kernel", "_find_kernel"}
SCORES = {"row_sums_kernel", "_window_sums_kernel", "_pool_kernel"}
KERNELS: dict[tuple[str, ...], set[str]] = {
    ("bfloat16", "fastkv:tsp_layer=3"): SCORES | SELECTS | {"_move_kernel", "_attend_kernel"},
    ("float8_e4m3fn", "snapkv", "criticalkv"): SCORES
    | SELECTS
    | {"_move_kernel", "_value_norms_kernel", "_two_stages_kernel"},
    ("bfloat16", "structkv:pivot=online,score=critical", "knorm", "streamingllm"): SCORES
    | SELECTS
    | {"_probabilities_kernel", "_rows_kernel", "_mean_kernel", "_key_scores_kernel"}
    | {"_move_kernel", "_value_norms_kernel", "_two_stages_kernel"},
    ("bfloat16", "structkv:pivot=3,granularity=block,struct_rate=1"): SCORES,
    ("bfloat16", "gemfilter:layer=3"): SCORES | SELECTS,
    ("bfloat16", "speed-4"): set(),
}


@pytest.mark.parametrize("servers", by_day([slice(2), slice(2, None)], {0}), ids=str)
def test_all_kernels_of_prompts_are_compiled(
    monkeypatch: pytest.MonkeyPatch, servers: slice
) -> None:
    kernels = dict(list(KERNELS.items())[servers])
    for variable in ("TRITON_INTERPRET", "KVX_CPU"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    run = [*RUN, json.dumps(list(kernels))]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    for (server, expected), names in zip(kernels.items(), compiled, strict=True):
        assert set(names) == expected, server
