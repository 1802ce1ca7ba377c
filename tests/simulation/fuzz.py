"""Longer runs of the simulation: `python -m simulation.fuzz NAME SEEDS [FIRST [OUT]]`, from tests/.

NAME is one of `hybrids.EVERY`, or `all`. Prints every failure with its seed and goes on.
For a night: `all` and many seeds, from another FIRST each time. OUT is a JSON of what happened; a
run that is cut short leaves what it has found.

It runs beside vLLM's build for GPUs too: see `processor`.
"""

import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import simulation.processor  # noqa: F401  The environment, before vLLM is imported.

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.common.about import about
from simulation.hybrids import EVERY

WHAT = "Random traffic over scheduler and worker, against a model of what each step has to do."


def fuzz(name: str, seeds: range) -> Iterator[Counter[str]]:
    """How often what happened so far, after each seed; `failed`: seeds that did."""
    from simulation.every_kind import of_server

    server, counts, begin = EVERY[name], Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config = server.config(Path(directory))
    for seed in seeds:
        counts["seeds"] += 1
        simulation = of_server(server, config, seed)
        try:
            outcome = simulation.run()
        except Exception:
            counts["failed"] += 1
            print(f"\n{name}, seed {seed}: {simulation.case}")
            traceback.print_exc(limit=-4, file=sys.stdout)
        else:
            counts.update(outcome.counts, finished=outcome.finished, preempted=outcome.preempted)
        done, seconds = counts["seeds"], time.monotonic() - begin
        print(f"\r{name}: {done} of {len(seeds)} seeds, {seconds:.0f} s", end="", flush=True)
        yield counts
    what = ", ".join(f"{number:,} {word}" for word, number in counts.items() if number)
    print(f": {what}")


def main() -> int:
    name, number, *more = sys.argv[1:]
    begin = int(more[0]) if more else 0
    if name not in ("all", *EVERY):
        raise SystemExit(f"no server {name!r}: give all, or one of {', '.join(EVERY)}")
    names = list(EVERY) if name == "all" else [name]
    head = about(WHAT, " ".join(["python -m simulation.fuzz", *sys.argv[1:]]))
    head["device"] = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    found: dict[str, dict[str, int]] = {}
    for each in names:
        for counts in fuzz(each, range(begin, begin + int(number))):
            found[each] = {"seeds": 0, "failed": 0, **counts}
            if len(more) > 1:
                result = {"about": head, "servers": found}
                Path(more[1]).write_text(json.dumps(result, indent=1) + "\n")
    return int(any(counts["failed"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
