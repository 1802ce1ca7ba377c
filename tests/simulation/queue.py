"""What a schedule may do with the requests that wait, checked after every one.

Some prompts wait for the stash: their hidden states take pages of it until the prompt is in. Such a
prompt holds back none but those that need pages too, and none of those overtakes it.
"""

from collections import Counter
from typing import Any

from support import inside
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from simulation.cache import Mismatch
from simulation.server import LORA_SLOTS, NUM_LAYERS, Case, Server
from vllm_kvx.config.settings import request_policy
from vllm_kvx.policy.storage import stash_pages


class Queue:
    """The waiting requests of a scheduler.

    counts: how often what happened.
    """

    def __init__(self, scheduler: Any, server: Server, case: Case) -> None:
        self._scheduler, self._case = scheduler, case
        self._waits_for_states = (
            server.others is not None and server.others.is_state and server.others.mode == "align"
        )
        self._drafts = server.drafts
        self._total_pages = stash_pages(scheduler.kv_settings.stash_tokens)
        # Blocks that are enough for any request.
        self._enough = server.num_groups * -(-server.max_len // server.block_size)
        self._waiting: list[Request] = []
        self._holders: set[str] = set()
        # Those that wait, and whose prompts another server has computed.
        self._computed: set[str] = set()
        self.counts = Counter[str]()
        # Those whose entries were still to come before a schedule.
        self._loading: set[str] = set()
        # Whether a KV connector has asked a request to wait, for an answer or for what it loads.
        self._delays = False
        if scheduler.connector is not None:
            self._listen_to(scheduler.connector)

    def _listen_to(self, connector: Any) -> None:
        stock = connector.get_num_new_matched_tokens

        def found(request: Request, *args: Any) -> tuple[int | None, bool]:
            count, later = stock(request, *args)
            self._delays |= count is None or later
            self.counts["loads asked for"] += bool(count)
            self.counts["answers later"] += count is None
            return count, later

        connector.get_num_new_matched_tokens = found

    def look(self) -> None:
        """Before a schedule: who waits, in the order of the queue, and who has pages."""
        scheduler, self._delays = self._scheduler, False
        self._waiting = [*scheduler.kv_holding_waiting, *scheduler.waiting]
        self._computed = {r.request_id for r in self._waiting if self._is_computed(r)}
        self._loading = {
            request.request_id
            for request in self._waiting
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        self._holders = {
            request.request_id
            for request in scheduler.running
            if request.num_computed_tokens < request.num_prompt_tokens
        }
        self._over = {request.request_id for request in scheduler.running if _is_over(request)}

    def check(self, output: SchedulerOutput) -> None:
        """After a schedule.

        Raises:
            Mismatch: a prompt took pages that one ahead of it waits for; more adapters are needed
                than there are slots; or a request did not begin, though nothing that it needs is
                short.
        """
        scheduler, ran = self._scheduler, output.num_scheduled_tokens
        begun = {request.request_id for request in self._waiting}
        used = sum(
            self._pages(request)
            for request in scheduler.running
            if request.request_id in self._holders | begun
        )
        if used != inside.used_pages(scheduler):
            raise Mismatch(f"{used} stash pages are needed, {inside.used_pages(scheduler)} taken")
        free, ahead = self._total_pages - used, 0
        lacks = self._lacks_anything(output)
        if self._over & ran.keys():
            raise Mismatch(f"{self._over & ran.keys()} run on, and their last token is under way")
        # Those of running requests that got no tokens, too: they may get some in the next step.
        needed = [request for request in scheduler.running if request.request_id not in self._over]
        slots = {_adapter(request) for request in needed} - {0}
        if len(slots) > LORA_SLOTS:
            raise Mismatch(f"requests with adapters {slots} run in {LORA_SLOTS} slots")
        waiting = [*scheduler.kv_holding_waiting, *scheduler.waiting]
        seekers = {request.request_id for request in waiting if self._pages(request)}
        if seekers != inside.stash_seekers(scheduler):
            raise Mismatch(f"{seekers} wait without pages, not {inside.stash_seekers(scheduler)}")
        for request in self._waiting:
            pages = self._pages(request)
            if request.request_id in ran:
                self.counts["passed ahead"] += ahead > 0
                if pages and ahead > free:
                    raise Mismatch(f"{request.request_id} took pages that one ahead waits for")
                continue
            # One whose load failed is passed over once.
            is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            self.counts["waited for a transfer"] += is_loading
            if is_loading or request.request_id in self._loading:
                continue
            waits = pages > 0 and ahead + pages > free
            ahead += pages
            self.counts["waited for the stash"] += waits
            has_slot = len(slots) < LORA_SLOTS or _adapter(request) in (0, *slots)
            self.counts["waited for a slot"] += not has_slot
            if not (lacks or waits or not has_slot or request.num_stale_output_tokens):
                raise Mismatch(
                    f"{request.request_id} waits: {free} stash pages are free, it needs {pages}"
                )

    def _lacks_anything(self, output: SchedulerOutput) -> bool:
        """Whether the server may have had no seat, tokens or blocks for one more request."""
        scheduler = self._scheduler
        if self._waits_for_states and output.num_scheduled_tokens:
            # Chunks end where blocks do, and a step does not read the states of the same step.
            return True
        if scheduler.connector is not None and (scheduler.kv_holding_waiting or self._delays):
            # Who waits for a transfer keeps blocks from others, and the connector may ask
            # requests to wait.
            return True
        return bool(
            output.preempted_req_ids
            or len(scheduler.running) >= self._case.max_seqs
            # vLLM begins no request of one token without room for as many drafts as others have.
            or output.total_num_scheduled_tokens + self._drafts >= self._case.max_batch
            or scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            < self._enough + inside.owed_blocks(scheduler)
        )

    def _pages(self, request: Request) -> int:
        if request.request_id in self._computed or self._is_computed(request):
            return 0
        policy = request_policy(self._scheduler.kv_settings, request.sampling_params)
        selection = policy.selection(request.num_prompt_tokens, NUM_LAYERS)
        takes = selection is not None and selection.resumes_at > 0
        return stash_pages(request.num_prompt_tokens) if takes else 0

    def _is_computed(self, request: Request) -> bool:
        comes = self._scheduler.handed_over.is_coming(request)
        there = request.num_computed_tokens >= request.num_prompt_tokens
        return comes or (there and request.status != RequestStatus.RUNNING)


def _adapter(request: Request) -> int:
    return 0 if request.lora_request is None else request.lora_request.lora_int_id


def _is_over(request: Request) -> bool:
    """Whether a step under way is its last: each step samples a token at least."""
    under_way = request.num_output_placeholders > 0
    return under_way and request.num_output_tokens + 1 >= request.max_tokens
