"""The highest rate of requests that a server holds within limits of TTFT and TPOT.

    python -m benchmarks.serving.within --model llama-3.1-8b --out within.json \\
        --servers stock fier-2048 --loads 8192/1024@0.8 32768/4096

By default 90% of the requests have to have a TTFT of 2 s and a mean TPOT of 30 ms at most. A load
is input / output tokens, and maybe @ and the requests/s to begin with, otherwise half the ideal of
the GPU. Rates of a Poisson process go up or down by a factor until one is held and another is not,
and from there by the middle of the two, until they are as near as `--precision` says. Each is a
setting of `benchmarks.serving`, run by `vllm bench serve --goodput`, whose entry also says what
share of the requests was within the limits. A run without all answers, or that ends later than
requests within the limits can, counts as not held, and its entry has the error.

The file is rewritten after every rate. The same command goes on from those that it has; a run that
the time limit ended is repeated.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.common.about import gpu
from benchmarks.common.server import ServerError
from benchmarks.serving.client import bench, get, wait_until_idle, was_over
from benchmarks.serving.figures import Setting, is_whole
from benchmarks.serving.load import (
    Results,
    add_server_options,
    asked_of,
    check_names,
    line_of,
    run_servers,
    up,
)
from benchmarks.serving.rates import WITHIN, Limits, Load, bounds, first_rate, next_rate, tried
from vllm_kvx.tools.ideal.devices import device_of
from vllm_kvx.tools.ideal.shape import Shape

# What a client may take to start, to make its prompts, and to warm the server up. Ample: on a busy
# machine it took more than a minute, and a rate is not to be counted as not held for that.
_CLIENT_S = 180.0
# Of the longest request within the limits: how much later than that a run may end.
_LATER = 0.5


def parse_args(argv: list[str]) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="benchmarks.serving.within", description=about)
    add = parser.add_argument
    add("--loads", nargs="+", required=True, help="INPUT/OUTPUT or INPUT/OUTPUT@FIRST_RATE")
    limits = ["ttft:2000", "tpot:30"]
    add("--within", nargs="+", default=limits, help=f"limits in ms; default: {' '.join(limits)}")
    add("--share", type=float, default=0.9, help="of the requests, which have to be within them")
    add("--precision", type=float, default=0.08, help="of the rate, as a share of it")
    add("--farthest", type=float, default=16.0, help="factor from the first rate, not tried beyond")
    longest = "twice as long as a request within the limits may take, at least 60"
    add("--seconds", type=float, help=f"prompts come in for so long; default: {longest}")
    add_server_options(parser)
    args = parser.parse_args(argv)
    try:
        args.limits = Limits.parse(args.within, args.share, args.seconds)
        args.loads = list(map(Load.parse, args.loads))
        if len(set(map(str, args.loads))) < len(args.loads):
            raise ValueError("--loads has the same lengths twice: give one rate to begin with")
        check_names([*args.servers, *args.layout])
    except ValueError as error:
        parser.error(str(error))
    if not 0.01 <= args.precision <= 1:
        parser.error(f"--precision {args.precision:g}: give 0.01 to 1, 0.08 is 8%")
    if args.farthest < 1:
        parser.error(f"--farthest {args.farthest:g}: a factor is 1 or more")
    return args


class Search:
    """The rates of one name of the results, a server or what is asked of one, for one load."""

    def __init__(self, args: argparse.Namespace, results: Results, name: str, load: Load):
        self.name, self.load = name, load
        self._results, self._args = results, args
        self._first = load.first or _ideal(results.shape, name, load, args.max_num_seqs)

    @property
    def held(self) -> dict[float, bool]:
        entry = self._results.content["servers"].get(self.name, {})
        return tried(entry.get("settings", {}), self.load)

    def next(self) -> Setting | None:
        """What to run; None when the limit is known or out of reach."""
        rate = next_rate(self.held, self._first, self._args.precision, self._args.farthest)
        return None if rate is None else self.load.at(rate, self._args.limits)

    def __str__(self) -> str:
        """What is known, in words."""
        low, high = bounds(self.held)
        limits = self._args.limits
        what = f"TTFT {limits.ttft:g} ms and TPOT {limits.tpot:g} ms for {100 * limits.share:g}%"
        found = "no rate was tried"
        if low is not None:
            found = f"{low:g} requests/s"
            found += ", the highest tried" if high is None else f", not {high:g}"
        elif high is not None:
            found = f"less than {high:g} requests/s, the lowest tried"
        done = "" if self.next() is None else "; not at an end: run the same command again"
        return f"{self.name} {self.load} within {what}: {found}{done}"


def _ideal(shape: Shape, name: str, load: Load, seqs: int) -> float:
    device = device_of((gpu() or "").partition(",")[0])
    if device is None:
        raise SystemExit(f"no ideal of this machine: give a rate to begin with, {load}@1")
    return first_rate(shape, name, load, device, seqs)


def measure(args: argparse.Namespace, results: Results, name: str, model: str, end: float) -> bool:
    """Starts one server and searches what its results lack; whether all is known."""
    asked = asked_of(name, args.layout)
    searches = [Search(args, results, label, load) for load in args.loads for label in asked]
    if any(search.next() for search in searches):
        try:
            with up(args, results, name, model, end, f"{len(searches)} searches") as (url, log):
                first = True
                for search in searches:
                    policy = asked[search.name]
                    while (setting := search.next()) and _fits(args, search, setting, end):
                        limit = _limit(args.limits, setting)
                        seconds = min(limit, end - time.monotonic())
                        found = bench(
                            *(url, model, setting, args.seed, seconds, log, policy, first),
                            more=args.limits.flags,
                        )
                        # Of a server that ended a run says nothing.
                        _check_health(url)
                        judge(found, setting, args.limits, seconds < limit)
                        facts = {"asked_of": name} if policy else {}
                        results.add(search.name, facts, {str(setting): found})
                        print(f"{search.name} {setting}: {_line(found)}", flush=True)
                        first = False
                        if "error" in found:
                            wait_until_idle(url, end)
                        # Other rates would fail, too.
                        if WITHIN not in found:
                            raise ServerError(f"{setting} cannot tell: {found['error'][0]}")
        except ServerError as error:
            print(f"{name}: stopped, {error}", flush=True)
    for search in searches:
        print(search, flush=True)
    return not any(search.next() for search in searches)


def judge(found: dict[str, Any], setting: Setting, limits: Limits, was_short: bool) -> None:
    """Adds to a run whether the rate was held, and drops what there is of single requests.

    Nothing is added where the run cannot tell: no request was answered, the client failed, or the
    run was ended before its own limit (`was_short`).
    """
    measured = found.get("bench", {})
    if is_whole(found, setting):
        found[WITHIN] = limits.count(measured)
    elif measured.get("completed") or (was_over(found) and not was_short):
        found[WITHIN] = {"held": False}
    for key in [key for key, value in measured.items() if isinstance(value, list)]:
        del measured[key]


def _least(limits: Limits, setting: Setting) -> float:
    """Seconds from the first prompt to the last answer, if all are within the limits."""
    assert setting.rate is not None
    return setting.prompts / setting.rate + limits.longest(setting.output)


def _limit(limits: Limits, setting: Setting) -> float:
    """Seconds after which a run is ended: some request took half as long again as it may."""
    return _CLIENT_S + _least(limits, setting) + _LATER * limits.longest(setting.output)


def _check_health(url: str) -> None:
    try:
        get(f"{url}/health")
    except OSError as error:
        raise ServerError(f"the server ended while it was asked: {error}") from error


def _fits(args: argparse.Namespace, search: Search, setting: Setting, end: float) -> bool:
    """Whether the time that is left is what a run takes."""
    if time.monotonic() + _least(args.limits, setting) < end:
        return True
    print(f"{search.name}: no time left for {setting}", flush=True)
    return False


def _line(found: Mapping[str, Any]) -> str:
    verdict = found.get(WITHIN, {})
    if "share" not in verdict:
        return line_of(found) + ("; counts as not held" if verdict else "")
    text = "held" if verdict["held"] else "not held"
    text += f", {100 * verdict['share']:.0f}% within the limits"
    missed = [
        f"{100 * verdict[f'missed_{name}']:.0f}% missed {name.upper()}"
        for name in ("ttft", "tpot")
        if verdict[f"missed_{name}"]
    ]
    return "; ".join([", ".join([text, *missed]), line_of(found)])


def main(argv: list[str]) -> int:
    args = parse_args(argv)

    def results_of(shape: Shape, dummy: bool) -> Results:
        subject = "Rates that servers hold within limits of TTFT and TPOT"
        asked = {WITHIN: args.limits.as_json()}
        return Results(args, argv, shape, dummy, "benchmarks.serving.within", subject, **asked)

    return run_servers(args, results_of, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
