"""What is made of a profiler's trace: a device's time, its pauses, and who launched what."""

from typing import Any

import pytest

from benchmarks.common.trace import summary


def span(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


# Two steps. A graph's kernels are launched by one call; a copy runs beside a kernel.
EVENTS = [
    span("user_annotation", "sample_tokens", 0, 100),
    span("user_annotation", "propose", 20, 60),
    span("cpu_op", "aten::add", 5, 10),
    span("cuda_runtime", "cudaLaunchKernel", 6, 4, correlation=1),
    span("cuda_runtime", "cudaGraphLaunch", 30, 20, correlation=2),
    span("cuda_runtime", "cudaMemcpyAsync", 90, 5, correlation=3),
    span("kernel", "add", 100, 1000, correlation=1),
    span("kernel", "attend", 1100.5, 2000, correlation=2),
    span("kernel", "attend", 4100.5, 2000, correlation=2),
    span("gpu_memcpy", "Memcpy DtoH", 5000, 500, correlation=3),
    span("gpu_user_annotation", "propose", 1100, 5000),
    {"ph": "i", "cat": "kernel", "name": "no span", "ts": 0},
]


def test_of_a_device() -> None:
    found = summary(reversed(EVENTS), 2)
    assert found["device_busy_ms"] == pytest.approx(2.5)
    assert found["kernels"] == [
        {"name": "attend", "ms": 2.0, "calls": 1.0},
        {"name": "add", "ms": 0.5, "calls": 0.5},
        {"name": "Memcpy DtoH", "ms": 0.25, "calls": 0.5},
    ]
    # The half microsecond between two kernels is no pause.
    assert found["waits"] == [{"name": "attend", "ms": 0.5, "calls": 0.5}]
    assert found["parts"] == {
        "propose": {"host_ms": 0.03, "device_ms": 2.0},
        "sample_tokens": {"host_ms": 0.05, "device_ms": 0.75},
    }
    calls = {one["name"]: one["ms"] for one in found["cuda_calls"]}
    assert calls == {"cudaGraphLaunch": 0.01, "cudaMemcpyAsync": 0.0025, "cudaLaunchKernel": 0.002}
    assert found["cpu_ops"] == [{"name": "aten::add", "ms": 0.003, "calls": 0.5}]


def test_without_a_device() -> None:
    found = summary(EVENTS[:3], 1)
    assert found["device_busy_ms"] is None and not found["kernels"] and not found["waits"]
    assert found["parts"]["propose"] == {"host_ms": 0.06, "device_ms": 0.0}
    assert found["cpu_ops"] == [{"name": "aten::add", "ms": 0.01, "calls": 1.0}]
