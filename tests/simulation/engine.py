"""Scheduler and worker of a server, driven a step at a time."""

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

from support import inside
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from simulation.blocks import check_blocks, check_windows
from simulation.cache import Mismatch
from simulation.queue import Queue
from simulation.router import Router
from simulation.server import NUM_LAYERS, Case, Server
from simulation.traffic import Text
from simulation.worker import Worker
from vllm_kvx.cache.scheduler import AsyncPolicyScheduler, PolicyScheduler

# Steps after which a server that got nothing new has to be idle.
LONGEST_REST = 3000


class Engine:
    """A server without a front end.

    An asynchronous scheduler hears of a step when the next one has been scheduled.

    Attributes:
        live: requests that have not ended, by id. finished: how many have. preempted: how often
            any was.
        queue: see ``Queue``. router: see ``Router``; None if no events are published.
    """

    def __init__(
        self, server: Server, config: VllmConfig, case: Case, rng: random.Random | None = None
    ) -> None:
        """config: see ``Server.config``; it stays as it is."""
        self.case = case
        vllm_config = case.config(config)
        self.worker = Worker(vllm_config, case, rng or random.Random(0), server.others)
        scheduler = AsyncPolicyScheduler if case.is_async else PolicyScheduler
        sizes = resolve_kv_cache_block_sizes(self.worker.kv_cache_config, vllm_config)
        self.scheduler: Any = scheduler(
            vllm_config=vllm_config,
            kv_cache_config=self.worker.kv_cache_config,
            structured_output_manager=MagicMock(validate_tokens=lambda _, tokens: tokens),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=False,
        )
        self.queue = Queue(self.scheduler, server, case)
        # What a server without a prefix cache publishes is nothing.
        self.router: Router | None = None
        if server.events and case.shares_prefixes:
            self.router = Router(self.scheduler, self.worker.cache, NUM_LAYERS)
        self.live: dict[str, None] = {}
        self.finished = self.preempted = 0
        self._unreported: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, request: Request) -> None:
        """A client sends it."""
        lora = request.lora_request
        text = Text([], request.cache_salt, 0 if lora is None else lora.lora_int_id)
        self.worker.expect(request.request_id, text)
        self.scheduler.add_request(request)
        self.live[request.request_id] = None

    def abort(self, name: str) -> None:
        """Its client is gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.live[name]

    def step(self) -> Sequence[str]:
        """One step, if there is something to do; the requests that run in it, by id.

        Raises:
            Mismatch: see ``Worker.execute`` and ``Queue.check``.
        """
        if not self.scheduler.has_requests():
            return ()
        self.queue.look()
        processed = {
            name: request.num_computed_tokens - request.num_in_flight_tokens
            for name, request in self.scheduler.requests.items()
        }
        output = self.scheduler.schedule()
        processed |= dict.fromkeys(output.preempted_req_ids or (), 0)
        # What requests that begin have taken from the prefix cache is there.
        processed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.queue.check(output)
        check_blocks(self.scheduler)
        check_windows(self.scheduler, output, processed)
        self.preempted += len(output.preempted_req_ids or ())
        self._unreported.append((output, self.worker.execute(output)))
        if self.router is not None:
            self.router.check()
        return tuple(output.num_scheduled_tokens)

    @property
    def has_unreported(self) -> bool:
        return bool(self._unreported)

    @property
    def must_report(self) -> bool:
        """Whether the next step needs the outcome of an earlier one."""
        return len(self._unreported) >= (2 if self.case.is_async else 1)

    @property
    def is_busy(self) -> bool:
        """Whether a step is unreported, or a request has not ended."""
        return bool(self.live or self._unreported or self.scheduler.has_requests())

    def report(self) -> None:
        """Brings the outcome of the earliest unreported step, if there is one."""
        if not self._unreported:
            return
        outputs = self.scheduler.update_from_output(*self._unreported.popleft())
        if self.worker.num_drafts:
            self.scheduler.update_draft_token_ids(self.worker.drafted)
        for client in outputs.values():
            for output in client.outputs:
                if output.finish_reason is not None:
                    self.live.pop(output.request_id, None)
                    self.finished += 1

    @property
    def stash_pages(self) -> int:
        """Pages of the stash that prompts have."""
        return inside.used_pages(self.scheduler)

    @property
    def counts(self) -> Counter[str]:
        """How often what happened."""
        counts = self.worker.counts + self.queue.counts
        return counts if self.router is None else counts + self.router.counts

    def advance(self) -> Sequence[str]:
        """One step, reported as late as may be; see `step`."""
        names = self.step()
        if self.must_report or not self.scheduler.has_unfinished_requests():
            self.report()
        return names

    def finish(self) -> None:
        """Runs until all requests have ended.

        Raises:
            Mismatch: they do not; or something is left of them.
        """
        for _ in range(LONGEST_REST):
            if not self.is_busy:
                break
            self.advance()
        self._check_idle()

    def _check_idle(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        if self.live:
            raise Mismatch(
                f"{len(self.live)} requests never end: {len(scheduler.running)} running, "
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
