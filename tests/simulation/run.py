"""One server over one seed's traffic: scheduler and worker step by step, until both are idle."""

import random
from collections import Counter
from dataclasses import dataclass, field

from vllm.config import VllmConfig

from simulation.engine import Engine
from simulation.server import Case, Server
from simulation.traffic import Traffic

# The chance of each in a step.
ARRIVAL, ABORT, EARLY_REPORT = 0.5, 0.02, 0.3
MAX_LIVE = 14


@dataclass
class Outcome:
    """What came of a run. counts: how often what happened."""

    case: Case
    finished: int = 0
    preempted: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Simulation:
    """A server and its clients."""

    def __init__(self, server: Server, config: VllmConfig, seed: int) -> None:
        """config: see ``Server.config``; it stays as it is."""
        self.rng = rng = random.Random(f"{server.policy}, {seed}")
        self.server, self.case = server, Case.draw(server, rng)
        self.engine = Engine(server, config, self.case, rng)
        self.traffic = Traffic(server, self.case.by_priority, rng)

    def run(self) -> Outcome:
        """Clients come and go; then what is left is finished.

        Raises:
            Mismatch: a request saw what it should not, waits without need, or something is left
                when all are done.
        """
        engine = self.engine
        for _ in range(self.server.steps * 4 // 5):
            self._clients()
            engine.step()
            if engine.must_report or (engine.has_unreported and self.rng.random() < EARLY_REPORT):
                engine.report()
        engine.finish()
        return Outcome(self.case, engine.finished, engine.preempted, engine.counts)

    def _clients(self) -> None:
        rng, engine = self.rng, self.engine
        while rng.random() < ARRIVAL and len(engine.live) < MAX_LIVE:
            engine.add(self.traffic.draw(engine.worker.finished))
        if engine.live and rng.random() < ABORT:
            engine.abort(rng.choice(list(engine.live)))
        if rng.random() < self.case.resets:
            engine.reset(reset_running=rng.random() < 0.7)
