"""Settings of `benchmarks.serving`, and the figures of what `vllm bench serve` measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.names import split_name
from vllm_kvx.tools.ideal.devices import device_of
from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import (
    entry_bytes,
    full_work,
    least_time,
    work_of,
)

_SETTING = re.compile(
    r"(?P<prompts>\d+)x(?P<input>\d+)/(?P<output>\d+)@"
    r"(?P<load>inf|c(?P<users>\d+)|(?P<rate>\d+(\.\d+)?))"
)

# Of each a server takes less than ten minutes on an H200; benchmarks/README.md says how long.
PRESETS = {
    "8k": ["256x8192/1024@inf", "64x8192/1024@c32", "16x8192/1024@c8", "4x8192/1024@c1"],
    "8k-rates": ["64x8192/1024@0.8", "96x8192/1024@1.4"],
    "32k": ["56x32768/4096@inf"],
    "32k-users": ["8x32768/4096@c8", "1x32768/4096@c1"],
    "32k-rates": ["16x32768/4096@0.1"],
    "128k": ["14x128000/256@inf", "8x128000/256@0.05"],
    "tiny": ["6x96/200@inf", "4x96/200@4", "2x96/200@c1"],
}


@dataclass(frozen=True)
class Setting:
    """One load: `PROMPTSxINPUT/OUTPUT@LOAD`, lengths in tokens.

    The load is `inf` (all prompts at once: saturation), a number (requests/s on average, Poisson)
    or `cN` (N users, each of whom asks on when answered).
    """

    prompts: int
    input: int
    output: int
    rate: float | None = None
    users: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Raises ValueError, saying what is allowed."""
        match = _SETTING.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r}: write prompts x input / output @ load, 256x8192/1024@inf; "
                "a load is inf, requests/s such as 0.5, or users such as c8"
            )
        prompts, length, output = (int(match[key]) for key in ("prompts", "input", "output"))
        users = int(match["users"]) if match["users"] else None
        rate = float(match["rate"]) if match["rate"] else None
        if 0 in (prompts, length, output, users, rate):
            raise ValueError(f"{text!r}: prompts, lengths, users and the rate are above 0")
        return cls(prompts, length, output, rate, users)

    @property
    def saturates(self) -> bool:
        return self.rate is None and self.users is None

    @property
    def lengths(self) -> str:
        """Input and output, as people name such loads: 8K/1K."""
        return f"{_short(self.input)}/{_short(self.output)}"

    @property
    def load(self) -> str:
        """The load in words."""
        if self.users:
            return f"{self.users} user" + ("s" if self.users > 1 else "")
        return "saturation" if self.rate is None else f"{self.rate:g} requests/s"

    def __str__(self) -> str:
        load = f"c{self.users}" if self.users else "inf" if self.rate is None else f"{self.rate:g}"
        return f"{self.prompts}x{self.input}/{self.output}@{load}"


def _short(tokens: int) -> str:
    """128000 is 128K, and so would be 131072."""
    unit = next((unit for unit in (1000, 1024) if tokens % unit == 0), None)
    return f"{tokens // unit}K" if unit else str(tokens)


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What the report says of one setting: times in ms, rates per second."""
    bench, load = measured["bench"], measured["server"]
    wanted = {f"{q}_{name}": f"{q}_{name}_ms" for q in ("p50", "p99") for name in _TIMES}
    return {
        "requests_per_s": bench["request_throughput"],
        "output_tokens_per_s": bench["output_throughput"],
        "user_tokens_per_s": 1e3 / bench["mean_tpot_ms"] if bench.get("mean_tpot_ms") else None,
        **{key: bench.get(name) for key, name in wanted.items()},
        "most_running": load["most_running"],
        "preemptions": load["preemptions"],
        "completed": bench["completed"],
    }


_TIMES = ("ttft", "tpot", "itl")


def is_whole(measured: Mapping[str, Any], setting: Setting) -> bool:
    """Whether every prompt of the setting was answered."""
    return "error" not in measured and measured["bench"]["completed"] == setting.prompts


def saturation_ratio(
    shape: Shape,
    server: str,
    setting: Setting,
    gpu: str | None,
    stock_tokens: float,
    seqs: int,
    weight_bytes: float = 2,
) -> float | None:
    """The ideal gain in requests/s over stock with all prompts at once.

    A request's times are `least_time`; of the device only the ratio of its peaks enters. As many
    requests run as the pool holds, at most `seqs` and all prompts. `stock_tokens` is the pool in
    tokens of stock vLLM with a 16-bit cache. `weight_bytes` are those of a weight that is read;
    products count as those of 16 bits, as in every ideal.
    """
    policy, dtype = split_name(server)
    work = work_of(policy, shape.layers, setting.input)
    bytes_ = entry_bytes(dtype, head_dim=shape.head_dim)
    device = device_of(gpu) if gpu else None
    if work is None or bytes_ is None or device is None or not setting.saturates:
        return None
    stock = full_work(shape.layers, setting.input)
    entries = stock_tokens * shape.layers * 2
    most = min(seqs, setting.prompts)
    times = [
        least_time(shape, each, setting.output, device, entries / kv, most, weight_bytes, kv)
        for each, kv in ((stock, 2.0), (work, bytes_))
    ]
    return times[0] / times[1]


def pool_of_log(log: str) -> dict[str, Any]:
    """What the server's log says of its KV pool; without what it does not say."""
    found: dict[str, Any] = {}
    if match := re.search(r"KV cache size: ([\d,]+) tokens", log):
        found["tokens"] = int(match[1].replace(",", ""))
    if match := re.search(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", log):
        found["of_tokens"] = int(match[1].replace(",", ""))
        found["concurrency"] = float(match[2])
    return found


class Gauges:
    """The largest values of a server's gauges, and counters since the first reading."""

    def __init__(self) -> None:
        self.readings = 0
        self._most = dict.fromkeys(("running", "waiting", "usage"), 0.0)
        self._preemptions: list[float] = []

    def read(self, metrics: str) -> None:
        """metrics: Prometheus' text format."""
        names = {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "usage": "vllm:kv_cache_usage_perc",
        }
        for key, name in names.items():
            self._most[key] = max(self._most[key], _sum(metrics, name))
        self._preemptions.append(_sum(metrics, "vllm:num_preemptions_total"))
        self.readings += 1

    def as_json(self) -> dict[str, Any]:
        preemptions = self._preemptions[-1] - self._preemptions[0] if self._preemptions else 0
        return {
            "most_running": int(self._most["running"]),
            "most_waiting": int(self._most["waiting"]),
            "most_kv_usage": round(self._most["usage"], 4),
            "preemptions": int(preemptions),
            "readings": self.readings,
        }


def _sum(metrics: str, name: str) -> float:
    """A sample's value, summed over its labels."""
    lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for value in lines)
