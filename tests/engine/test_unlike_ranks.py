"""Two ranks that would retrieve unlike each other end the start."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine import running

from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE
from vllm_kvx.ops.retrieval.one_launch import VARIABLE


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_with_other_variables_end_the_start(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ranks: str,
) -> None:
    # vLLM binds one rank to a NUMA node unless told which cores to take.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    for name in (BACKEND_VARIABLE, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    options = {ranks: 2, "worker_extension_cls": "support.unlike_rank.UnlikeRank"}
    with (
        pytest.raises(Exception, match="initialization failed"),
        running(tiny(), "fier-64", **options),
    ):
        pass
    said = capfd.readouterr()
    text = said.out + said.err
    assert "the ranks of this server do not retrieve alike:" in text
    for rank, *says in (
        (0, "ops: torch (the device is a CPU); ", "neither variable is set"),
        (1, "ops: triton (KVX_RETRIEVAL_OPS is set); ", "KVX_RETRIEVAL_OPS=triton"),
    ):
        (line,) = {
            line.partition("- rank ")[2]
            for line in text.splitlines()
            if f"- rank {rank} on " in line
        }
        assert all(each in line for each in says)
