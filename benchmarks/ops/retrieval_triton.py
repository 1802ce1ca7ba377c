"""Which parameters retrieval's Triton ops are fastest with, and whether their scores are right.

`python -m benchmarks.ops.retrieval_triton --output NAME.json` on a GPU: a JSON line for each choice
and size, then the choices that are best over all sizes. One layer of Llama-3.1-8B's shape in bf16,
each operator a CUDA graph with a cold L2, but for the scores that a selection reads. The choices
that the package makes come first, so a run that is cut off has timed those. To take a winner over,
edit SCORE_* in ``ops/retrieval/score.py`` and FUSED, SELECT_PROGRAMS and BLOCK in ``topk.py``.

`--before FILE` times a score.py of an earlier commit, too; `--cuda` the CUDA ops. `--dry` tries
all of it at tiny sizes, also on a CPU, where kernels run in Triton's interpreter: set
TRITON_INTERPRET=1.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.ops.retrieval_layer import (
    INDEX,
    LLAMA_8B,
    ON_GPU,
    Decode,
    Heads,
    Layer,
    add_ops,
    head_of,
    measure,
    nothing,
)
from benchmarks.ops.retrieval_others import Operators
from vllm_kvx.ops.retrieval import retrieve, score, topk

# Requests and entries of each; the first fill the layer, the others lie in its blocks.
SIZES = ((32, 32_768), (1, 130_000), (6, 32_768), (1, 32_768))
DRY_SIZES = ((3, 200), (1, 417))
BUDGET, DRY_BUDGET = 2048, 64
# Of the largest score: what the CUDA ops are held to, in tests/gpu.
TOLERANCE = 2e-5
REDUCTION = "max"


@dataclass(frozen=True)
class ScoreChoice:
    """See the constants of ``score``."""

    programs: int = score.SCORE_PROGRAMS
    warps: int = score.SCORE_WARPS
    stages: int = score.SCORE_STAGES


@dataclass(frozen=True)
class SelectChoice:
    """See the constants of ``topk``."""

    fused: bool = topk.FUSED
    programs: int = topk.SELECT_PROGRAMS
    block: int = topk.BLOCK


SCORE_CHOICES = (
    ScoreChoice(),
    *(ScoreChoice(stages=stages) for stages in (1, 3, 7)),
    *(ScoreChoice(programs=programs) for programs in (1056, 2112, 3168, 4096, 6336)),
    *(ScoreChoice(programs=programs, stages=1) for programs in (2112, 4096)),
    *(ScoreChoice(programs=programs, warps=2) for programs in (1056, 2112, 3168)),
    ScoreChoice(programs=2112, warps=2, stages=3),
    ScoreChoice(programs=2112, stages=7),
)
SELECT_CHOICES = (
    SelectChoice(),
    # About what it was before.
    SelectChoice(fused=False, programs=512, block=2048),
    *(SelectChoice(programs=programs) for programs in (512, 768, 2048)),
    *(SelectChoice(programs=programs, block=2048) for programs in (512, 1024)),
    SelectChoice(fused=False),
)
Line = dict[str, Any]


def load(path: Path) -> ModuleType:
    """A score.py of an earlier commit."""
    spec = importlib.util.spec_from_file_location("score_before", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Step:
    """One decode step with queries of bfloat16, also on a CPU, and what its scores must be."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.query = decode.query.to(torch.bfloat16)
        self.scratch = decode.scratch("triton")
        self.name = f"{decode.batch}x{decode.length}"
        # Of one row, the last one: copying all keys out takes memory.
        self.expected = INDEX.score_in_torch(
            self.query[-1],
            decode.layer.sidecar,
            decode.table[-1],
            decode.length,
            REDUCTION,
            1.0,
        )

    def scorer(self, choice: ScoreChoice, module: ModuleType) -> Callable[[], None]:
        decode, kv_heads = self.decode, self.decode.layer.shape.kv_heads
        constants: Any = module
        splits = retrieve.splits_of(choice.programs if ON_GPU else 8, decode.batch, kv_heads)

        def run() -> None:
            constants.SCORE_WARPS, constants.SCORE_STAGES = choice.warps, choice.stages
            constants.score_units(
                self.query,
                decode.layer.sidecar,
                decode.table,
                decode.rows,
                self.scratch.scores,
                self.scratch.stats,
                reduction=REDUCTION,
                scale=1.0,
                splits=splits,
                has_codes=True,
            )

        return run

    def selector(self, choice: SelectChoice) -> Callable[[], None]:
        def run() -> None:
            topk.SELECT_PROGRAMS, topk.BLOCK = choice.programs, choice.block
            topk.top_units(
                self.scratch.scores,
                self.decode.rows,
                self.scratch.indices,
                self.scratch.counts,
                unit=1,
                fused=choice.fused,
            )

        return run

    def scored(self) -> torch.Tensor:
        """The last row's scores."""
        first = int(self.decode.rows.offsets[-1])
        return self.scratch.scores[:, first : first + self.decode.length]

    def score_error(self) -> float:
        """The largest error of the last row's scores, of the largest score; NaN if some lack."""
        ours, known = self.scored(), self.expected.isfinite()
        if not torch.equal(ours.isfinite(), known):
            return math.nan
        ours, expected = ours[known], self.expected[known]
        return float((ours - expected).abs().max() / expected.abs().max())

    def selects_rightly(self) -> bool:
        found = self.scratch.indices[-1].long()
        return all(
            torch.equal(mine[: self.decode.budget], topk.top_units_reference(of_head, len(mine)))
            for mine, of_head in zip(found, self.scored(), strict=True)
        )


