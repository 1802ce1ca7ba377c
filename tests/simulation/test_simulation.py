"""Every server of the simulation over a few seeds; see `fuzz` for more."""

from pathlib import Path

import pytest

from simulation.run import Simulation
from simulation.servers import SERVERS


@pytest.mark.parametrize("name", SERVERS)
def test_all_read_what_they_should(name: str, tmp_path: Path, one_thread: None) -> None:
    config = SERVERS[name].config(tmp_path)
    for seed in range(2):
        outcome = Simulation(SERVERS[name], config, seed).run()
        assert outcome.finished, outcome
