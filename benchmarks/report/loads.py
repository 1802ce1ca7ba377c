"""The tables of `benchmarks.report` on servers under load, each as lines of Markdown."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common.names import STOCK
from benchmarks.engine.shapes import shape_of
from benchmarks.report.cells import MISSING, gain, notes, order, reference, table
from benchmarks.report.files import Load
from benchmarks.serving.figures import PRESETS, Setting, figures, saturation_ratio


def is_max(load: Load) -> bool:
    return load.setting.saturates


def stock_of(load: Load, loads: Sequence[Load]) -> Load | None:
    """Stock's run of the same setting in the same file."""
    same = (x for x in loads if (x.file, x.server, x.setting) == (load.file, STOCK, load.setting))
    return next(same, None)


def load_ratio(load: Load, loads: Sequence[Load], key: str = "requests_per_s") -> float | None:
    """A figure over stock's."""
    stock = stock_of(load, loads)
    if stock is None:
        return None
    ours, theirs = (figures(each.measured)[key] for each in (load, stock))
    return ours / theirs if ours is not None and theirs else None


def load_ideal(load: Load) -> float | None:
    content = load.file.content
    pool = content["servers"].get(STOCK, {}).get("pool", {}).get("tokens")
    if pool is None:
        return None
    shape = shape_of(content["model"])
    flags = content["settings"]["flags"]
    given = dict(pairwise(flags))
    seqs = int(given["--max-num-seqs"])
    is_fp8 = given.get("--quantization", "").startswith("fp8")
    bytes_ = 1 if is_fp8 else 2
    return saturation_ratio(shape, load.server, load.setting, load.file.gpu, pool, seqs, bytes_)


def load_gain(load: Load | None, loads: Sequence[Load]) -> str:
    """Requests/s over stock's, beside the ideal."""
    ratio = load_ratio(load, loads) if load else None
    if load is None or ratio is None:
        return MISSING
    return f"{gain(ratio, load_ideal(load))} {reference(load.file)}"


def under_load(loads: Sequence[Load], lengths: str) -> list[str]:
    """Every server and load of one pair of lengths. Planned settings that are missing say so."""
    head = [
        *("server", "load", "requests/s", "gain (ideal, reached)", "output tok/s"),
        *("TTFT p50 / p99, s", "TPOT p50 / p99, ms", "ITL p50 / p99, ms"),
        *("at once", "preempted", "file"),
    ]
    here = [load for load in loads if load.setting.lengths == lengths]
    measured = {str(load.setting) for load in here}
    rows = [_load_row(load, loads) for load in sorted(here, key=_load_order)]
    for text in planned(lengths):
        if text not in measured:
            setting = Setting.parse(text)
            what = f"{setting.load}, {setting.prompts} prompts"
            rows.append(["all", what, MISSING, *[""] * (len(head) - 3)])
    files = {load.file.number: load.file for load in here}
    return [*table(head, rows), *notes([files[number] for number in sorted(files)], rows)]


def planned(lengths: str) -> list[str]:
    """The settings of the presets with these lengths."""
    texts = [text for name, texts in PRESETS.items() if name != "tiny" for text in texts]
    return [text for text in texts if Setting.parse(text).lengths == lengths]


def all_lengths(loads: Sequence[Load]) -> list[str]:
    """Pairs of lengths, the planned ones first."""
    texts = [text for name, texts in PRESETS.items() if name != "tiny" for text in texts]
    settings = [*map(Setting.parse, texts), *(load.setting for load in loads)]
    return list(dict.fromkeys(setting.lengths for setting in settings))


def _load_order(load: Load) -> tuple[Any, ...]:
    setting = load.setting
    kind = 0 if setting.saturates else 1 if setting.rate else 2
    place = order([load.server, STOCK]).index(load.server)
    return (load.file.number, kind, setting.rate or setting.users or 0, place, load.server)


def _load_row(load: Load, loads: Sequence[Load]) -> list[str]:
    numbers, ratio = figures(load.measured), load_ratio(load, loads)

    def pair(name: str, unit: float, digits: int) -> str:
        both = (numbers[f"{p}_{name}"] for p in ("p50", "p99"))
        shown = (MISSING if ms is None else f"{ms / unit:,.{digits}f}" for ms in both)
        return " / ".join(shown)

    asked = load.file.content["servers"][load.server].get("asked_of")
    return [
        f"`{load.server}`" + (f", asked of a server of `{asked}`" if asked else ""),
        f"{load.setting.load}, {load.setting.prompts} prompts",
        f"{numbers['requests_per_s']:.3f}",
        "" if load.server == STOCK else MISSING if ratio is None else gain(ratio, load_ideal(load)),
        f"{numbers['output_tokens_per_s']:,.0f}",
        pair("ttft", 1000, 2),
        pair("tpot", 1, 1),
        pair("itl", 1, 1),
        str(numbers["most_running"]),
        str(numbers["preemptions"]),
        reference(load.file),
    ]


def published(loads: Sequence[Load], known: Mapping[str, Any]) -> list[str]:
    """What others publish in these settings beside what was measured; nothing without the latter.

    Maximum throughput is output tokens/s of a GPU with all prompts at once; tokens/s per user is
    one over the mean TPOT of one user.
    """
    measures = {
        "max_throughput": ("maximum throughput", "output_tokens_per_s", lambda s: s.saturates),
        "user_tokens_per_s": ("tokens/s per user", "user_tokens_per_s", lambda s: s.users == 1),
    }
    rows = []
    for row in known["rows"]:
        for key, (name, figure, is_wanted) in measures.items():
            for load in loads:
                setting = load.setting
                same = (setting.input, setting.output) == (row["input"], row["output"])
                same = same and load.file.model == known["model"]
                ratio = load_ratio(load, loads, figure)
                if load.server == STOCK or not same or not is_wanted(setting) or ratio is None:
                    continue
                ours = f"`{load.server}` on {load.file.gpu}"
                shown = [setting.lengths, name, f"{row[key]:.2f}x on {known['gpu']}"]
                rows.append([*shown, ours, f"{ratio:.2f}x", reference(load.file)])
    head = ["tokens in/out", "gain in", "published", "here", "gain over stock", "file"]
    return table(head, rows) if rows else []
