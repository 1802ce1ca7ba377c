"""README.md's table of policies, and its picture: gains beside the answers that they keep.

The table stands between two lines of README.md, BEGIN and END. All figures are read from result
files. Those of speed are of one GPU and of the shape that most files have; a cell from another GPU
says so. Those of answers are of the model that was asked most questions.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common.names import STOCK, served
from benchmarks.report.cells import MISSING
from benchmarks.report.files import (
    Figure,
    File,
    Kept,
    Load,
    figures_of,
    kept_of,
    layer_of,
    layers_of,
    loads_of,
    newest,
    same_method,
    task_sets,
)
from benchmarks.report.loads import is_max, load_ratio
from benchmarks.report.plots import Plot
from benchmarks.serving.figures import PRESETS, Setting

BEGIN, END = "<!-- table of policies -->", "<!-- /table of policies -->"
RESULTS = "benchmarks/results"
FIRST, NEXT = "ttft:130000", "tpot:130000"
LOAD = Setting.parse(PRESETS["8k"][0]).lengths
HEAD = (
    "policy",
    "what it does",
    "first token, 130,000 tokens",
    "next token, 130,000 tokens",
    "requests/s, 8,192 tokens in and 1,024 out",
    "answers kept (95% interval)",
)
# Each with its page and what it does, but for what a figure says.
POLICIES = {
    "fier-4096": ("docs/policies/fier.md", "reads 4,096 tokens a step and drops none"),
    "fier-2048": ("docs/policies/fier.md", "reads 2,048 tokens a step and drops none"),
    "snapkv": ("docs/policies/baselines.md#snapkv", "keeps 10% of the prompt's KV"),
    "snapkv:kv_rate=0.2,after=32": (
        "docs/policies/baselines.md#after-generated-tokens",
        "keeps 20% of it, once 32 tokens are generated",
    ),
    "fastkv:tsp_layer=15": (
        "docs/policies/fastkv.md",
        "keeps 10%; above layer 15 of 32 it runs 20% of the prompt",
    ),
    "speed-24": (
        "docs/policies/speed.md",
        "runs the prompt through 24 of 32 layers; [tuned](docs/use/tuning-for-speed.md) weights",
    ),
}


class Gain(NamedTuple):
    """A gain over stock, and the file that says so."""

    ratio: float
    file: File


class Row(NamedTuple):
    """What is known of a policy. answers: the evaluation with most questions first."""

    policy: str
    first: Gain | None
    next: Gain | None
    requests: Gain | None
    answers: list[Kept]


def rows_of(files: Sequence[File]) -> tuple[list[Row], str | None]:
    """A row a policy, and the GPU that they are of where a cell does not say another."""
    found = [each for each in figures_of(files) if each.baseline == STOCK]
    loads, kept = loads_of(files), kept_of(files)
    places = [(f.gpu, f.model) for f in files if f.kind in ("compare", "serving")]
    # One engine on one GPU.
    places = [place for place in places if place[0] and " x " not in place[0]]
    if not places:
        return [], None
    order = sorted(set(places), key=lambda place: (-places.count(place), str(place)))
    model = order[0][1]
    gpus = [gpu for gpu, of in order if of == model and gpu]
    layers = next(f.content["model"]["layers"] for f in files if f.model == model)
    rows = [
        Row(
            policy,
            _case_gain(policy, FIRST, gpus, model, found),
            _case_gain(policy, NEXT, gpus, model, found),
            _load_gain(policy, gpus, model, loads),
            answers_of(policy, layers, kept),
        )
        for policy in POLICIES
    ]
    return rows, gpus[0]


def _case_gain(
    policy: str, case: str, gpus: Sequence[str], model: str, found: Sequence[Figure]
) -> Gain | None:
    """Of the youngest file of the first GPU that has it."""
    for gpu in gpus:
        here = [f for f in found if (f.file.gpu, f.file.model) == (gpu, model)]
        if each := newest(here).get((policy, case)):
            return Gain(each.ratio, each.file)
    return None


def _load_gain(policy: str, gpus: Sequence[str], model: str, loads: Sequence[Load]) -> Gain | None:
    """With all prompts at once."""
    for gpu in gpus:
        for load in sorted(loads, key=lambda load: load.file.written, reverse=True):
            same = (load.server, load.file.gpu, load.file.model) == (policy, gpu, model)
            wanted = same and is_max(load) and load.setting.lengths == LOAD
            if wanted and (ratio := load_ratio(load, loads)):
                return Gain(ratio, load.file)
    return None


def answers_of(policy: str, layers: int, kept: Sequence[Kept]) -> list[Kept]:
    """The evaluations of one model, those with most questions first.

    A layer is the nearest one in share of the model's layers. `speed-K` has all runs that tuned
    for it without batches at full depth; all other policies have one evaluation, and those of the
    same model by tasks that have none in common with it and with each other. Those of several turns
    ask the same tasks again, and have a column of their own elsewhere.
    """
    if match := re.fullmatch(r"speed-(\d+)", policy):
        tuned = [
            (each.cutoff / each.layers, each)
            for each in kept
            if each.cutoff and each.layers and is_plain(each.weights)
        ]
        return _nearest(tuned, int(match[1]) / layers)
    same = [
        each
        for each in kept
        if same_method(each.policy) == same_method(policy) and not each.has_turns
    ]
    if (layer := layer_of(policy)) is not None:
        shares = []
        for each in same:
            own, of = layer_of(each.policy), layers_of(each.model)
            if own is not None and of:
                shares.append((own / of, each))
        same = _nearest(shares, layer / layers)
    return task_sets(same)


def is_plain(weights: str) -> bool:
    """Whether they were tuned, with every batch under the cut: see `files.Report`."""
    return weights.startswith("tuned") and "full depth" not in weights


def _nearest(shares: Sequence[tuple[float, Kept]], wanted: float) -> list[Kept]:
    """Those whose share of the layers is nearest to `wanted`, most questions first."""
    least = min((abs(share - wanted) for share, _ in shares), default=0.0)
    near = [each for share, each in shares if abs(share - wanted) == least]
    return sorted(near, key=lambda each: -each.n)


def table(files: Sequence[File]) -> list[str]:
    """The lines between BEGIN and END."""
    rows, gpu = rows_of(files)
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, ["---"] * len(HEAD))]
    for row in rows:
        page, what = POLICIES[row.policy]
        gains = (_shown(each, gpu) for each in (row.first, row.next, row.requests))
        cells = [f"[`{served(row.policy)}`]({page})", what, *gains, _answers(row.answers)]
        lines.append("| " + " | ".join(cells) + " |")
    where = f"Gains are over stock vLLM on one {_short(gpu)}, unless a cell names another GPU."
    return [*lines, "", f"{where} A figure leads to its file."] if rows else [f"{MISSING}."]


def _shown(each: Gain | None, gpu: str | None) -> str:
    if each is None:
        return MISSING
    return f"{_linked(f'{each.ratio:.2f}x', each.file)}{_elsewhere(each, gpu)}"


def _linked(text: str, file: File) -> str:
    return f"[{text}]({RESULTS}/{file.name})"


def _elsewhere(each: Gain, gpu: str | None) -> str:
    """Which GPU, where it is not the others'."""
    return "" if each.file.gpu == gpu else f" on an {_short(each.file.gpu)}"


