"""The tables of `benchmarks.report`, each as lines of Markdown."""

import re
from collections.abc import Callable, Sequence

from benchmarks.common.names import STOCK, split_name
from benchmarks.engine.composed import composed
from benchmarks.engine.ideal import Case
from benchmarks.report.cells import (
    MISSING,
    RESULTS,
    gain,
    notes,
    order,
    reference,
    table,
    value,
    words,
)
from benchmarks.report.files import (
    Figure,
    File,
    Kept,
    Load,
    layer_of,
    layers_of,
    most_asked,
    newest,
    same_method,
    task_sets,
)
from benchmarks.report.loads import is_max, load_gain, load_ideal, load_ratio
from benchmarks.serving.figures import PRESETS, Setting
from vllm_kvx.policy.spec import parse_policy

# Runs differ by about this much; a smaller loss is none.
LOSS = 0.99
FAR = 0.8
# Policies that the README recommends, beside those whose speed was measured.
ALSO = ("fier-512", "fier-1024", "snapkv", "snapkv:kv_rate=0.2")
GLANCE = {
    "TTFT, 32,768": "ttft:32768",
    "TTFT, 130,000": "ttft:130000",
    "TPOT, 130,000": "tpot:130000",
    "decode, pool full of 128,000": "pool_decode:128000",
    "KV pool": "pool",
    "longest wait, 128,000 come in": "itl:128000",
}


def glance(found: Sequence[Figure]) -> list[str]:
    """A row for every policy of one machine and model: gains alone and with full pools."""
    young = newest(found)
    rows = []
    for name in order(each.engine for each in found):
        row = [f"`{name}`"]
        for case in GLANCE.values():
            each = young.get((name, case))
            shown = f"{gain(each.ratio, each.ideal)} {reference(each.file)}" if each else MISSING
            row.append(shown + (", Triton ops" if each and each.ops == "triton" else ""))
        rows.append(row)
    return table(["policy", *GLANCE], rows)


def glance_of_load(
    found: Sequence[Figure], loads: Sequence[Load], kept: Sequence[Kept], layers: int
) -> list[str]:
    """The same policies with all prompts at once, and what they keep of answers."""
    saturated = {(load.server, load.setting.lengths): load for load in loads if is_max(load)}
    lengths = [Setting.parse(PRESETS[name][0]).lengths for name in ("8k", "32k", "128k")]
    rows = []
    for name in order([each.engine for each in found] + [each.server for each in loads]):
        if name != STOCK:
            gains = [load_gain(saturated.get((name, each)), loads) for each in lengths]
            rows.append([f"`{name}`", *gains, kept_cell(name, kept, layers)])
    head = ["policy", *(f"requests/s, {each}" for each in lengths), "answers kept, %"]
    return table(head, rows)


def kept_cell(name: str, kept: Sequence[Kept], layers: int) -> str:
    """The answers that a policy kept, on the model where most questions were asked.

    Of `speed-K` every model's, tuned and not, at its cutoff nearest in share of the layers. Where
    a budget of retrieval was not asked, or a layer, those of the nearest one that was.
    """
    policy, dtype = split_name(name)
    wanted = same_method(name)
    same = [each for each in kept if not each.layers and same_method(each.policy) == wanted]
    # Two questions of a chat ask the same tasks again.
    if once := [each for each in same if not each.has_turns] or same:
        return _at_layer(name, once, layers)
    if dtype or policy is None:
        return MISSING
    if match := re.fullmatch(r"speed-(\d+)", policy):
        near = _cuts_near(int(match[1]) / layers, kept)
        return "; ".join(map(shares, near)) or MISSING
    if match := re.fullmatch(r"(fier|quest)-(\d+)", policy):
        asked, own = _by_budget(match[1], kept), int(match[2])
        nearest = min(asked, key=lambda budget: abs(budget - own), default=None)
        if nearest is not None:
            return f"{MISSING}; another budget: {shares(asked[nearest])}"
    return MISSING


