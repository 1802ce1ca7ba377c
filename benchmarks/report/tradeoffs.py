"""Every policy's answers on several task sets, and beside them what the same setting gains.

A gain stands beside answers only where both are of one setting: the same policy with the same
parameters, and where it names a layer, the same share of the layers below it. Answers are of real
checkpoints, gains of a shape that is served alone, so the layer itself differs.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from benchmarks.common.names import STOCK
from benchmarks.report.cells import MISSING, order, reference, table, words
from benchmarks.report.files import (
    Figure,
    File,
    Kept,
    figures_of,
    kept_of,
    layers_of,
    newest,
    same_method,
)
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.tasks.base import SECOND_TURN
from vllm_kvx.tools.tasks.table import GROUPS

# The shape that most files have, and its layers.
SHAPE, LAYERS = "llama-3.1-8b", 32
CASES = ("ttft:32768", "ttft:130000", "tpot:32768", "tpot:130000", "pool_decode:32768", "pool")
_FILES = frozenset({"ruler_niah_multikey_3-4096", "longbench_multifieldqa_zh"})
LONG = "long answers"
# Task sets, by what a file says of its tasks.
SETS: dict[str, Callable[[frozenset[str]], bool]] = {
    "generated": lambda tasks: tasks == frozenset(GROUPS["generated"]),
    "files": lambda tasks: tasks == _FILES,
    LONG: lambda tasks: tasks == frozenset(GROUPS["long_answers"]),
    "summaries": lambda tasks: tasks == {"longbench_multi_news"},
    "two turns": lambda tasks: any(task.endswith(SECOND_TURN) for task in tasks),
}
# Both have to be there for a model to have a table.
NEEDED = ("generated", "files")
# Prompts that a row should have.
ENOUGH = 224
# From this day on a name without `kv_floor` means 512.
FLOOR_SINCE = "2026-11-26"
_LAYER = re.compile(r"(tsp_layer|pivot|layer)=(\d+)")

_ABOUT = f"""
# Answers and gains

