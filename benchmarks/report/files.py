"""The result files that `benchmarks.report` reads, by kind."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.files import kind_of, read_json
from benchmarks.common.names import STOCK, baseline_of, split_name
from benchmarks.engine.compare import derive
from benchmarks.engine.composed import lines_of
from benchmarks.engine.shapes import shape_of
from benchmarks.serving.figures import Setting, is_whole
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy

# Superseded results.
OLD = "old/"
MODELS = Path(__file__).resolve().parents[1] / "checkpoint" / "real.json"
# Of right answers in full: below that a share of them tells little.
LEAST_FULL = 0.2
# Parameters that name a layer of one model; another model's is another. `online` is no layer.
_LAYER = re.compile(r"(?:tsp_layer|pivot|min_layer|max_layer|layer)=(\d+)")
# How long a prompt has to be before retrieval pays says nothing about answers.
_CROSSOVER = re.compile(r"dense_below=\w+")
# What `vllm-kvx evaluate` asks of a policy that retrieves, whether its name has it or not.
_ALWAYS = re.compile(r"dense_below=0")
# CriticalKV's scores in SnapKV: one method under two names.
_CRITICAL = "score=critical"


@dataclass(frozen=True)
class File:
    """A result file.

    number: its place in the report's list. name: its path in the results' folder. kind: what
    wrote it.
    """

    number: int
    name: str
    kind: str
    content: dict[str, Any]

    @property
    def title(self) -> str:
        """The name without its folder."""
        return self.name.rpartition("/")[2]

    @property
    def about(self) -> Mapping[str, Any]:
        """The head: see `benchmarks.common.about`."""
        head: Mapping[str, Any] = self.content["about"]
        return head

    @property
    def gpu(self) -> str | None:
        """The GPU of all its runs; with how many, where several are ranks of one engine."""
        name = self.about["device"]
        settings = self.content.get("settings")
        engine = settings.get("engine", {}) if isinstance(settings, dict) else {}
        ranks = engine.get("tensor_parallel_size", 1)
        several = f"{ranks} x " if ranks > 1 else ""
        return several + str(name).partition(",")[0] if name else None

    @property
    def date(self) -> str:
        """Of the last run, as yyyy-mm-dd; empty if the file does not say."""
        return self.written[:10]

    @property
    def written(self) -> str:
        """The date, with the time of day where the file has one."""
        return str(self.about["date"] or "")

    @property
    def model(self) -> str:
        model = self.content.get("model")
        if model is None:
            models = dict.fromkeys(report.model for report in reports_of(self))
            return ", ".join(models)
        return str(model["name"] if isinstance(model, dict) else model)


def read(folder: Path) -> tuple[list[File], dict[str, str]]:
    """The files that the report is made of, and why each other JSON file is left out.

    What newer runs have superseded, in the folder `old`, is not looked at.
    """
    files: list[File] = []
    others: dict[str, str] = {}
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.json")}
    for name, path in sorted(paths.items()):
        if name.startswith(OLD):
            continue
        content = read_json(path)
        kind = kind_of(content)
        if kind is None:
            others[name] = "no figures of a policy that this page has a table for"
        elif kind in ("compare", "serving", "within", "turns") and not _has_gpu(content):
            others[name] = "measured without a GPU"
        else:
            if kind == "compare":
                derive(content, shape_of(content["model"]))
            files.append(File(len(files) + 1, name, kind, content))
    return files, others


class Report(NamedTuple):
    """An evaluation in a file.

    weights: whether they were tuned for SPEED; empty where no SPEED was asked.
    layers: of the model; None where the file does not say.
    """

    model: str
    weights: str
    layers: int | None
    content: Mapping[str, Any]


def reports_of(file: File) -> list[Report]:
    """Every evaluation in a file."""
    content, found = file.content, list[Report]()
    if file.kind == "evaluate":
        found.append(Report(str(content["model"]), "", None, content))
    elif file.kind == "speed_sweep":
        for entry in content["cutoffs"].values():
            if report := entry.get("report"):
                record = entry["record"]
                tokens = record["data"]["tokens"] * record["training"]["epochs"]
                weights = f"tuned on {tokens / 1e6:.1f}M tokens"
                if share := record["training"].get("at_full_depth"):
                    weights += f", {100 * share:g}% of the batches at full depth"
                original = str(report["original"])
                found.append(Report(original, weights, record["layers"], report))
    elif file.kind == "speed_untuned":
        for model, entry in content.items():
            if isinstance(entry, dict) and "by_cutoff" in entry:
                layers = entry["diagnosis"]["layers"]
                found.append(Report(model, "not tuned", layers, entry["by_cutoff"]))
    return found


def _has_gpu(content: Mapping[str, Any]) -> bool:
    return all(run.get("gpu") for run in content["runs"])


@dataclass(frozen=True)
class Figure:
    """One measurement of `benchmarks.engine.compare` beside stock's, of one file.

    case: `pool` or a case. result and stock: what the file has of it. ops: those that retrieved,
    empty where none did or the file does not say. baseline: what the gain is over.
    """

    file: File
    engine: str
    case: str
    result: Mapping[str, Any]
    stock: Mapping[str, Any]
    ops: str = ""
    baseline: str = STOCK

    @property
    def ratio(self) -> float:
        return float(self.result["ratio_to_stock"])

    @property
    def ideal(self) -> float | None:
        ideal = self.result.get("ideal")
        return None if ideal is None else float(ideal)


def figures_of(files: Sequence[File]) -> list[Figure]:
    """Everything that was measured beside stock, but stock itself."""
    found = []
    for file in files:
        if file.kind != "compare":
            continue
        engines = file.content["engines"]
        baseline = baseline_of(engines) or STOCK
        stock = {case: result for _, case, result in lines_of(baseline, engines.get(baseline, {}))}
        for engine, entry in engines.items():
            ops = entry.get("resolved", {}).get("retrieval_ops", "")
            for name, case, result in lines_of(engine, entry):
                if engine != baseline and "ratio_to_stock" in result:
                    base = stock[case.partition("@")[0]]
                    own = ops if re.search(r"\b(fier|quest)-", name) else ""
                    found.append(Figure(file, name, case, result, base, own, baseline))
    return found


def newest(figures: Sequence[Figure]) -> dict[tuple[str, str], Figure]:
    """By engine and case the figure of the youngest file, of Triton's ops where no other is."""
    ordered = sorted(
        figures, key=lambda each: (each.ops != "triton", each.file.written, each.file.name)
    )
    return {(each.engine, each.case): each for each in ordered}