def _at_layer(name: str, same: Sequence[Kept], layers: int) -> str:
    """The answers `same` of one method; where it names a layer, those at the nearest share."""
    if (layer := layer_of(name)) is None:
        return _by_policy(same)
    away: dict[float, list[Kept]] = {}
    for each in same:
        own, count = layer_of(each.policy), layers_of(each.model)
        if own is not None and count is not None:
            away.setdefault(abs(own - layer / layers * count), []).append(each)
    if not away:
        return MISSING
    nearest = _by_policy(away[least := min(away)])
    # Models of other depths have no nearer one.
    return nearest if least <= 0.5 else f"{MISSING}; another layer: {nearest}"


def _by_policy(same: Sequence[Kept]) -> str:
    """What each policy of one method kept, apart from its layers least and most by task set."""
    named: dict[str, list[Kept]] = {}
    for each in same:
        policy, at, dtype = each.policy.partition("@")
        named.setdefault(str(parse_policy(policy)) + at + dtype, []).append(each)
    return "; ".join(_spread(task_sets(each)) for _, each in sorted(named.items()))


def _spread(sets: Sequence[Kept]) -> str:
    """92.2 [89-95], n 112 [17] to 100.6 [98-103], n 224 [21], on 4 task sets: `fier-2048`, small"""
    least, most = (pick(sets, key=lambda each: each.of_full[0]) for pick in (min, max))
    if least is most:
        return shares(least)
    ends = (f"{interval(each)}, n {each.n} {reference(each.file)}" for each in (least, most))
    return f"{' to '.join(ends)}, on {len(sets)} task sets: `{least.policy}`, {least.model}"


def _cuts_near(own: float, kept: Sequence[Kept]) -> list[Kept]:
    """By model and kind of weights the cut nearest to `own`, a share of the layers.

    Of equal ones that of the youngest file, and of those in it the first: trials come last.
    """
    near: dict[tuple[str, bool], tuple[float, Kept]] = {}
    for each in sorted(kept, key=lambda k: (k.file.written, k.file.name)):
        if each.cutoff is not None and each.layers:
            away = abs(each.cutoff / each.layers - own)
            kind = (each.model, each.weights == "not tuned")
            best = near.get(kind)
            is_later = best is not None and each.file is not best[1].file
            if best is None or away < best[0] or (away == best[0] and is_later):
                near[kind] = (away, each)
    return [each for _, (_, each) in sorted(near.items())]


def _by_budget(method: str, kept: Sequence[Kept]) -> dict[int, Kept]:
    """By budget of `method` alone the evaluation where most questions were asked."""
    asked = ((re.fullmatch(rf"{method}-(\d+)", each.policy), each) for each in most_asked(kept))
    return {int(match[1]): each for match, each in asked if match}


def shares(each: Kept) -> str:
    """96.8 [94-100], n 224: `fier-512`, qwen2.5-coder-1.5b [12]"""
    what = f"`{each.policy}`" + (f" of {each.layers} layers" if each.layers else "")
    what += f", {each.model}" + (f", {each.weights}" if each.weights else "")
    return f"{interval(each)}, n {each.n}: {what} {reference(each.file)}"


def interval(each: Kept) -> str:
    """96.8 [94-100], in percent."""
    middle, low, high = (100 * share for share in each.of_full)
    return f"{middle:.1f} [{low:.0f}-{high:.0f}]"


def waits(files: Sequence[File]) -> list[str]:
    """Waits between tokens of four decoding requests while a long prompt comes in."""
    rows = []
    for file in files:
        for name, engine in file.content["engines"].items() if file.kind == "compare" else ():
            for case, result in engine.get("cases", {}).items():
                if case.startswith("itl:") and "median" in result:
                    both = [result.get(key) for key in ("p50_ms", "p99_ms")]
                    shown = [MISSING if ms is None else f"{ms:,.0f} ms" for ms in both]
                    tokens = f"{Case.parse(case).length:,}"
                    row = [f"`{name}`", tokens, *shown, value(result), reference(file)]
                    rows.append(row)
    head = ["engine", "prompt tokens", "p50", "p99", "longest", "file"]
    return table(head, rows)


