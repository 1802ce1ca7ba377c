"""Where a rank's decode steps go, by part, from the trace of vLLM's profiler in its worker."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.trace import CALLS, ON_DEVICE, Event, summary

# The mark that a step begins with.
STEP = "execute_model"
GRAPH_LAUNCH = "GraphLaunch"
# Parts by what their kernels are called; the first that fits counts. What torch.compile fuses is of
# norms, rotations and activations, whatever else stands in its name.
PARTS = [
    ("norms_elementwise", r"^triton_"),
    ("all_reduce", r"all_?reduce|cross_device_reduce|one_shot|two_shot|multimem|lamport"),
    ("all_gather", r"all_?gather|nccl"),
    ("score", r"score_kernel|score_pages_kernel|_merge_stats_kernel"),
    ("select", r"kvx::select_kernel|_tally_kernel|_emit_kernel|_find_kernel"),
    ("attend", r"attend_kernel|_combine_kernel$"),
    ("kv_store", r"reshape_and_cache|concat_and_cache"),
    ("attention", r"flash::|flash_|fmha|attention"),
    ("one_bit_keys", r"_write_groups_kernel"),
    (
        "inputs",
        r"_gather_block_tables|_compute_slot|_prepare_|_post_update|_combine_sampled|_apply_write"
        r"|_map_slots|_get_num_sampled|_expand_idx",
    ),
    ("sampling", r"gumbel|sampl|argmax|softmax|topk|penalties|temperature"),
    ("gemm", r"gemm|gemv|nvjet|cublas|splitkreduce|xmma|cutlass"),
    ("copies", r"^memcpy|^memset"),
    ("norms_elementwise", r"norm|silu|act_and_mul|rotary|elementwise|reduce_kernel|index|embed"),
]
_PARTS = [(part, re.compile(pattern, re.IGNORECASE)) for part, pattern in PARTS]
# Parts in which a rank waits for the others.
COLLECTIVES = ("all_reduce", "all_gather")
# Kernels of a part that are named, and characters of a name.
_NAMED, _NAME = 3, 80


def part_of(kernel: str) -> str:
    """The part of a step that a kernel is of; `others` if its name says none."""
    return next((part for part, pattern in _PARTS if pattern.search(kernel)), "others")


@dataclass(frozen=True)
class Run:
    """One kernel, copy or memset of a device; times in microseconds of the trace's clock.

    launch: when the host began to launch it. call: what ties it to that launch, the same for all
    that a CUDA graph holds. in_graph: whether one launched it.
    """

    name: str
    begin: float
    end: float
    launch: float
    call: Any
    in_graph: bool


@dataclass(frozen=True)
class Steps:
    """The steps of a rank's trace, from the first mark on.

    begins: (N,) when the host began each. runs: what they launched, by its beginning. events: all
        of theirs, the host's and the device's.
    """

    begins: Sequence[float]
    runs: Sequence[Run]
    events: Sequence[Event]

    @classmethod
    def of(cls, events: Iterable[Event], skip: int = 0) -> "Steps":
        """Those of a Chrome trace but the first `skip`; what an earlier step launched is left out.

        Raises:
            ValueError: no step is left.
        """
        spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
        begins = sorted(
            event["ts"]
            for event in spans
            if event.get("cat") == "user_annotation" and event["name"] == STEP
        )
        if len(begins) <= skip:
            raise ValueError(f"no step: {len(begins)} are marked {STEP}, {skip} do not count")
        begins = begins[skip:]
        launches = {
            event["args"]["correlation"]: event
            for event in spans
            if event.get("cat") in CALLS and "correlation" in event.get("args", {})
        }
        runs, kept = list[Run](), list[Event]()
        for event in spans:
            launch: Event | None = event
            if event.get("cat") in ON_DEVICE:
                call = event.get("args", {}).get("correlation")
                launch = launches.get(call)
                if launch is not None and launch["ts"] >= begins[0]:
                    begin, graph = event["ts"], GRAPH_LAUNCH in launch["name"]
                    end = begin + event["dur"]
                    runs.append(Run(event["name"], begin, end, launch["ts"], call, graph))
            if launch is not None and launch["ts"] >= begins[0]:
                kept.append(event)
        return cls(begins, sorted(runs, key=lambda run: run.begin), kept)

    def of_run(self, run: Run) -> int:
        """The step that launched it."""
        return bisect_right(self.begins, run.launch) - 1


def of_rank(steps: Steps) -> dict[str, Any]:
    """Figures of one rank, milliseconds and calls of a step.

    parts: by name, the time of its kernels, how many there are, how many of them CUDA graphs
    launch, and the names of those that take most; kernels overlap, so that parts together may
    exceed device_busy_ms.
    graph_launches, single_launches: by the host. pauses: see ``pauses_of``. The others:
    ``trace.summary``, where `parts` is called `host_parts`. Without a device there are only those.
    """
    count = len(steps.begins)
    found = summary(steps.events, count)
    figures: dict[str, Any] = {"steps": count, "device_busy_ms": found.pop("device_busy_ms")}
    if count > 1:
        figures["profiled_step_ms"] = _ms(steps.begins[-1] - steps.begins[0], count - 1)
    if steps.runs:
        graphs = {run.call for run in steps.runs if run.in_graph}
        singles = sum(not run.in_graph for run in steps.runs)
        figures["parts"] = _parts(steps)
        figures["graph_launches"] = round(len(graphs) / count, 2)
        figures["single_launches"] = round(singles / count, 2)
        figures["pauses"] = pauses_of(steps)
    return {**figures, "host_parts": found.pop("parts"), **found}


def _ms(us: float, steps: int) -> float:
    return round(us / 1e3 / max(steps, 1), 4)


def _parts(steps: Steps) -> dict[str, dict[str, Any]]:
    by_part = defaultdict[str, list[Run]](list)
    for run in steps.runs:
        by_part[part_of(run.name)].append(run)
    count, found = len(steps.begins), dict[str, dict[str, Any]]()
    for part, runs in by_part.items():
        by_name = defaultdict[str, float](float)
        for run in runs:
            by_name[run.name[:_NAME]] += run.end - run.begin
        found[part] = {
            "ms": _ms(sum(by_name.values()), count),
            "calls": round(len(runs) / count, 2),
            "in_graphs": round(sum(run.in_graph for run in runs) / count, 2),
            "kernels": sorted(by_name, key=by_name.__getitem__, reverse=True)[:_NAMED],
        }
    return dict(sorted(found.items(), key=lambda each: -float(each[1]["ms"])))


def pauses_of(steps: Steps) -> dict[str, float]:
    """Milliseconds of a step in which nothing runs on the device, by where they are.

    between_steps: before a step's first kernel. in_graphs: between two kernels of a CUDA graph.
    others: all between. Of all of them, host_late: until the host began to launch what ends the
    pause; the rest is the device's own way from a launch to a kernel, or from one to the next.
    """
    found = dict.fromkeys(("between_steps", "in_graphs", "others", "host_late"), 0.0)
    last: Run | None = None
    for run in steps.runs:
        if last is not None and run.begin > last.end:
            pause = run.begin - last.end
            if steps.of_run(run) != steps.of_run(last):
                found["between_steps"] += pause
            elif run.call == last.call and run.in_graph:
                found["in_graphs"] += pause
            else:
                found["others"] += pause
            found["host_late"] += min(max(run.launch - last.end, 0.0), pause)
        if last is None or run.end > last.end:
            last = run
    # Before the first step nothing was recorded.
    between = max(len(steps.begins) - 1, 1)
    return {
        where: _ms(us, between if where == "between_steps" else len(steps.begins))
        for where, us in found.items()
    }


def waits_of(ranks: Sequence[Steps]) -> dict[str, Any] | None:
    """How long ranks wait for one another within collectives; None if they ran different ones.

    A collective ends in all ranks at once, or nearly, and the one that comes last to it waits for
    nobody: what it takes longer in another rank is that rank's wait. Clocks need not agree.

    Returns:
        By part: calls of a step; shared_ms, which it takes in the rank that comes last; waits_ms,
        by rank; and last, by rank, the share of calls to which it came last.
    """
    found: dict[str, Any] = {}
    steps = min(len(rank.begins) for rank in ranks)
    for part in COLLECTIVES:
        of_ranks = [
            [run for run in rank.runs if part_of(run.name) == part and rank.of_run(run) < steps]
            for rank in ranks
        ]
        if len({len(runs) for runs in of_ranks}) > 1:
            return None
        times = [[run.end - run.begin for run in runs] for runs in of_ranks]
        if not times[0]:
            continue
        shortest = [min(each) for each in zip(*times, strict=True)]
        found[part] = {
            "calls": round(len(shortest) / steps, 2),
            "shared_ms": _ms(sum(shortest), steps),
            "waits_ms": [_ms(sum(of_rank) - sum(shortest), steps) for of_rank in times],
            "last": [
                round(sum(map(float.__eq__, of_rank, shortest)) / len(shortest), 3)
                for of_rank in times
            ],
        }
    return found