@dataclass(frozen=True)
class Load:
    """One setting of one server of `benchmarks.serving`."""

    file: File
    server: str
    setting: Setting
    measured: Mapping[str, Any]


def loads_of(files: Sequence[File]) -> list[Load]:
    """All settings that were measured whole."""
    found = []
    for file in files:
        if file.kind != "serving":
            continue
        for server, entry in file.content["servers"].items():
            for text, measured in entry["settings"].items():
                setting = Setting.parse(text)
                if is_whole(measured, setting):
                    found.append(Load(file, server, setting, measured))
    return found


@dataclass(frozen=True)
class Kept:
    """What a policy kept of a model's right answers: value and 95% interval, as shares.

    full: the share of all questions that full answers have right. weights, layers: see `Report`.
    """

    file: File
    model: str
    policy: str
    of_full: tuple[float, float, float]
    full: float
    n: int
    weights: str = ""
    layers: int | None = None

    @property
    def weight(self) -> tuple[bool, int, str]:
        """What of two evaluations goes first by; a model that answers little tells little."""
        return self.full >= LEAST_FULL, self.n, self.file.written

    @property
    def has_turns(self) -> bool:
        """Whether several questions of a chat were asked."""
        return (self.file.content.get("turns") or 1) > 1

    @property
    def cutoff(self) -> int | None:
        """K of plain `speed-K`, where the number of layers is known."""
        match = re.fullmatch(r"speed-(\d+)", self.policy)
        return int(match[1]) if match and self.layers else None


def kept_of(files: Sequence[File]) -> list[Kept]:
    """All policies over all tasks and lengths of each evaluation."""
    return [
        each for file in files for report in reports_of(file) for each in _evaluated(file, report)
    ]


