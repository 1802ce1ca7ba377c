"""Where a rank's decode steps go: kernels by part, pauses, and waits for other ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common.step_marks import StepMarks
from benchmarks.common.step_parts import Steps, of_rank, part_of, waits_of
from benchmarks.engine import ranks


def span(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


REDUCE = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)"


def trace(reduce_us: float = 10.0, late: float = 0.0) -> list[dict[str, Any]]:
    """Three steps of 1,000 us, of which each has a copy and a graph of three kernels.

    reduce_us: of the all-reduce. late: by how much the host is late to launch the graph.
    """
    events = [span("kernel", "left over from before", 0, 40, correlation=999)]
    for step in range(3):
        t, call = 1000.0 * step, 10 * step
        events += [
            span("user_annotation", "execute_model", t, 100),
            span("user_annotation", "sample_tokens", t + 120, 30),
            span("cuda_runtime", "cudaMemcpyAsync", t + 5, 3, correlation=call),
            span("cuda_runtime", "cudaGraphLaunch", t + 60 + late, 10, correlation=call + 1),
            span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", t + 40, 10, correlation=call),
            span("kernel", "nvjet_tst_64x8_64x16", t + 70 + late, 300, correlation=call + 1),
            span("kernel", REDUCE, t + 372 + late, reduce_us, correlation=call + 1),
            span("kernel", "attend_kernel", t + 380 + late + reduce_us, 200, correlation=call + 1),
        ]
    return events


def test_of_one_rank() -> None:
    found = of_rank(Steps.of(reversed(trace())))
    assert found["steps"] == 3 and found["profiled_step_ms"] == pytest.approx(1.0)
    assert found["device_busy_ms"] == pytest.approx(0.52)
    assert {part: of["ms"] for part, of in found["parts"].items()} == {
        "gemm": 0.3,
        "attend": 0.2,
        "all_reduce": 0.01,
        "copies": 0.01,
    }
    assert found["parts"]["all_reduce"] == {
        "ms": 0.01,
        "calls": 1.0,
        "in_graphs": 1.0,
        "kernels": [REDUCE[:80]],
    }
    assert found["graph_launches"] == 1.0 and found["single_launches"] == 1.0
    # From the copy to the graph 20 us, of which the host takes 10; in the graph 2 and 8; from one
    # step to the next 450, and the host is there after 415.
    assert found["pauses"] == {
        "between_steps": 0.45,
        "in_graphs": 0.01,
        "others": 0.02,
        "host_late": pytest.approx((3 * 10 + 2 * 415) / 3e3, abs=1e-4),
    }
    assert found["host_parts"]["execute_model"]["host_ms"] == 0.1
    assert found["kernels"][0]["name"].startswith("nvjet")


def test_first_steps_may_not_count() -> None:
    steps = Steps.of(trace(), skip=1)
    assert len(steps.begins) == 2 and len(steps.runs) == 8
    assert of_rank(steps)["device_busy_ms"] == pytest.approx(0.52)
    with pytest.raises(ValueError, match="no step: 3 are marked execute_model, 3 do not"):
        Steps.of(trace(), skip=3)


def test_ranks_wait_for_the_last_one() -> None:
    """The one that is late to the graph waits for nobody."""
    early, late = Steps.of(trace(reduce_us=60)), Steps.of(trace(late=50))
    assert waits_of([early, late]) == {
        "all_reduce": {
            "calls": 1.0,
            "shared_ms": 0.01,
            "waits_ms": [0.05, 0.0],
            "last": [0.0, 1.0],
        }
    }
    other = [event for event in trace() if event["name"] != REDUCE]
    assert waits_of([early, Steps.of(other)]) is None


def test_without_a_device() -> None:
    host = [event for event in trace() if event["cat"] == "user_annotation"]
    found = of_rank(Steps.of(host))
    assert found["device_busy_ms"] is None and "parts" not in found
    assert found["host_parts"]["sample_tokens"]["host_ms"] == 0.03


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<", "at"),
        ("void flash::prepare_varlen_num_blocks_kernel<1, true>(int)", "at"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<", "at"),
        ("void kvx::score_kernel<128, 1, 4, false>(kvx::ScoreParams)", "score"),
        ("void kvx::select_kernel<8>(kvx::SelectParams)", "select"),
        ("void kvx::attend_kernel<kvx::BFloat16, 128, false, false, false>(", "attend"),
        ("_combine_kernel", "attend"),
        ("_combine_sampled_and_draft_tokens_kernel", "inputs"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_re"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", "all_re"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(", "norms"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps", "sampl"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>", "kv_store"),
        ("_write_groups_kernel", "one_bit_keys"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "gemm"),
        ("something else", "others"),
    ],
)
def test_parts_by_name(kernel: str, part: str) -> None:
    assert part_of(kernel).startswith(part)


def test_a_step_is_marked_once() -> None:
    """However many cases a server is profiled in."""
    runner = SimpleNamespace(execute_model=lambda: "ran", sample_tokens=lambda: "sampled")
    worker: Any = type("Worker", (StepMarks,), {"model_runner": runner})()
    before = dict(vars(runner))
    for _ in range(2):
        worker.mark_step_parts()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert runner.execute_model() == "ran"
        names = [event.name for event in profile.events() or ()]
        assert names.count("execute_model") == 1
        worker.unmark_step_parts()
        assert vars(runner) == before


def test_gains_are_over_stock_at_as_many_ranks() -> None:
    def entry(*steps: float) -> dict[str, Any]:
        names = ("1x64", "1x64@snapkv")
        return {"cases": {n: {"step_ms": ms} for n, ms in zip(names, steps, strict=False)}}

    servers = {
        "stock": {"1": entry(8.0), "2": entry(6.0)},
        "fier-32": {"1": entry(5.0, 4.0), "2": entry(4.0, 5.0), "4": entry(1.0)},
    }
    ranks.add_gains(servers)
    gains = {
        n: [row.get("gain") for row in e["cases"].values()] for n, e in servers["fier-32"].items()
    }
    assert gains == {"1": [1.6, 2.0], "2": [1.5, 1.2], "4": [None]}
    assert "gain" not in servers["stock"]["1"]["cases"]["1x64"]


def test_a_name_says_which_cache_a_server_has() -> None:
    args = SimpleNamespace(engine={"kv_cache_dtype_skip_layers": ["2"]}, layout=[])
    for name, skipped in {"stock@fp8-skip-0-1": ["0", "1"], "fier-32@fp8": []}.items():
        options = ranks.options_of(args, name, 1, "traces")  # type: ignore[arg-type]
        assert options["kv_cache_dtype"] == "fp8"
        assert options["kv_cache_dtype_skip_layers"] == skipped


def test_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # It would set variables for the tests that come after it, too.
    monkeypatch.setattr(ranks, "prepare_environment", lambda: None)
    given = ["--model", "tiny", "--servers", "stock", "--out", "x.json"]
    for more, message in (
        (["--cases", "64"], "--cases 64: write REQUESTSxTOKENS"),
        (["--ranks", "0"], "--steps and --ranks must be at least 1"),
        (["--servers", "stock@"], "write stock or a policy"),
    ):
        with pytest.raises(SystemExit):
            ranks.parse_args([*given, *more])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"--cases 1x4000: .* exceed 4096: shorten the prompt"):
        ranks.main([*given, "--cases", "1x4000"])