def starts(files: Sequence[File]) -> list[str]:
    """Seconds until an engine is up, with empty caches of what is compiled, and with them."""
    head = ["engine", "cold", "over stock's", "warm", "over stock's", "file"]
    rows = []
    for file in files:
        engines = file.content["engines"] if file.kind == "compare" else {}
        stock = engines.get(STOCK, {}).get("starts", {})
        for name, engine in engines.items():
            row = [f"`{name}`"]
            for key in ("cold_s", "warm_s") if "starts" in engine else ():
                took, base = engine["starts"][key], stock.get(key)
                row.append(MISSING if took is None else f"{took:.0f} s")
                row.append(f"{took / base:.2f}x" if took and base else "")
            if len(row) > 1:
                rows.append([*row, reference(file)])
    return table(head, rows)


def compositions(files: Sequence[File]) -> list[str]:
    """What is measured together beside the product of what each part gains alone."""
    head = ["policy", "case", "measured", "product of parts", "of it", "ideal", "parts", "file"]
    rows = []
    for file in files:
        for each in composed(file.content) if file.kind == "compare" else ():
            product, ideal = each.product, each.ideal
            parts = (MISSING if g is None else f"{g:.2f}x" for g in each.parts.values())
            rows.append(
                [
                    f"`{each.engine}`",
                    words(each.case, {"pool_filled": each.filled}),
                    f"{each.measured:.2f}x",
                    MISSING if product is None else f"{product:.2f}x",
                    "" if product is None else f"{100 * each.measured / product:.0f}%",
                    "none" if ideal is None else f"{ideal:.2f}x",
                    ", ".join(parts),
                    reference(file),
                ]
            )
    return [*table(head, rows), *notes(files, rows)]


def sessions(files: Sequence[File]) -> list[str]:
    """What `benchmarks.serving.turns` measured; ratios are of turns that both answered in full."""
    head = ["policy", "later turns from the cache", "mean TTFT, later turns", "over stock's"]
    head += ["where stock holds all", "tok/s over stock's", "sessions held to", "file"]
    rows = []
    for file in files:
        for name, entry in file.content["policies"].items() if file.kind == "turns" else ():
            later, against = entry["later"], entry.get("against_stock") or {}
            all_turns, fitting = (against.get(key, {}) for key in ("later", "fitting"))
            ratios = (
                all_turns.get("mean_ttft"),
                fitting.get("mean_ttft"),
                all_turns.get("tokens_per_s"),
            )
            rows.append(
                [
                    f"`{name}`",
                    f"{100 * later['hit_rate']:.1f}%" if later["hit_rate"] is not None else MISSING,
                    f"{later['mean_ttft_ms']:,.0f} ms" if later["mean_ttft_ms"] else MISSING,
                    *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
                    f"{entry['all_held_to']:,} tokens",
                    reference(file),
                ]
            )
    return table(head, rows)


def answers(found: Sequence[Figure], loads: Sequence[Load], kept: Sequence[Kept]) -> list[str]:
    """Answers kept by the policies above, apart from their layers, by ALSO and by SPEED's cuts."""
    measured = [each.engine for each in found] + [each.server for each in loads]
    names = answered(found, loads)
    share = "kept of `full`'s right answers, % [95%]"
    head = ["policy", "model", "weights", share, "n", "`full` is right, %", "file"]
    rows = []
    for each in sorted(kept, key=lambda k: (same_method(k.policy), k.model, k.policy, k.weights)):
        if each.layers or same_method(each.policy) in names:
            row = [f"`{each.policy}`" + (f" of {each.layers} layers" if each.layers else "")]
            row += [each.model, each.weights or "as they are", interval(each), str(each.n)]
            rows.append([*row, f"{100 * each.full:.1f}", reference(each.file)])
    there = {same_method(each.policy) for each in kept}
    for name in order(each for each in measured if same_method(each) not in there):
        if name != STOCK:
            rows.append([f"`{name}`", "", "", MISSING, "", "", ""])
    return table(head, rows)


