"""Sessions of many turns in a pool too small for them: nothing is lost, and nothing is left.

Every entry that a request sees is held against what a cold run would see, so its answer is a cold
run's. `--turns` sets how many turns, `--seeds` how many runs of a server.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from support import options
from support.nightly import by_day

from simulation.hybrids import EVERY
from simulation.sessions import Sessions

TURNS = options.turns(40, at_night=1000)
SEEDS = options.seeds() or 1


NAMES = ["fastkv", "block", "pyramid", "speed", "windows", "states", "checkpoints"]


@pytest.mark.parametrize("name", by_day(NAMES, range(4)))
def test_sessions_in_a_third_of_their_pool(name: str, tmp_path: Path, one_thread: None) -> None:
    server = replace(EVERY[name], max_len=256, max_answer=12, stash=400 * bool(EVERY[name].stash))
    config = server.config(tmp_path)
    for seed in range(SEEDS):
        sessions = Sessions(server, config, seed)
        try:
            sessions.run(TURNS)
        except Exception as error:
            error.add_note(f"{name}, seed {seed}, {sessions.turns} turns: {sessions.case}")
            raise
        counts, engine = sessions.engine.worker.counts, sessions.engine
        happened = {"turns": sessions.turns, "preempted": engine.preempted, **counts}
        print(name, seed, happened)
        assert counts["prefix hits"], happened
