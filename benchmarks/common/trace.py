"""What a device and its host did in some steps, from the trace that ``torch.profiler`` exports."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
# Of a list that the file keeps: kernels, operators and calls, and what the device waits for.
KERNELS, HOST, WAITS = 15, 10, 5
_NAME = 60
# Shorter pauses are those between any two kernels.
_PAUSE_US = 2.0


def summary(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """Milliseconds and calls of a step.

    device_busy_ms: while anything runs there; None without a device. kernels: those that take most.
    waits: longest pauses of the device, by what it runs next. parts: of the host's marks, the time
    that it spends there, and the device in what is launched there. cuda_calls, cpu_ops: what takes
    the host most, of calls and of operators without those within.

    Args:
        events: of a Chrome trace, times in microseconds.
        steps: that they are of.
    """
    spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    of = defaultdict[str, list[Event]](list)
    for event in spans:
        of[event.get("cat", "")].append(event)
    device = sorted((e for cat in ON_DEVICE for e in of[cat]), key=lambda e: e["ts"])
    calls = [e for cat in CALLS for e in of[cat]]
    busy, waits = _busy(device)
    return {
        "device_busy_ms": _ms(busy, steps) if device else None,
        "kernels": _top(((e["name"], e["dur"]) for e in device), KERNELS, steps),
        "waits": _top(waits, WAITS, steps),
        "parts": _parts(of["user_annotation"], device, calls, steps),
        "cuda_calls": _top(((e["name"], e["dur"]) for e in calls), HOST, steps),
        "cpu_ops": _top(_own_times([*of["cpu_op"], *calls], of["cpu_op"]), HOST, steps),
    }


def _ms(us: float, steps: int) -> float:
    return round(us / 1e3 / steps, 4)


def _top(timed: Iterable[tuple[str, float]], count: int, steps: int) -> list[dict[str, Any]]:
    """The names that take most, of (name, microseconds)."""
    total, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for name, us in timed:
        total[name[:_NAME]] += us
        calls[name[:_NAME]] += 1
    names = sorted(total, key=total.__getitem__, reverse=True)[:count]
    return [
        {"name": name, "ms": _ms(total[name], steps), "calls": round(calls[name] / steps, 2)}
        for name in names
    ]


def _busy(device: Sequence[Event]) -> tuple[float, list[tuple[str, float]]]:
    """Microseconds in which anything runs, and pauses by the name of what ends them.

    device: by the time of their beginning.
    """
    busy, waits = 0.0, list[tuple[str, float]]()
    end = None
    for event in device:
        begin, last = event["ts"], event["ts"] + event["dur"]
        if end is not None and begin - end > _PAUSE_US:
            waits.append((event["name"], begin - end))
        begin = begin if end is None else max(begin, end)
        busy += max(last - begin, 0.0)
        end = last if end is None else max(end, last)
    return busy, waits


def _own_times(nested: Sequence[Event], wanted: Sequence[Event]) -> list[tuple[str, float]]:
    """(name, microseconds) of the `wanted` events, without the time of those within them."""
    own = {id(e): float(e["dur"]) for e in wanted}
    open_spans = defaultdict[Any, list[Event]](list)
    for event in sorted(nested, key=lambda e: (e["ts"], -e["dur"])):
        above = open_spans[event.get("tid")]
        while above and above[-1]["ts"] + above[-1]["dur"] <= event["ts"]:
            above.pop()
        if above and id(above[-1]) in own:
            own[id(above[-1])] -= event["dur"]
        above.append(event)
    return [(e["name"], max(own[id(e)], 0.0)) for e in wanted]


def _parts(
    marks: Sequence[Event], device: Sequence[Event], calls: Sequence[Event], steps: int
) -> dict[str, dict[str, float]]:
    """By the name of a mark, the host's and the device's milliseconds; marks may lie in others.

    A kernel is of the innermost mark that its launch lies in, on the host's time.
    """
    begins = [(e["ts"], e) for e in sorted(marks, key=lambda e: (e["ts"], -e["dur"]))]
    starts = [ts for ts, _ in begins]
    launched = {
        call["args"]["correlation"]: call["ts"]
        for call in calls
        if "correlation" in call.get("args", {})
    }
    host, of_device = defaultdict[str, float](float), defaultdict[str, float](float)
    for mark in marks:
        host[mark["name"]] += mark["dur"]
    for event in device:
        when = launched.get(event.get("args", {}).get("correlation"))
        if when is None:
            continue
        for _, mark in reversed(begins[: bisect_right(starts, when)]):
            if when < mark["ts"] + mark["dur"]:
                of_device[mark["name"]] += event["dur"]
                break
    return {
        name: {"host_ms": _ms(host[name], steps), "device_ms": _ms(of_device[name], steps)}
        for name in sorted(host)
    }
