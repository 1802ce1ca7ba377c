"""One server over one seed's traffic: scheduler and worker step by step, until both are idle."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from world import inside

from simulation.cache import Mismatch
from simulation.servers import Case, Server
from simulation.traffic import Traffic
from simulation.worker import Worker
from vllm_kvx.cache.scheduler import AsyncPolicyScheduler, PolicyScheduler

# The chance of each in a step.
ARRIVAL, ABORT, EARLY_REPORT = 0.5, 0.02, 0.3
MAX_LIVE = 14
# Steps after which a server that got nothing new has to be idle.
LONGEST_REST = 3000


@dataclass
class Outcome:
    """What came of a run. counts: how often what happened."""

    case: Case
    finished: int = 0
    preempted: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Simulation:
    """A server and its clients.

    An asynchronous scheduler hears of a step when the next one has been scheduled.
    """

    def __init__(self, server: Server, config: VllmConfig, seed: int) -> None:
        """config: see ``Server.config``; it stays as it is."""
        self.rng = rng = random.Random(f"{server.policy}, {seed}")
        self.server, self.case = server, Case.draw(server, rng)
        vllm_config = self.case.config(config)
        self.worker = Worker(vllm_config, self.case, rng)
        scheduler = AsyncPolicyScheduler if self.case.is_async else PolicyScheduler
        self.scheduler: Any = scheduler(
            vllm_config=vllm_config,
            kv_cache_config=self.worker.kv_cache_config,
            structured_output_manager=MagicMock(),
            block_size=server.block_size,
            hash_block_size=server.block_size,
            log_stats=False,
        )
        self.traffic = Traffic(server, self.case.by_priority, rng)
        self.outcome = Outcome(self.case)
        self._live: dict[str, None] = {}
        self._unreported: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def run(self) -> Outcome:
        """Clients come and go; then what is left is finished.

        Raises:
            Mismatch: a request saw what it should not, or something is left when all are done.
        """
        for _ in range(self.server.steps * 4 // 5):
            self._clients()
            self._step()
            if self._is_due() or (self._unreported and self.rng.random() < EARLY_REPORT):
                self._report()
        for _ in range(LONGEST_REST):
            if not (self._live or self._unreported or self.scheduler.has_requests()):
                break
            self._step()
            if self._is_due() or not self.scheduler.has_unfinished_requests():
                self._report()
        self._check_idle()
        self.outcome.counts.update(self.worker.counts)
        return self.outcome

    def _clients(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        while rng.random() < ARRIVAL and len(self._live) < MAX_LIVE:
            request = self.traffic.draw(self.worker.finished)
            self.worker.expect(request.request_id, request.cache_salt)
            scheduler.add_request(request)
            self._live[request.request_id] = None
        if self._live and rng.random() < ABORT:
            name = rng.choice(list(self._live))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self._live[name]
        if rng.random() < self.case.resets:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.7)

    def _step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.outcome.preempted += len(output.preempted_req_ids or ())
            self._unreported.append((output, self.worker.execute(output)))

    def _is_due(self) -> bool:
        return len(self._unreported) >= (2 if self.case.is_async else 1)

    def _report(self) -> None:
        if self._unreported:
            outputs = self.scheduler.update_from_output(*self._unreported.popleft())
            for client in outputs.values():
                for output in client.outputs:
                    if output.finish_reason is not None:
                        self._live.pop(output.request_id, None)
                        self.outcome.finished += 1

    def _check_idle(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        if self._live:
            raise Mismatch(
                f"{len(self._live)} requests never end: {len(scheduler.running)} running, "
                f"{len(scheduler.waiting)} waiting, {pool.get_num_free_blocks()} blocks free, "
                f"{inside.left_in_scheduler(scheduler)}"
            )
        left = {
            "blocks": self.case.num_blocks - 1 - pool.get_num_free_blocks(),
            **inside.left_in_scheduler(scheduler),
        }
        if any(left.values()):
            raise Mismatch(f"left in the scheduler: {left}")
        self.worker.check_idle()
