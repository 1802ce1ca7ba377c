"""What one GPU serves within limits of TTFT and TPOT, from files of `benchmarks.serving.within`.

A policy's answers stand beside its rate only where both are of one setting, as in `tradeoffs`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common.names import STOCK, split_name
from benchmarks.report.cells import MISSING, notes, order, reference, table
from benchmarks.report.files import File, Kept, kept_of, layers_of
from benchmarks.report.readme import is_plain
from benchmarks.report.tradeoffs import LONG, NEEDED, answers, best, is_of, setting
from benchmarks.serving.figures import Setting
from benchmarks.serving.rates import WITHIN, Bounds, Limits, Load, bounds, tried

NAME = "what-one-gpu-serves.md"

_ABOUT = f"""
# What one GPU serves

Made by `python -m benchmarks.report` from the files of `benchmarks.serving.within` in
[benchmarks/results](../../benchmarks/results); no figure is written by hand. Numbers in brackets
are the files, [listed in the report](report.md#files).

Requests/s is the highest rate tried, of a Poisson process, at which as many requests as a table
says are within its limits of TTFT and of mean TPOT. "Not at" is the lowest rate tried at which they
are not, and beside it what share of the requests missed each limit there: that is what limits the
server. TTFT and TPOT are those at the rate that is held, in brackets at the lowest one tried where
none is. A run is a sample of some dozens of requests, the same for all servers at the same rate:
where a load has two tables, the one with longer runs says more.
[How it is measured](../../benchmarks/README.md#what-a-server-holds-within-limits).

Answers are those of real checkpoints under the same setting: the same parameters and, where a
policy names a layer, the layer at the same share of the depth. *Generated*, *files* and *long
answers* are [task sets](answers-and-gains.md); *tuned* are weights that were tuned for that policy.
What is not measured says so, and a rate alone is no reason to choose a policy. An answer kept is
one of those that `{STOCK}` has right.

What no table names, a server or a GPU, was not measured within limits, and "or more" is a search
whose end was not reached: [a list](../notebook/servers.md#not-measured). The plan
benchmarks/plans/within.toml has the steps.
"""
_HEAD = ("server", "requests/s", "of stock's", "p90 TTFT, s", "p90 TPOT, ms")
_HEAD_NOT = ("not at", "missed there", "answers kept", "file")


def of_kind(files: Sequence[File]) -> list[File]:
    return [file for file in files if file.kind == WITHIN]


def page(files: Sequence[File]) -> list[str]:
    """The lines of the page; none while there is no file."""
    measured, kept = of_kind(files), kept_of(files)
    lines = _ABOUT.strip().splitlines()
    # Loads with the shortest prompts first, and of each all files, the longest runs first.
    for load in sorted({each for file in measured for each in _loads(file)}, key=_lengths):
        of_load = [file for file in measured if load in _loads(file)]
        for file in sorted(of_load, key=lambda file: -_arrivals(file, load)):
            runs = f", prompts for {_arrivals(file, load):.0f} s" if len(of_load) > 1 else ""
            lines += ["", f"## {_title(file, load)}{runs}", "", _limits(file, load), ""]
            rows = _rows(file, load, kept)
            lines += [*table([*_HEAD, *_HEAD_NOT], rows), *notes([file], rows)]
    return lines if measured else []


def _lengths(load: Load) -> tuple[int, int]:
    return load.input, load.output


def _loads(file: File) -> set[Load]:
    settings = {text for entry in file.content["servers"].values() for text in entry["settings"]}
    return {Load(each.input, each.output) for each in map(Setting.parse, settings)}


def _title(file: File, load: Load) -> str:
    lengths = Setting(1, load.input, load.output).lengths
    weights = dict(pairwise(file.content["settings"]["flags"])).get("--quantization")
    weights = f", weights in {weights}" if weights else ""
    return f"{lengths} on one {file.gpu}: {file.model}{weights}, {file.date}"


def _arrivals(file: File, load: Load) -> float:
    """Seconds for which prompts come in."""
    return Limits(**file.content["settings"][WITHIN]).arrivals(load.output)


def _limits(file: File, load: Load) -> str:
    limits = Limits(**file.content["settings"][WITHIN])
    return (
        f"{100 * limits.share:g}% of the requests: TTFT of {limits.ttft / 1e3:g} s and mean TPOT "
        f"of {limits.tpot:g} ms at most. {load.input:,} tokens in, {load.output:,} out; prompts "
        f"come in for {_arrivals(file, load):.0f} s."
    )


def _rows(file: File, load: Load, kept: Sequence[Kept]) -> list[list[str]]:
    """A row for each server; those that were not asked at this load say so."""
    servers: Mapping[str, Any] = file.content["servers"]
    found = {name: bounds(tried(entry["settings"], load)) for name, entry in servers.items()}
    stock, layers = found.get(STOCK), file.content["model"]["layers"]
    rows = []
    for name in order(found):
        asked = servers[name].get("asked_of")
        own, held = servers[name]["settings"], found[name]
        rows.append(
            [
                f"`{name}`" + (f", asked of a server of `{asked}`" if asked else ""),
                _rate(held),
                _ratio(held, stock) if name != STOCK else "",
                _p90(own, load, held, "ttft", 1e3, 2),
                _p90(own, load, held, "tpot", 1, 1),
                "" if held.high is None else f"{held.high:g}",
                "" if held.high is None else _missed(_measured(own, load, held.high)),
                answers_of(name, layers, kept),
                reference(file),
            ]
        )
    return rows


def _rate(held: Bounds) -> str:
    if held.low is None:
        return MISSING if held.high is None else f"less than {held.high:g}"
    return f"{held.low:g}" if held.high is not None else f"{held.low:g} or more"


def _ratio(held: Bounds, stock: Bounds | None) -> str:
    """Of two rates that are known."""
    known = stock and None not in (*held, *stock)
    if not known or stock is None or held.low is None or stock.low is None:
        return MISSING
    return f"{held.low / stock.low:.2f}x"


def _measured(settings: Mapping[str, Any], load: Load, rate: float) -> Mapping[str, Any]:
    """A run of a rate that was tried."""
    found: Mapping[str, Any] = next(
        measured
        for text, measured in settings.items()
        if (each := Setting.parse(text)).rate == rate
        and (each.input, each.output) == _lengths(load)
        and WITHIN in measured
    )
    return found


def _p90(
    settings: Mapping[str, Any], load: Load, held: Bounds, name: str, unit: float, digits: int
) -> str:
    """At the rate that is held, or else, in brackets, at the lowest one tried."""
    rate = held.high if held.low is None else held.low
    if rate is None:
        return ""
    milliseconds = _measured(settings, load, rate).get("bench", {}).get(f"p90_{name}_ms")
    if milliseconds is None:
        return MISSING
    text = f"{milliseconds / unit:.{digits}f}"
    return f"({text})" if held.low is None else text


def _missed(measured: Mapping[str, Any]) -> str:
    verdict = measured[WITHIN]
    if "share" not in verdict:
        return f"stopped: {measured['error'][0]}"
    missed = (f"{name.upper()} {100 * verdict[f'missed_{name}']:.0f}%" for name in ("ttft", "tpot"))
    return ", ".join(missed)


def answers_of(server: str, layers: int, kept: Sequence[Kept]) -> str:
    """What real checkpoints keep under the setting of a server, whose model has so many layers."""
    policy, dtype = split_name(server)
    if policy is None and dtype is None:
        return ""
    if policy is None or dtype:
        return MISSING
    wanted = setting(policy, layers)
    same = [
        each
        for each in kept
        if not each.weights
        and "@" not in each.policy
        and setting(each.policy, layers_of(each.model)) == wanted
    ]
    cells = []
    for name in (*NEEDED, LONG):
        if found := best(each for each in same if is_of(each, name)):
            cells.append(f"{name}: {answers(found)}, {found.model}")
    # A cut at the same share of the layers, with weights that were tuned for it.
    tuned = [
        each
        for each in kept
        if each.cutoff
        and each.layers
        and is_plain(each.weights)
        and (each.cutoff * layers) % each.layers == 0
        and policy == f"speed-{each.cutoff * layers // each.layers}"
    ]
    if found := best(tuned):
        middle, low, high = (100 * share for share in found.of_full)
        where = f"{found.model}, cut at {found.cutoff} of {found.layers} layers"
        shares = f"{middle:.1f} [{low:.0f}-{high:.0f}], n {found.n} {reference(found.file)}"
        cells.append(f"tuned: {shares}, {where}")
    return "; ".join(cells) or MISSING
