"""Rates that a server holds: at which enough requests stay within limits of TTFT and TPOT.

A rate is tried as a setting of `benchmarks.serving` like any other. What was found is written
beside the figures of the setting, and a search goes on from what a results file has.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks.common.names import split_name
from benchmarks.serving.figures import Setting
from vllm_kvx.tools.ideal.devices import Device
from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import full_work, least_time, work_of

# The key of a setting's entry, and of a file's settings.
WITHIN = "within"
# What brackets the limit: the next rate up or down.
_STEP = 1.5
# Digits of a rate, so that settings have short names.
_DIGITS = 3
_FEWEST = 16
_LEAST_S = 60.0
# Of the ideal rate with all prompts at once.
_FIRST = 0.5
_LOAD = re.compile(r"(?P<input>\d+)/(?P<output>\d+)(@(?P<rate>\d+(\.\d+)?))?")
_NAMES = ("ttft", "tpot")


@dataclass(frozen=True)
class Limits:
    """What requests have to stay within, and how many of them.

    ttft, tpot: ms; a request's TPOT is its mean. share: of all requests, above 0 and at most 1.
    seconds: for which prompts come in; None is `arrivals`' default.
    """

    ttft: float
    tpot: float
    share: float
    seconds: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str], share: float, seconds: float | None) -> "Limits":
        """texts: `ttft:2000` and `tpot:30`. Raises ValueError, saying what is allowed."""
        found = {}
        for text in texts:
            match = re.fullmatch(r"(ttft|tpot):(\d+(\.\d+)?)", text)
            if match is None or not float(match[2]) or match[1] in found:
                raise ValueError(f"{text!r}: write both limits in ms, ttft:2000 tpot:30")
            found[match[1]] = float(match[2])
        if len(found) < len(_NAMES):
            raise ValueError("write both limits in ms, ttft:2000 tpot:30")
        if not 0 < share <= 1:
            raise ValueError(f"{share:g}: a share of the requests is above 0 and at most 1")
        if seconds is not None and seconds <= 0:
            raise ValueError(f"{seconds:g}: prompts come in for more than 0 seconds")
        return cls(**found, share=share, seconds=seconds)

    def as_json(self) -> dict[str, float | None]:
        return asdict(self)

    @property
    def flags(self) -> list[str]:
        """What `vllm bench serve` is told, so that it counts the requests within them."""
        given = [f"{name}:{getattr(self, name):g}" for name in _NAMES]
        return ["--goodput", *given, "--save-detailed"]

    def longest(self, output: int) -> float:
        """Seconds that a request takes at most within the limits."""
        return (self.ttft + (output - 1) * self.tpot) / 1e3

    def arrivals(self, output: int) -> float:
        """Seconds for which prompts come in.

        By default twice as long as a request may take, and a minute at least: so requests that come
        in the middle decode beside as many others as at a rate that never ends.
        """
        return self.seconds or max(_LEAST_S, 2 * self.longest(output))

    def count(self, bench: Mapping[str, Any]) -> dict[str, Any]:
        """The share of a run's requests within the limits, and those that missed each.

        bench: what `vllm bench serve` wrote with `flags`, all requests answered.
        """
        total = bench["completed"]
        share = bench["request_goodput"] / bench["request_throughput"]
        outputs = zip(bench["itls"], bench["output_lens"], strict=True)
        tpots = [sum(waits) / (tokens - 1) for waits, tokens in outputs if tokens > 1]
        return {
            "share": round(share, 4),
            "missed_ttft": round(sum(1e3 * x > self.ttft for x in bench["ttfts"]) / total, 4),
            "missed_tpot": round(sum(1e3 * x > self.tpot for x in tpots) / total, 4),
            # A product of floats: 9 of 10 requests are nine tenths.
            "held": share > self.share - 1e-6,
        }


@dataclass(frozen=True)
class Load:
    """Lengths of prompts and outputs in tokens, and the rate to begin with (requests/s)."""

    input: int
    output: int
    first: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Raises ValueError, saying what is allowed."""
        match = _LOAD.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r}: write input / output, 8192/1024, and maybe @ and the requests/s to "
                "begin with, 8192/1024@0.8"
            )
        length, output = int(match["input"]), int(match["output"])
        first = float(match["rate"]) if match["rate"] else None
        if not length or output < 2 or (first is not None and not 0.01 <= first <= 10000):
            raise ValueError(
                f"{text!r}: the input is above 0, the output above 1, for a TPOT, and the rate "
                "from 0.01 to 10000"
            )
        return cls(length, output, first)

    def at(self, rate: float, limits: Limits) -> Setting:
        """The setting that tries a rate."""
        prompts = max(_FEWEST, math.ceil(rate * limits.arrivals(self.output)))
        return Setting(prompts, self.input, self.output, rate=rate)

    def __str__(self) -> str:
        return f"{self.input}/{self.output}"


class Bounds(NamedTuple):
    """The highest rate that was held, and the lowest that was not; None if there is none.

    A rate above one that was not held does not count as held.
    """

    low: float | None
    high: float | None


def tried(settings: Mapping[str, Mapping[str, Any]], load: Load) -> dict[float, bool]:
    """By rate whether it was held, of a server's settings in a results file."""
    found = {}
    for text, measured in settings.items():
        setting = Setting.parse(text)
        same = (setting.input, setting.output) == (load.input, load.output)
        if same and setting.rate is not None and WITHIN in measured:
            found[setting.rate] = bool(measured[WITHIN]["held"])
    return found


def bounds(held: Mapping[float, bool]) -> Bounds:
    high = min((rate for rate, well in held.items() if not well), default=None)
    below = (rate for rate, well in held.items() if well and (high is None or rate < high))
    return Bounds(max(below, default=None), high)


def next_rate(
    held: Mapping[float, bool], first: float, precision: float, farthest: float
) -> float | None:
    """The rate to try next; None if the limit is known, or too far from `first`.

    A factor brackets the limit; from then on the middle of the bracket, as a ratio, is tried, until
    its ends are apart by `precision` at most, as a share of the lower one. Rates that are further
    from `first` than by the factor `farthest` are not tried.
    """
    low, high = bounds(held)
    if low is None and high is None:
        return _round(first)
    if high is None:
        assert low is not None
        rate = low * _STEP
    elif low is None:
        rate = high / _STEP
    elif high / low - 1 <= precision:
        return None
    else:
        rate = math.sqrt(low * high)
    rate = _round(rate)
    near = first / farthest <= rate <= first * farthest
    return rate if near and rate not in held else None


def _round(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")


def first_rate(shape: Shape, server: str, load: Load, device: Device, seqs: int) -> float:
    """Half the ideal rate of a device that always has `seqs` requests to run, by `least_time`."""
    work = work_of(split_name(server)[0], shape.layers, load.input)
    work = work or full_work(shape.layers, load.input)
    pool = float(seqs * (load.input + load.output) * shape.layers)
    return _FIRST / least_time(shape, work, load.output, device, pool, seqs)
