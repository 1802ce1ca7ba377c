"""Longer runs of the simulation: `python -m simulation.fuzz NAME SEEDS [FIRST]`, from tests/.

NAME is one of `servers.SERVERS`, or `all`. Prints every failure with its seed and goes on.
For a night: `all` and many seeds, from another FIRST each time.
"""

import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import conftest  # noqa: F401  The environment, before vLLM is imported.

from simulation.servers import SERVERS


def fuzz(name: str, seeds: range) -> bool:
    """Whether none of these seeds fails."""
    from simulation.run import Simulation

    server, counts, begin = SERVERS[name], Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config = server.config(Path(directory))
    for done, seed in enumerate(seeds, 1):
        simulation = Simulation(server, config, seed)
        try:
            outcome = simulation.run()
        except Exception:
            counts["failed"] += 1
            print(f"\n{name}, seed {seed}: {simulation.case}")
            traceback.print_exc(limit=-4, file=sys.stdout)
            continue
        finally:
            seconds = time.monotonic() - begin
            print(f"\r{name}: {done} of {len(seeds)} seeds, {seconds:.0f} s", end="", flush=True)
        counts.update(outcome.counts, finished=outcome.finished, preempted=outcome.preempted)
    what = ", ".join(f"{number:,} {word}" for word, number in counts.items() if number)
    print(f": {what}")
    return not counts["failed"]


def main() -> int:
    name, number, *first = sys.argv[1:]
    begin = int(first[0]) if first else 0
    names = list(SERVERS) if name == "all" else [name]
    return int(not all([fuzz(name, range(begin, begin + int(number))) for name in names]))


if __name__ == "__main__":
    sys.exit(main())
