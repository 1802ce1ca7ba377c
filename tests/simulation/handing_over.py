"""A server that computes prompts, and one that fetches what is left of them and goes on.

vLLM's own ``NixlConnector`` decides on both what is held, fetched and given back; the workers'
sides are here, and copy blocks at any time up to the one at which it is said that they came.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from simulation.cache import Mismatch
from simulation.engine import LONGEST_REST, Engine
from simulation.offloading import DONE
from simulation.run import ABORT, ARRIVAL, EARLY_REPORT, MAX_LIVE, Outcome
from simulation.server import Case, Server
from simulation.traffic import Traffic
from simulation.worker import Worker
from vllm_kvx.config.handed_over import HOLDS, KEY
from vllm_kvx.config.settings import POLICY_KEY

# The chance of each: a fetch fails; of a prompt that was computed nobody asks on; a request is for
# one of the servers alone; the second one is asked under another policy, or without the adapter;
# one of them does nothing for a moment; a proxy passes a prompt on.
FAILS, IS_LEFT, IS_PLAIN, CHANGES, RESTS, PASSES_ON = 0.1, 0.05, 0.2, 0.1, 0.2, 0.7


class Held:
    """Blocks that the first server's requests leave behind, held until they were read.

    As NIXL's worker has it: who is not read gives up after a while.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._ran, self._held, self._over = set[str](), set[str](), set[str]()

    def let_go(self, name: str) -> None:
        """The request's blocks were read, or nobody is going to."""
        self._over.add(name)

    def begin(self, output: SchedulerOutput) -> None: ...

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        told = cast(Any, output.kv_connector_metadata)
        self._ran |= told.reqs_in_batch
        if told.reqs_not_processed & self._held:
            raise Mismatch(f"{told.reqs_not_processed} are held, and forgotten")
        self._ran -= told.reqs_not_processed
        self._held |= told.reqs_to_send.keys() & self._ran
        sent = self._over & self._ran
        self._over -= sent
        self._ran -= sent
        self._held -= sent
        self.counts["prompts sent"] += len(sent)
        return KVConnectorOutput(finished_sending=sent or None)

    @property
    def are_done(self) -> bool:
        return not (self._held or self._over)


class Fetches:
    """Reads of the second server.

    ends, fails: of a request's read, drawn unless a test says it: whether it is done in this step,
    and whether it brought what it should.
    """

    def __init__(self, worker: Worker, source: Worker, held: Held, rng: random.Random) -> None:
        """source: of the first server."""
        self.counts = Counter[str]()
        self._worker, self._source, self._held, self._rng = worker, source, held, rng
        self.ends: Callable[[str], bool] = lambda name: rng.random() < DONE
        self.fails: Callable[[str], bool] = lambda name: rng.random() < FAILS
        groups = worker.kv_cache_config.kv_cache_groups
        # NIXL says which blocks did not come, where their numbers are of one kind alone.
        self._tells_blocks = all(isinstance(g.kv_cache_spec, FullAttentionSpec) for g in groups)
        self._pending: dict[str, Any] = {}

    def begin(self, output: SchedulerOutput) -> None: ...

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        for name, read in cast(Any, output.kv_connector_metadata).reqs_to_recv.items():
            if read.awaiting_kvs or any(read.local_block_ids):
                self._pending[name] = read
            else:  # All is there, or its request was aborted.
                self._held.let_go(read.remote.request_id)
        received, failed, invalid = set[str](), set[str](), set[int]()
        for name in [name for name in self._pending if self.ends(name)]:
            read = self._pending.pop(name)
            received.add(name)
            fails = self.fails(name)
            if fails:
                failed.add(name)
                invalid |= set(read.local_block_ids[0]) if self._tells_blocks else set()
            self._read(name, read, fails)
            self._held.let_go(read.remote.request_id)
        return KVConnectorOutput(
            finished_recving=received or None, failed_recving=failed, invalid_block_ids=invalid
        )

    def _read(self, name: str, read: Any, fails: bool) -> None:
        """Entries of all blocks, or of some of them."""
        self.counts["prompts that did not come" if fails else "prompts that came"] += 1
        for local, remote in zip(read.local_block_ids, read.remote.block_ids, strict=True):
            if len(local) > len(remote):
                raise Mismatch(f"{name} has blocks {local} for what is left in {remote}")
            for target, source in zip(local, remote[len(remote) - len(local) :], strict=True):
                if not (fails and self._rng.random() < 0.5):
                    self._worker.cache.put_entries(target, self._source.cache.entries_in(source))
                    self.counts["blocks fetched"] += 1
        if not fails:
            self._worker.came[name] = self._source.left[read.remote.request_id]

    @property
    def are_done(self) -> bool:
        return not self._pending


class Pair:
    """Both servers: `first` computes prompts, `second` goes on with them."""

    def __init__(
        self,
        server: Server,
        config: VllmConfig,
        cases: tuple[Case, Case],
        rng: random.Random,
        failures: str = "recompute",
    ) -> None:
        """config: see ``Server.config``; it stays as it is.

        failures: ``kv_load_failure_policy``.
        """
        configs = (_of_role(config, role, failures) for role in ("kv_producer", "kv_consumer"))
        self.first, self.second = (
            Engine(server, each, case, rng) for each, case in zip(configs, cases, strict=True)
        )
        self.engines = self.first, self.second
        self.held = Held()
        self.fetches = Fetches(self.second.worker, self.first.worker, self.held, rng)
        self.first.worker.transfers, self.second.worker.transfers = self.held, self.fetches


