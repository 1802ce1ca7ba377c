"""Scheduler and worker of a server, driven a step at a time."""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

from support import inside
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from simulation.blocks import check_blocks, check_windows
from simulation.cache import Mismatch
from simulation.offloading import offloading
from simulation.queue import Queue
from simulation.ranks import Late, Ranks
from simulation.router import Router
from simulation.server import NUM_LAYERS, Case, Server
from simulation.traffic import Text
from simulation.worker import Worker
from vllm_kvx.cache.scheduler import AsyncPolicyScheduler, PolicyScheduler
from vllm_kvx.config.connectors import NIXL

# Steps after which a server that got nothing new has to be idle.
LONGEST_REST = 3000
# The chance that workers which may be late go on when a step is scheduled.
RUNS = 0.5


@dataclass
class Step:
    """One that the worker has, and which the scheduler has not heard of.

    number: see ``Late``. result: once it has run. moved: what the KV connector's worker says.
    """

    output: SchedulerOutput
    number: int
    result: ModelRunnerOutput | None = None
    moved: KVConnectorOutput | None = None


class Engine:
    """A server without a front end.

    An asynchronous scheduler hears of a step when the next one has been scheduled.

    Attributes:
        live: requests that have not ended, by id. finished: how many have. preempted: how often
            any was.
        ended: ``kv_transfer_params`` of what has, by id. answers: the tokens of requests, by id.
        queue: see ``Queue``. router: see ``Router``; None if no events are published.
    """

    def __init__(
        self, server: Server, config: VllmConfig, case: Case, rng: random.Random | None = None
    ) -> None:
        """config: see ``Server.config``; it stays as it is."""
        self.case = case
        vllm_config = case.config(config)
        self._rng = rng = rng or random.Random(0)
        self.worker: Any
        if server.ranks > 1:
            self.worker = ranks = Ranks(vllm_config, case, rng)
            self._late = Late(ranks.workers, rng)
        else:
            self.worker = Worker(vllm_config, case, rng, server.others)
            self._late = Late([self.worker], rng)
        if server.connector == "OffloadingConnector":
            self.worker.transfers = offloading(vllm_config, self.worker)
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
        self.ended, self.answers = dict[str, Any](), dict[str, list[int]]()
        self._asked: dict[str, int | None] = {}  # By request, how many tokens.
        self._unreported: deque[Step] = deque()
        # Where ranks run one after the other, or another server's entries come while steps run.
        self._lags = server.ranks > 1 or (case.is_async and server.connector == NIXL)
        # Steps that may be under way at once.
        self._most = 2 if case.is_async else 1
        if server.ranks > 1:
            self._most = vllm_config.max_concurrent_batches

    def add(self, request: Request) -> None:
        """A client sends it."""
        lora = request.lora_request
        text = Text([], request.cache_salt, 0 if lora is None else lora.lora_int_id)
        self.worker.expect(request.request_id, text)
        assert request.sampling_params is not None
        self._asked[request.request_id] = request.sampling_params.max_tokens
        self.scheduler.add_request(request)
        self.live[request.request_id] = None

    def abort(self, name: str) -> None:
        """Its client is gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.live[name]

    def reset(self, reset_running: bool) -> None:
        """Empties the prefix cache. reset_running: preempts all requests that run."""
        scheduler = self.scheduler
        if scheduler.connector is not None:
            # vLLM refuses to where blocks wait for a transfer, or for a step that writes them.
            num_held = len(scheduler.requests) - len(scheduler.running) - len(scheduler.waiting)
            reset_running &= not (num_held or self._unreported)
        # It fails where a request that was preempted so loads in the next step, so nothing is left.
        also_connector = scheduler.connector is not None and reset_running
        scheduler.reset_prefix_cache(reset_running, reset_connector=also_connector)

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
        self._submit(output)
        if self.router is not None:
            self.router.check()
        return tuple(output.num_scheduled_tokens)

    def _submit(self, output: SchedulerOutput) -> None:
        """Hands a step to the worker, which runs it at once, or when it gets to it."""
        transfers, lags = self.worker.transfers, self._lags
        step = Step(output, self._late.submit(output, copies=lags))
        self._unreported.append(step)
        if transfers is not None:
            transfers.begin(output)
        if not lags:
            step.result = self._late.result(step.number)
        if transfers is not None:
            step.moved = transfers.end(output)
        if lags and self._rng.random() < RUNS:
            self._late.go_on()

    def _run(self, step: Step) -> ModelRunnerOutput:
        result = step.result or self._late.result(step.number)
        result.kv_connector_output = step.moved
        return result

    @property
    def has_unreported(self) -> bool:
        return bool(self._unreported)

    @property
    def must_report(self) -> bool:
        """Whether the next step needs the outcome of an earlier one."""
        return len(self._unreported) >= self._most

    @property
    def is_busy(self) -> bool:
        """Whether a step is unreported, or a request has not ended."""
        return bool(self.live or self._unreported or self.scheduler.has_requests())

    def report(self) -> None:
        """Brings the outcome of the earliest unreported step, if there is one."""
        if not self._unreported:
            return
        step = self._unreported.popleft()
        outputs = self.scheduler.update_from_output(step.output, self._run(step))
        if self.worker.num_drafts and not self.case.is_async:
            self.scheduler.update_draft_token_ids(self.worker.drafted)
        for client in outputs.values():
            for output in client.outputs:
                name = output.request_id
                answer = self.answers.setdefault(name, [])
                answer += output.new_token_ids
                if output.finish_reason is None:
                    continue
                asked = self._asked.pop(name, None)
                if output.finish_reason == FinishReason.LENGTH and len(answer) != asked:
                    raise Mismatch(f"{name} has {len(answer)} tokens of {asked}")
                self.live.pop(name, None)
                self.finished += 1
                if self.worker.transfers is None:
                    del self.answers[name]
                else:
                    self.ended[name] = output.kv_transfer_params

    @property
    def stash_pages(self) -> int:
        """Pages of the stash that prompts have."""
        return inside.used_pages(self.scheduler)

    @property
    def counts(self) -> Counter[str]:
        """How often what happened."""
        counts = self.worker.counts + self.queue.counts
        if self.worker.transfers is not None:
            counts += self.worker.transfers.counts
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
        self.check_idle()

    def check_idle(self) -> None:
        """Raises Mismatch if a request has not ended, or something is left of one."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        if self.live:
            waiting = len(scheduler.kv_holding_waiting) + len(scheduler.waiting)
            raise Mismatch(
                f"{len(self.live)} requests never end: {len(scheduler.running)} running, "
                f"{waiting} waiting, {pool.get_num_free_blocks()} blocks free, "
                f"{inside.left_in_scheduler(scheduler)}"
            )
        left = {
            "blocks": self.case.num_blocks - 1 - pool.get_num_free_blocks(),
            **inside.left_in_scheduler(scheduler),
        }
        if any(left.values()):
            raise Mismatch(f"left in the scheduler: {left}")
        self.worker.check_idle()
