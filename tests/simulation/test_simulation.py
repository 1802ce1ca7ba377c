"""Every server of the simulation over a few seeds; `KVX_SIM_SEEDS` sets how many.

See `fuzz` for runs that go on after a failure.
"""

import os
from pathlib import Path

import pytest

from simulation.run import Simulation
from simulation.servers import SERVERS

SEEDS = int(os.environ.get("KVX_SIM_SEEDS", "2"))


@pytest.mark.parametrize("name", SERVERS)
def test_all_read_what_they_should(name: str, tmp_path: Path, one_thread: None) -> None:
    config = SERVERS[name].config(tmp_path)
    for seed in range(SEEDS):
        try:
            outcome = Simulation(SERVERS[name], config, seed).run()
        except Exception as error:
            error.add_note(f"python -m simulation.fuzz {name} 1 {seed}")
            raise
        assert outcome.finished, outcome