def _evaluated(file: File, report: Report) -> list[Kept]:
    model, weights, layers, content = report
    cells = [c for c in content["cells"] if c["task"] == "all" and c["length"] == "all"]
    yardstick = content.get("yardstick", "full")
    if "@" in content.get("resolved", {}).get(yardstick, ""):
        return []  # What a quantized KV cache loses by itself does not show there.
    full = next((cell["score"][0] for cell in cells if cell["policy"] == yardstick), None)
    return [
        Kept(file, model, policy, tuple(cell["of_full"]), full, cell["n"], weights, layers)
        for cell in cells
        if full is not None
        and cell["of_full"]
        and (policy := _asked(cell["policy"])) not in ("full", yardstick)
        and not policy.endswith(" (original)")
    ]


def _asked(name: str) -> str:
    """A policy that was evaluated, as users name it."""
    policy, at, dtype = name.partition("@")
    return _joined(_without(policy, _ALWAYS)) + at + dtype


def most_asked(kept: Sequence[Kept]) -> list[Kept]:
    """By policy, layers included, the first of `most_first`; none of SPEED's cuts."""
    found: dict[str, list[Kept]] = {}
    for each in kept:
        if not each.layers:
            policy, at, dtype = each.policy.partition("@")
            found.setdefault(str(parse_policy(policy)) + at + dtype, []).append(each)
    return [most_first(same)[0] for _, same in sorted(found.items())]


def most_first(kept: Sequence[Kept]) -> list[Kept]:
    """Evaluations of one policy: of the model that was asked most in all of them, then by weight.

    One file of a model may have more questions than any single one of a model with several.
    """
    asked = Counter[str]()
    for each in kept:
        asked[each.model] += each.n
    return sorted(kept, key=lambda k: (k.weight[0], asked[k.model], *k.weight), reverse=True)


def task_sets(kept: Sequence[Kept]) -> list[Kept]:
    """The first of `most_first`, and of the same model those that have no task in common with
    those before them."""
    found: list[Kept] = []
    for each in most_first(kept):
        if all(_on_other_tasks(each, other) for other in found):
            found.append(each)
    return found


def _on_other_tasks(each: Kept, other: Kept) -> bool:
    """Whether two evaluations of a model have no task in common."""
    tasks, others = (set(kept.file.content.get("tasks", ())) for kept in (each, other))
    return each.model == other.model and bool(tasks) and tasks.isdisjoint(others)


@cache
def layers_of(model: str) -> int | None:
    """The layers of a checkpoint that `benchmarks.checkpoint.real` knows."""
    known = json.loads(MODELS.read_text(encoding="utf-8"))
    match = re.search(r"(\d+) layers", known.get(model, {}).get("about", ""))
    return int(match[1]) if match else None


def layer_of(name: str) -> int | None:
    """The first layer that a policy's name has; None if it has none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def same_method(name: str) -> str:
    """A policy, `full` for stock, without what belongs to one model or server.

    Layers and crossovers are dropped; `speed-K` keeps its K, and a KV cache dtype stays.
    `snapkv:score=critical` is `criticalkv`.
    """
    policy, dtype = split_name(name)
    try:
        whole = str(parse_policy(policy or "full"))
    except PolicyError:
        return name
    parts = _without(whole, _LAYER, _CROSSOVER)
    for place, (head, kept) in enumerate(parts):
        if head == "snapkv" and _CRITICAL in kept:
            kept.remove(_CRITICAL)
            parts[place] = "criticalkv", kept
    return _joined(parts) + (f"@{dtype}" if dtype else "")


def _without(policy: str, *dropped: re.Pattern[str]) -> list[tuple[str, list[str]]]:
    """A policy's parts, each a method and its parameters, without those that are dropped."""
    parts = []
    for part in policy.split("+"):
        head, _, tail = part.partition(":")
        given = filter(None, tail.split(","))
        kept = [each for each in given if not any(pattern.fullmatch(each) for pattern in dropped)]
        parts.append((head, kept))
    return parts


def _joined(parts: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "+".join(head + (":" + ",".join(kept) if kept else "") for head, kept in parts)