class HandingOver:
    """Both servers, and their clients, by way of a proxy."""

    def __init__(self, server: Server, config: VllmConfig, seed: int) -> None:
        """config: see ``Server.config``; it stays as it is."""
        self.rng = rng = random.Random(f"{server.policy}, two servers, {seed}")
        self.server = server
        cases = Case.draw(server, rng), Case.draw(server, rng)
        failures = rng.choice(["recompute", "recompute", "fail"])
        pair = Pair(server, config, cases, rng, failures)
        self.first, self.second, self.engines = pair.first, pair.second, pair.engines
        self.case, self._held = cases[0], pair.held
        self.traffic = Traffic(server, self.case.by_priority, rng)
        # Requests of the first server, as the client has sent them.
        self._sent: dict[str, Request] = {}
        # First tokens that came along, by request of the second server.
        self._first_tokens: dict[str, int] = {}
        self._counts = Counter[str]()

    def run(self) -> Outcome:
        """Clients come and go; then what is left is finished.

        Raises:
            Mismatch: see ``Simulation.run``; or an answer has other tokens than it should.
        """
        for _ in range(self.server.steps * 4 // 5):
            self._clients()
            self._tick()
        for _ in range(LONGEST_REST):
            if not (self._sent or any(engine.is_busy for engine in self.engines)):
                break
            self._tick()
        for engine in self.engines:
            engine.check_idle()
        counts = self.first.counts + self.second.counts + self._counts
        preempted = self.first.preempted + self.second.preempted
        return Outcome(self.case, self.second.finished, preempted, counts)

    def _clients(self) -> None:
        rng = self.rng
        while rng.random() < ARRIVAL and all(len(e.live) < MAX_LIVE for e in self.engines):
            request = self.traffic.draw(rng.choice(self.engines).worker.finished)
            if rng.random() < IS_PLAIN:
                rng.choice(self.engines).add(request)
            else:
                self._sent[request.request_id] = request
                self.first.add(self.traffic.passed_on(request, 1, {HOLDS: True}))
        for engine in self.engines:
            if engine.live and rng.random() < ABORT:
                name = rng.choice(list(engine.live))
                engine.abort(name)
                if engine is self.first:
                    self._sent.pop(name, None)
            if rng.random() < engine.case.resets:
                engine.reset(reset_running=rng.random() < 0.7)

    def _tick(self) -> None:
        rng = self.rng
        for engine in self.engines:
            if rng.random() < RESTS:
                continue
            engine.step()
            waits = engine.scheduler.has_unfinished_requests()
            early = engine.has_unreported and (not waits or rng.random() < EARLY_REPORT)
            if engine.must_report or early:
                engine.report()
        for name in [name for name in self._sent if name in self.first.ended]:
            if rng.random() < PASSES_ON:
                self._pass_on(name)
        self._check_answers()

    def _pass_on(self, name: str) -> None:
        request, told = self._sent.pop(name), self.first.ended.pop(name)
        if told is None or name in self.second.live:
            raise Mismatch(f"{name} was computed, and nothing is said of where it lies")
        if self.rng.random() < IS_LEFT:
            self._held.let_go(name)
            return
        params = request.sampling_params
        assert params is not None and params.max_tokens is not None
        same = _policy_of(request)
        policy, changes = same, self.rng.random() < CHANGES
        # Of whole prompts of `full` nothing is said: as in stock, both requests are to be alike.
        may = request.lora_request is not None and KEY in told
        has_other = changes and may and self.rng.random() < 0.5
        if changes and not has_other:
            policy = self.rng.choice(self.server.requests)
        transfer = json.loads(json.dumps(told))
        asked = self.traffic.passed_on(request, params.max_tokens, transfer, policy)
        if has_other:
            asked.lora_request = None
            asked.block_hashes.clear()
            asked.update_block_hashes()
        self.second.add(asked)
        scheduler = self.second.scheduler
        comes = scheduler.handed_over.is_coming(request)
        lacks = not all(m.requests[name].is_stock for m in scheduler.first_stage_managers)
        lacks |= not all(m.requests[name].is_stock for m in scheduler.later_stage_managers)
        if comes != (lacks and KEY in told and policy == same and not has_other):
            raise Mismatch(f"{name} under {policy}: comes {comes}, computed under {same}: {told}")
        if comes:
            self._first_tokens[name] = told[KEY]["token"]

    def _check_answers(self) -> None:
        """Of requests of the second server that have ended."""
        for name in self.second.ended:
            first, answer = self._first_tokens.pop(name, None), self.second.answers.pop(name)
            self._counts["first tokens told"] += first is not None and bool(answer)
            if first is not None and answer[:1] not in ([], [first]):
                raise Mismatch(f"{name} begins with {answer[0]}, where {first} was handed over")
        self.second.ended.clear()


def _policy_of(request: Request) -> str:
    assert request.sampling_params is not None and request.sampling_params.extra_args is not None
    return str(request.sampling_params.extra_args[POLICY_KEY])


def _of_role(config: VllmConfig, role: str, failures: str) -> VllmConfig:
    config = deepcopy(config)
    transfer: Any = config.kv_transfer_config
    transfer.kv_role, transfer.kv_load_failure_policy = role, failures
    return config