def lines(step: Step, before: ModuleType | None, cuda: bool, repeats: int) -> Iterator[Line]:
    """Every choice at one size."""

    def timed(op: str, choice: Line, run: Callable[[], Any], first: Callable[[], Any]) -> Line:
        line = {"size": step.name, "op": op, "choice": choice}
        try:
            return line | {"us": round(measure(run, repeats, before=first), 2)}
        except Exception as error:  # Such as: out of registers or shared memory.
            return line | {"error": str(error).splitlines()[0]}

    def score_line(op: str, choice: ScoreChoice, module: ModuleType) -> Line:
        step.scratch.scores.fill_(math.nan)
        line = timed(op, asdict(choice), step.scorer(choice, module), nothing)
        off = step.score_error() if "us" in line else math.nan
        return line | {"off_by": off, "right": off <= TOLERANCE}

    for choice in SCORE_CHOICES:
        yield score_line("score", choice, score)
    if before is not None:
        # Its programs are of one warp and its loop as it is, whatever is asked for.
        yield score_line("score before", ScoreChoice(4096, 1, 3), before)
    run_first = step.scorer(ScoreChoice(), score)
    for select in SELECT_CHOICES:
        step.scratch.indices.fill_(-1)
        line = timed("select", asdict(select), step.selector(select), run_first)
        yield line | {"right": "us" in line and step.selects_rightly()}
    score.SCORE_WARPS, score.SCORE_STAGES = ScoreChoice().warps, ScoreChoice().stages
    topk.SELECT_PROGRAMS, topk.BLOCK = SelectChoice().programs, SelectChoice().block
    for backend in ["triton", *(["cuda"] if cuda else [])]:
        operators: Operators = {}
        firsts: Operators = {}
        add_ops(step.decode, backend, operators, firsts)
        for name, run in operators.items():
            yield timed(name, {}, run, firsts.get(name, nothing))


def best_of(report: list[Line]) -> Line:
    """By operator the choice of least geometric mean over all sizes, of those always right."""
    times: dict[tuple[str, str], list[float]] = {}
    wrong = set()
    for line in report:
        if not line["choice"]:
            continue
        key = line["op"], json.dumps(line["choice"])
        if "us" in line and line["right"]:
            times.setdefault(key, []).append(line["us"])
        else:
            wrong.add(key)
    most = max((len(values) for values in times.values()), default=0)
    means = {
        key: math.exp(sum(map(math.log, values)) / len(values))
        for key, values in times.items()
        if key not in wrong and len(values) == most
    }
    best: Line = {}
    for (op, choice), mean in sorted(means.items(), key=lambda item: item[1]):
        best.setdefault(op, {"choice": json.loads(choice), "mean_us": round(mean, 2)})
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, help="write the report here as JSON")
    add("--before", type=Path, help="a score.py of an earlier commit")
    add("--cuda", action="store_true", help="the CUDA ops, too")
    add("--dry", action="store_true", help="tiny sizes, also on a CPU")
    add("--repeats", type=int, default=20)
    add("--time-limit", type=float, default=85, help="seconds; what is left is not timed")
    add("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args()
    if not (ON_GPU or args.dry):
        parser.error("times are those of a GPU, and there is none")
    deadline = time.monotonic() + args.time_limit
    sizes, budget = (DRY_SIZES, DRY_BUDGET) if args.dry else (SIZES, BUDGET)
    shape = Heads(4, 2, 64) if args.dry else LLAMA_8B
    before = load(args.before) if args.before else None
    batch, length = sizes[0]
    layer = Layer(shape, length, batch)
    report: list[Line] = []
    cut_off = False

    def save() -> Line:
        what = "Choices of constants of the Triton ops of retrieval, timed."
        head = head_of(what, "benchmarks.ops.retrieval_triton", args.commit)
        whole = head | {"cut_off": cut_off, "best": best_of(report), "lines": report}
        if args.output:
            args.output.write_text(json.dumps(whole, indent=1) + "\n")
        return whole

    # Sizes take turns, so that those that a limit cuts off have lines for the same choices.
    open_sizes = [
        lines(Step(layer.decode(each, count, budget)), before, args.cuda, args.repeats)
        for count, each in sizes
    ]
    while open_sizes and not cut_off:
        for each_size in list(open_sizes):
            line = next(each_size, None)
            if line is None:
                open_sizes.remove(each_size)
                continue
            report.append(line)
            print(json.dumps(line), flush=True)
        cut_off = time.monotonic() > deadline
    print(json.dumps({"cut_off": cut_off, "best": save()["best"]}))


if __name__ == "__main__":
    main()