def answered(found: Sequence[Figure], loads: Sequence[Load]) -> set[str]:
    """Methods whose answers are told: those with speeds, and ALSO. Nothing where none has one."""
    names = {same_method(each.engine) for each in found}
    names |= {same_method(each.server) for each in loads}
    return names | set(map(same_method, ALSO)) if names else names


def _named(each: Figure) -> str:
    """The policy, and whether Triton's ops retrieved."""
    return f"`{each.engine}`" + (", Triton ops" if each.ops == "triton" else "")


def losses(found: Sequence[Figure], loads: Sequence[Load]) -> list[str]:
    """Everything below stock by more than runs differ."""
    rows = [
        (each.ratio, [_named(each), words(each.case, each.result), f"{each.ratio:.3f}x"], each.file)
        for each in found
        if each.ratio < LOSS
    ]
    worse: dict[str, tuple[str, Callable[[float], float]]] = {
        "requests_per_s": ("requests/s", lambda ratio: ratio),
        "p99_ttft": ("p99 TTFT", lambda ratio: 1 / ratio),
        "p99_itl": ("p99 ITL", lambda ratio: 1 / ratio),
    }
    for load in loads:
        for key, (name, as_gain) in worse.items():
            ratio = load_ratio(load, loads, key)
            if load.server != STOCK and ratio and as_gain(ratio) < LOSS:
                what = f"{name}, {load.setting.lengths}, {load.setting.load}"
                row = [f"`{load.server}`", what, f"{as_gain(ratio):.3f}x"]
                rows.append((as_gain(ratio), row, load.file))
    rows.sort(key=lambda row: row[0])
    return table(
        ["policy", "case", "gain over stock", "file"],
        ([*row, reference(file)] for _, row, file in rows),
    )


def far(found: Sequence[Figure], loads: Sequence[Load]) -> list[str]:
    """Everything that reaches less than four fifths of its ideal."""
    every = [
        (each.ratio, each.ideal, _named(each), words(each.case, each.result), each.file)
        for each in found
    ]
    for load in loads:
        ratio, ideal = load_ratio(load, loads), load_ideal(load)
        if load.server != STOCK and ratio is not None:
            what = f"requests/s, {load.setting.lengths}, {load.setting.load}"
            every.append((ratio, ideal, f"`{load.server}`", what, load.file))
    short = [row for row in every if row[1] is not None and row[0] < FAR * row[1]]
    rows = [
        [name, case, f"{ratio:.2f}x", f"{ideal:.2f}x", f"{100 * ratio / ideal:.0f}%", ref]
        for ratio, ideal, name, case, file in short
        if (ref := reference(file)) and ideal is not None
    ]
    rows.sort(key=lambda row: float(row[4].rstrip("%")))
    return table(["policy", "case", "gain", "ideal", "reached", "file"], rows)


def sources(files: Sequence[File]) -> list[str]:
    """The files, what they measured, and with what."""
    rows = []
    for file in files:
        runs = file.content.get("runs") or []
        commits = dict.fromkeys(str(run.get("commit"))[:7] for run in runs) or {
            str(file.about["commit"] or "")[:7]: None
        }
        link = f"[{file.title}]({RESULTS}/{file.name})"
        machine = file.gpu or ""
        rows.append(
            [
                str(file.number),
                link,
                file.model,
                machine,
                file.date,
                ", ".join(filter(None, commits)),
            ]
        )
    return table(["", "file", "model", "GPU", "date", "commit"], rows)