Made by `python -m benchmarks.report` from the files in
[benchmarks/results](../../benchmarks/results); no figure is written by hand. Numbers in brackets
are the files, [listed in the report](report.md#files).

What a policy keeps of `full`'s right answers, in % with the 95% interval of a paired bootstrap and
n, the prompts; beside it what **the same setting** gains over stock vLLM: the same parameters and,
where a policy names a layer, the layer at the same share of the depth. Gains are of the shape of
{SHAPE}, on an H100, or on an H200 where a cell says so. [With comments](quality.md#two-task-sets).

- *Generated* are the fourteen tasks of `vllm-kvx evaluate`, mostly at 16,384 and 30,000 tokens;
  *files* RULER's niah_multikey_3 and LongBench's multifieldqa_zh; *long answers* lists and pass
  phrases; *summaries* LongBench's multi_news; *two turns* [both questions of a
  chat](../use/evaluating.md#tasks).
- "No floor": measured before {FLOOR_SINCE}, when a name without `kv_floor` meant 0.
- TPOT is over 128 tokens; through the first n of them, `after=n` reads all entries. Decode with a
  full pool is tokens/s with as many requests as fit.
"""


def setting(policy: str, layers: int | None) -> str:
    """What two names have in common that are one setting, on models of other depths.

    layers: of the model that `policy` ran on. Of a layer remains how many of LAYERS see the prompt.
    """
    parts = [same_method(policy)]
    for name, number in _LAYER.findall(str(parse_policy(policy))):
        if layers is None:
            return policy
        parts.append(f"{name} {round((int(number) + 1) * LAYERS / layers)} of {LAYERS}")
    return ", ".join(parts)


def page(files: Sequence[File]) -> list[str]:
    """The lines of the page."""
    lines = _ABOUT.strip().splitlines()
    kept = [each for each in kept_of(files) if not each.weights and "@" not in each.policy]
    found = [
        each
        for each in figures_of(files)
        if each.baseline == STOCK
        and each.file.model == SHAPE
        and each.file.gpu
        # Neither several GPUs nor another cache.
        and " x " not in each.file.gpu
        and "@" not in each.engine
    ]
    models = [
        model
        for model in dict.fromkeys(each.model for each in kept)
        if all(any(is_of(k, name) and k.model == model for k in kept) for name in NEEDED)
    ]
    for model in models:
        lines += ["", f"## {model}", "", *_table([k for k in kept if k.model == model], found)]
    return lines if models else [*lines, "", f"{MISSING.capitalize()}."]


def is_of(kept: Kept, name: str) -> bool:
    return SETS[name](frozenset(kept.file.content.get("tasks", ())))


def _table(kept: Sequence[Kept], found: Sequence[Figure]) -> list[str]:
    """A row for each policy of one model, and what is not measured."""
    layers = layers_of(kept[0].model)
    sets = [name for name in SETS if any(is_of(each, name) for each in kept)]
    gains = _gains(found)
    rows, few, without = list[list[str]](), list[str](), list[str]()
    named: dict[str, str] = {}  # By what a policy is today; the youngest file's name for it.
    for each in sorted(kept, key=lambda each: each.file.written):
        named[str(parse_policy(each.policy))] = each.policy
    for policy in order(named.values()):
        own = [each for each in kept if named[str(parse_policy(each.policy))] == policy]
        of_sets = [best(each for each in own if is_of(each, name)) for name in sets]
        answered = dict(zip(sets, of_sets, strict=True))
        mine = gains.get(setting(policy, layers), {})
        if not answered["files"] and not (answered["generated"] and mine):
            continue
        rows.append(
            [
                f"`{policy}`",
                *map(answers, of_sets),
                *(_gain(mine.get(case)) for case in CASES),
            ]
        )
        asked = [answered[name] for name in NEEDED]
        few += [f"`{policy}` (n {each.n})" for each in asked if each and each.n < ENOUGH]
        lacking = [words(case) for case in CASES if case not in mine]
        if lacking:
            what = "all" if len(lacking) == len(CASES) else "; ".join(lacking)
            without.append(f"- `{policy}`: {what}")
    head = ["policy", *sets, *(words(case).replace(", prompt tokens", "") for case in CASES)]
    lines = table(head, rows)
    if few:
        lines += ["", f"Fewer than {ENOUGH} prompts: {'; '.join(few)}."]
    if without:
        lines += ["", "Gains of the same setting that are not measured:", "", *without]
    return lines


def best(kept: Iterable[Kept]) -> Kept | None:
    """The evaluation with most questions; of those under today's floor, where there are any."""
    every = list(kept)
    today = [each for each in every if each.file.date >= FLOOR_SINCE]
    return max(today or every, key=lambda each: each.weight, default=None)


def _gains(found: Sequence[Figure]) -> dict[str, dict[str, Figure]]:
    """By setting and case: an H100's where there is one, of the youngest file."""
    gains: dict[str, dict[str, Figure]] = {}
    for is_h100 in (False, True):
        here = [each for each in found if ("H100" in str(each.file.gpu)) == is_h100]
        for (engine, case), figure in newest(here).items():
            gains.setdefault(setting(engine, LAYERS), {})[case] = figure
    return gains


def answers(each: Kept | None) -> str:
    if each is None:
        return MISSING
    middle, low, high = (100 * share for share in each.of_full)
    since = "" if each.file.date >= FLOOR_SINCE else ", no floor"
    return f"{middle:.1f} [{low:.0f}-{high:.0f}], n {each.n}{since} {reference(each.file)}"


def _gain(each: Figure | None) -> str:
    if each is None:
        return MISSING
    where = "" if "H100" in str(each.file.gpu) else ", H200"
    slow = ", Triton ops" if each.ops == "triton" else ""
    return f"{each.ratio:.2f}x{where}{slow} {reference(each.file)}"