def _short(gpu: str | None) -> str:
    """H100 of NVIDIA H100 80GB HBM3."""
    return str(gpu).removeprefix("NVIDIA ").partition(" ")[0]


def _answers(answers: Sequence[Kept]) -> str:
    """92.2% (89-95, n 112) to 100.6% (98-103, n 224) on 4 task sets; qwen2.5-coder-1.5b."""
    if not answers:
        return MISSING
    first = answers[0]
    where = first.model
    if first.cutoff:
        where += f", {first.layers} layers, cut at {first.cutoff}"
    elif (layer := layer_of(first.policy)) is not None:
        where += f", layer {layer} of {layers_of(first.model)}"
    least, most = (pick(answers, key=lambda each: each.of_full[0]) for pick in (min, max))
    if least is most:
        return f"{_share(first)}; {where}"
    times = f"in {len(answers)} runs" if first.cutoff else f"on {len(answers)} task sets"
    return f"{_share(least)} to {_share(most)} {times}; {where}"


def _share(kept: Kept) -> str:
    """102.0% (100-106, n 168)."""
    middle, low, high = (100 * share for share in kept.of_full)
    return f"{_linked(f'{middle:.1f}%', kept.file)} ({low:.0f}-{high:.0f}, n {kept.n})"


def plots(files: Sequence[File]) -> list[Plot]:
    """A dot a policy: requests/s over stock's beside the answers kept, with their interval."""
    rows, gpu = rows_of(files)
    dots = tuple(
        (
            _label(row, row.requests, gpu),
            round(row.requests.ratio, 4),
            *(round(100 * share, 2) for share in row.answers[0].of_full),
        )
        for row in rows
        if row.requests and row.answers
    )
    title = "Gain and answers kept: further right and up is better"
    axes = (
        "requests/s over stock vLLM (8,192 tokens in, 1,024 out, all at once)",
        "of stock's right answers (%), 95% interval",
    )
    return [Plot("readme", title, "dots", *axes, dots)] if dots else []


def _label(row: Row, gain: Gain, gpu: str | None) -> str:
    tuned = " tuned" if row.answers[0].cutoff else ""
    return f"{row.policy}{tuned}{_elsewhere(gain, gpu)}"


def with_table(page: str, lines: Sequence[str], begin: str = BEGIN, end: str = END) -> str:
    """A page with its table as it has to be, between the lines `begin` and `end`.

    Raises:
        ValueError: these lines are not there, or not once.
    """
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"no place for a table: give the lines {begin} and {end}")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])
