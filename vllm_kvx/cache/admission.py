"""Where a prompt's chunks end, and when a prompt may begin, under policies that score its keys."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.config import SchedulerConfig
from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_kvx.config.quoting import quoted
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.axes import ScoreSpec
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import Storage, stash_pages

logger = init_logger("vllm.kvx.scheduler")

# Requests whose window may be spread over several chunks at once: each keeps its window's queries
# of every layer meanwhile. It happens where less than a window is left of a step's budget, and to
# every prompt where chunks are shorter than the window; the others wait then.
SPLIT_WINDOWS = 4
# The same where retention waits for generated tokens: each of them is a step, in which many run.
# Or where tokens are drafted behind prompts, for all that end in one step together.
GENERATED_WINDOWS = 32


def num_split_windows(settings: KVSettings, config: SchedulerConfig) -> int:
    """Room for windows that are spread over steps, on scheduler and worker alike."""
    waits = any(policy.num_generated or policy.lookahead for policy in settings.policies)
    return min(GENERATED_WINDOWS if waits else SPLIT_WINDOWS, config.max_num_seqs)


def in_both(coming: Collection[str], scheduled: Collection[str]) -> list[str]:
    """Requests whose prompt comes in, of a step; quick where ten thousand wait, or decode."""
    if len(coming) <= len(scheduled):
        return [request_id for request_id in coming if request_id in scheduled]
    return [request_id for request_id in scheduled if request_id in coming]


@dataclass
class _Prompt:
    """A prompt that scores keys or changes what it stores when it is in.

    length: with the generated tokens that it waits for. window: the last of these. drafts: whether
    tokens are drafted behind it, which score its keys together with the window. chosen_at: where
    tokens are chosen to go on before that, see ``Storage``.
    """

    length: int
    window: int
    pages: int
    needs_passes: bool
    turn: int | None = None
    drafts: bool = False
    chosen_at: int | None = None
    has_waited: bool = False

    def seeks(self, start: int) -> bool:
        """Whether a chunk from there on has states that wait in the stash."""
        return self.pages > 0 and (self.chosen_at is None or start < self.chosen_at)


class PromptAdmission:
    """Clips chunks, and says which waiting prompts may begin.

    A chunk ends at the end of the prompt, if it reaches it: there entries go. So does one that
    reaches a position from which on entries take the slots of others. It does not end
    within the window if it can end before, so that the window's queries are in one chunk; where
    retention waits for generated tokens, it ends with these, and is spread over steps; a chunk ends
    before them, too, if tokens of the prompt are chosen there to go on. Where tokens
    are drafted behind the prompt, its queries are kept until these have run. Where the
    selected tokens take several passes through the later stages, the window is a chunk of its own:
    else these passes would come on top of a chunk as long as any other, and running requests would
    wait for both.

    A prompt begins when the stash has room for all of it. vLLM asks for every waiting request in
    the order of its queue. One that has to wait is passed over, and those behind it that need no
    room begin. A prompt never takes pages that one ahead of it in the queue needs.

    Attributes:
        coming: by request id, the prompts that are not in yet.
        free_pages: pages of the stash that no prompt has, STASH_PAGE tokens each.
        free_windows: how many more windows may be spread over chunks.
        stash_waits: prompts so far that had to wait for the stash, each counted once.
    """

    def __init__(self, settings: KVSettings, config: SchedulerConfig) -> None:
        self.num_layers = settings.num_layers
        self.max_tokens = config.max_num_batched_tokens
        self.free_pages = stash_pages(settings.stash_tokens)
        self.free_windows = num_split_windows(settings, config)
        self._prompts: dict[str, _Prompt] = {}
        self.coming: dict[str, Request] = {}
        # Those of them whose tokens the step before has chosen: their states wait no longer.
        self._chosen: list[str] = []
        self._pages: dict[str, int] = {}
        self._split: set[str] = set()
        # Prompts without the pages that they need: all of them are in vLLM's queue.
        self._seekers: dict[str, _Prompt] = {}
        # Of the step that is being scheduled: how many seekers vLLM has passed over, the pages that
        # it has to leave for them, and the seeker that it came to last.
        self._num_passed = self._pages_ahead = 0
        self._last: str | None = None
        self.stash_waits = 0
        self._seconds_waited = 0.0
        # By request that waits for the stash, since when: seconds of the monotonic clock.
        self._waiting_since: dict[str, float] = {}

    def add_request(self, request: Request, policy: KVPolicy, storages: Sequence[Storage]) -> None:
        """storages: what it stores, by stage."""
        turn = next((s.turn for s in storages if s.turn is not None), None)
        length, window, pages, propagated = request.num_prompt_tokens, 0, 0, 0
        selection = policy.selection(length, self.num_layers)
        if selection is not None:
            window = selection.score.window
            pages = 0 if selection.resumes_at == 0 else stash_pages(length)
            propagated = selection.count if selection.online is None else length
        chosen_at = next((s.chosen_at for s in storages if s.chosen_at is not None), None)
        if chosen_at is not None and not any(s.compacts for s in storages):
            chosen_at = None  # Retention drops nothing, and waits for nothing.
        elif policy.retain is not None and isinstance(policy.retain.keeps_by, ScoreSpec):
            by = policy.retain.keeps_by
            window = max(window, by.prompt_window + by.generated)
            length += policy.num_generated
        if any(s.changes for s in storages):
            drafts = policy.num_drafted(request.num_prompt_tokens) > 0
            self._prompts[request.request_id] = _Prompt(
                length,
                min(window, length),
                pages,
                propagated > self.max_tokens,
                turn,
                drafts,
                chosen_at,
            )
            self.coming[request.request_id] = request
            self._seek(request.request_id)

    def new_step(self) -> None:
        """vLLM begins to schedule a step."""
        for request_id in self._chosen:
            self.free_pages += self._pages.pop(request_id, 0)
        self._chosen = []
        self._num_passed = self._pages_ahead = 0
        self._last = None

    def is_passed_over(self, request: Request, is_ready: bool, num_left: int) -> bool:
        """Whether vLLM has to go on from a waiting request to the next one.

        Ask for each request in the order of vLLM's queue.

        is_ready: whether it may begin, as far as vLLM knows.
        num_left: waiting requests from this one on.
        """
        prompt = self._seekers.get(request.request_id)
        if prompt is None:
            return not is_ready
        if not is_ready:  # It does not wait for pages, so none are left for it.
            self._num_passed += 1
            return True
        if self._last in self._seekers:
            self._num_passed += 1
            self._pages_ahead += self._seekers[self._last].pages
        self._last = request.request_id
        if self._has_room(prompt):
            return False
        if len(self._waiting_since) < len(self._seekers):  # All wait that are behind it, too.
            for request_id, other in self._seekers.items():
                if request_id not in self._waiting_since:
                    self._wait(request_id, other)
        # Where only seekers are left, vLLM need not go through all of them: its loop ends here, as
        # this one gets no tokens.
        return num_left > len(self._seekers) - self._num_passed

    def _has_room(self, prompt: _Prompt) -> bool:
        return self._pages_ahead + prompt.pages <= self.free_pages

    def clip(self, request: Request, start: int, num_new_tokens: int) -> int:
        """How many of `num_new_tokens` from position `start` on may run in this step."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or start >= prompt.length:
            return num_new_tokens
        if prompt.seeks(start) and not self._take_pages(request.request_id, prompt):
            return 0
        end, chosen_at = self.within(request, start, start + num_new_tokens), prompt.chosen_at
        window_start = prompt.length - prompt.window
        if prompt.needs_passes and start < window_start:
            return min(end, window_start) - start
        if window_start < end and (end < prompt.length or prompt.drafts):
            # What is generated takes steps of its own: the window cannot be in one chunk.
            must_split = start >= window_start or end >= request.num_tokens
            must_split = must_split or end in (chosen_at, prompt.length)
            if not (must_split and self._may_split(request.request_id)):
                end = max(window_start, start)
        return end - start

    def within(self, request: Request, start: int, end: int) -> int:
        """Where a chunk from `start` to `end` has to end, so as to cross no place where one ends.

        Chunks end with the prompt or with the generated tokens that retention waits for, where
        tokens are chosen to go on, and where entries begin to take the slots of others.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None or start >= prompt.length:
            return end
        end = min(end, prompt.length)
        # Those that a step under way samples stay, too.
        stay = request.num_tokens + request.num_output_placeholders
        if stay < end:
            # Drafted tokens may be rejected: what retention waits for ends with one that stays.
            end = min(end, max(prompt.length - 1, stay))
        places = prompt.turn, prompt.chosen_at
        return min([end, *(each for each in places if each is not None and start < each)])

    def has_to_end(self, request: Request, end: int) -> bool:
        """Whether a chunk that reaches `end` ends there, be it the end of a block or not."""
        prompt = self._prompts.get(request.request_id)
        return end == request.num_prompt_tokens or (prompt is not None and end == prompt.length)

    def may_end(self, request: Request, end: int) -> bool:
        """Whether a chunk may end there, which another rule than `clip` has chosen."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.length - prompt.window < end < prompt.length:
            return True
        return self._may_split(request.request_id)

    def _take_pages(self, request_id: str, prompt: _Prompt) -> bool:
        if request_id in self._pages:
            return True
        if not self._has_room(prompt):
            return False
        del self._seekers[request_id]
        self._end_wait(request_id)
        self._pages[request_id] = prompt.pages
        self.free_pages -= prompt.pages
        return True

    def _seek(self, request_id: str) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.pages:
            self._seekers[request_id] = prompt

    def _wait(self, request_id: str, prompt: _Prompt) -> None:
        self._waiting_since[request_id] = time.monotonic()
        if not prompt.has_waited:
            prompt.has_waited = True
            self.stash_waits += 1
            logger.info(
                "Request %s of %d tokens waits: other prompts fill the stash of hidden states "
                "(kv_stash_tokens).",
                quoted(request_id),
                prompt.length,
            )

    def _end_wait(self, request_id: str) -> None:
        since = self._waiting_since.pop(request_id, None)
        if since is not None:
            self._seconds_waited += time.monotonic() - since

    @property
    def stash_wait_seconds(self) -> float:
        """Seconds that prompts have waited for the stash, those that wait now included.

        A prompt waits from the first step in which the stash has no room for it, or for one ahead
        of it in the queue, until it gets its pages or its request ends. Prompts that wait at once
        add up.
        """
        now = time.monotonic()
        return self._seconds_waited + sum(now - since for since in self._waiting_since.values())

    def _may_split(self, request_id: str) -> bool:
        if request_id not in self._split:
            if self.free_windows == 0:
                return False
            self.free_windows -= 1
            self._split.add(request_id)
        return True

    def past_prompt(self, scheduled: Collection[str]) -> list[Request]:
        """The requests whose prompt ends in the step just scheduled; they are no longer `coming`.

        scheduled: ids of the requests in this step.
        """
        past = []
        for request_id in in_both(self.coming, scheduled):
            prompt = self._prompts[request_id]
            computed = self.coming[request_id].num_computed_tokens
            if computed >= prompt.length:
                past.append(self.coming.pop(request_id))
            elif request_id in self._pages and not prompt.seeks(computed):
                self._chosen.append(request_id)
        return past

    def release(self, request_id: str) -> None:
        """Takes back what the prompt needed while it was coming in."""
        self.free_pages += self._pages.pop(request_id, 0)
        if request_id in self._split:
            self._split.remove(request_id)
            self.free_windows += 1

    def settle(self, running: Sequence[Request]) -> None:
        """Takes back what requests hold that were let through here and not scheduled after all.

        One that waits for blocks must not keep from others what these blocks wait for.
        """
        if not self._pages and not self._split:
            return
        run = {request.request_id for request in running}
        for request_id in [*self._pages, *self._split]:
            if request_id not in run:
                self.release(request_id)
                self._seek(request_id)

    def prompt_is_in(self, request_id: str) -> None:
        """Another server has computed the request's prompt."""
        self.coming.pop(request_id, None)
        self._seekers.pop(request_id, None)

    def restart(self, request: Request) -> None:
        """A preempted request: its prompt comes in again."""
        request_id = request.request_id
        self.release(request_id)
        if request_id in self._prompts:
            self.coming[request_id] = request
            self._seek(request_id)

    def remove_request(self, request_id: str) -> None:
        self.release(request_id)
        self._end_wait(request_id)
        self._prompts.pop(request_id, None)
        self.coming.pop(request_id, None)
        self._seekers.pop(request_id, None)
