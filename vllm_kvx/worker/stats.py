"""Counters of what each policy computed and skipped, kept on the host."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vllm_kvx.cache.latency import FIRST_TOKEN_BOUNDS, PER_TOKEN_BOUNDS
from vllm_kvx.policy.counted import CountedPolicies
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.retrieval_layers import OF_PAPERS, RetrievalLayers
from vllm_kvx.worker.decode.step import RetrievalPass, rows_of
from vllm_kvx.worker.prefill.chunks import PromptChunk, PromptState
from vllm_kvx.worker.requests import Requests
from vllm_kvx.worker.step import Step

# Steps whose retrieval is added up at once: numpy takes as long for one as for many.
_STEPS = 64


class PolicyStats:
    """Cumulative counters per policy; a policy gets its row when first seen.

    Attributes:
        policies: the rows; every array has one for each that there can be.
        entries_kept, entries_computed: (rows, S) int64, for the layers of every KV stage the
            entries that prompts kept and had.
        entries_spared: entries that layers above a pivot found online did not compute.
        pivots: by row, how many prompts found which pivot online.
        scheduler: what the scheduler last told, see ``PolicySchedulerStats``; {} before the
            first time.
    """

    def __init__(
        self,
        stage_sizes: Sequence[int],
        policies: CountedPolicies | None = None,
        num_layers: int | None = None,
        first_layer: int = 0,
        retrieving: RetrievalLayers = OF_PAPERS,
        reads_parts: Sequence[bool] | None = None,
    ) -> None:
        """stage_sizes: layers of every KV stage that this worker has.

        num_layers: that run, if others run as well. first_layer: the number of the first one.
        retrieving: the layers that retrieve. reads_parts: by stage, whether it has any of them,
            on whatever rank; None if all have.
        """
        self.retrieving = retrieving
        self.stage_sizes, self.first_layer = np.array(stage_sizes), first_layer
        numbers = range(first_layer, first_layer + sum(stage_sizes))
        chooses = [retrieving.chooses(number, first_layer) for number in numbers]
        # Layers of every stage that choose what they and others read.
        by_stage = np.split(np.array(chooses, dtype=int), np.cumsum(self.stage_sizes)[:-1])
        self._choosing = np.array([part.sum() for part in by_stage])
        every = [True] * len(stage_sizes)
        self._reads_parts = np.array(every if reads_parts is None else reads_parts)
        self.num_layers = sum(stage_sizes) if num_layers is None else num_layers
        self.policies = policies if policies is not None else CountedPolicies()
        size = self.policies.size
        self.requests = np.zeros(size, dtype=np.int64)
        self.prompt_tokens = np.zeros(size, dtype=np.int64)
        self.tokens = np.zeros(size, dtype=np.int64)
        self.layer_tokens_computed = np.zeros(size, dtype=np.int64)
        self.layer_tokens_skipped = np.zeros(size, dtype=np.int64)
        self.tokens_propagated = np.zeros(size, dtype=np.int64)
        self.blocks_freed = np.zeros(size, dtype=np.int64)
        self.entries_kept = np.zeros((size, len(self.stage_sizes)), dtype=np.int64)
        self.entries_computed = np.zeros_like(self.entries_kept)
        self.entries_spared = np.zeros(size, dtype=np.int64)
        self.pivots: dict[int, dict[int, int]] = {}
        self._retrieval = np.zeros((size, 5), dtype=np.int64)
        self._steps: list[tuple[np.ndarray, ...]] = []
        self.scheduler: Mapping[str, Any] = {}

    def anew(self, policies: CountedPolicies) -> "PolicyStats":
        """Of the same layers, with nothing counted yet."""
        sizes = self.stage_sizes.tolist()
        layers = self.num_layers, self.first_layer, self.retrieving
        return PolicyStats(sizes, policies, *layers, self._reads_parts.tolist())

    def row_of(self, policy: KVPolicy) -> int:
        """The policy's row in the counters."""
        return self.policies.row_of(str(policy))

    def add_step(
        self, step: Step, requests: Requests, ran: Iterable[tuple[int, np.ndarray]]
    ) -> None:
        """Adds one step.

        ran: by segment of the decoder its layers, and (R,) rows that the passes over the batch run
            of each request.
        """
        rows, tokens = requests.policy_rows[step.requests], step.counts
        computed = np.zeros_like(tokens)
        for size, counts in ran:
            computed = computed + counts * size
        skipped = tokens * self.num_layers - computed
        for chunk in step.chunks:
            if chunk.state.selection is not None:
                self._add_chunk(chunk, computed, skipped)
        prompt = np.clip(requests.prompt_lens[step.requests] - step.begins, 0, tokens)
        np.add.at(self.tokens, rows, tokens)
        np.add.at(self.prompt_tokens, rows, prompt)
        np.add.at(self.layer_tokens_computed, rows, computed)
        np.add.at(self.layer_tokens_skipped, rows, skipped)
        for chunk in step.chunks:
            if chunk.is_last:
                self._add_prompt(chunk.state.stats_row, chunk.state)

    def add_decodes(self, step: Step, requests: Requests) -> None:
        """Adds a step in which all requests are past their prompts."""
        rows, size = requests.policy_rows[step.requests], len(self.tokens)
        tokens = np.bincount(rows, step.counts, minlength=size).astype(np.int64)
        self.tokens += tokens
        self.layer_tokens_computed += tokens * self.num_layers

    def _add_chunk(self, chunk: PromptChunk, computed: np.ndarray, skipped: np.ndarray) -> None:
        """Corrects a step's (R,) layer-tokens for a prompt that chooses tokens.

        What it skips is known when it is in: the chosen tokens run layers that its chunks left out.
        So it is counted then, and the totals never fall. A rerun may take more than it saves.
        """
        state, here = chunk.state, chunk.batch_index
        selection = state.selection
        assert selection is not None
        more = 0
        if selection.online is not None:
            more = (chunk.end - chunk.begin) * (selection.online.lowest + 1)
        elif chunk.is_last:
            more = selection.count * (self.num_layers - state.resumes_at)
        computed[here] += more
        state.skipped += int(skipped[here]) - more
        is_known = chunk.is_last and selection.online is None
        skipped[here] = max(state.skipped, 0) if is_known else 0

    def _add_prompt(self, row: int, prompt: PromptState) -> None:
        """Adds a prompt that came in and was selected from or compacted."""
        if prompt.selection is not None and prompt.selection.online is None:
            self.tokens_propagated[row] += prompt.selection.count
        if prompt.then is not None:
            return
        self.entries_kept[row] += [storage.kept for storage in prompt.storages]
        self.entries_computed[row] += [each.rows - prompt.drafted for each in prompt.storages]

    def add_pivot(self, prompt: PromptState, pivot: int) -> None:
        """Adds a prompt whose pivot was found online."""
        selection, row = prompt.selection, prompt.stats_row
        assert selection is not None and selection.online is not None
        above = self.num_layers - 1 - pivot
        pivots = self.pivots.setdefault(row, {})
        pivots[pivot] = pivots.get(pivot, 0) + 1
        # All its tokens took the layers up to there, the lowest of which are counted already.
        more = prompt.settles_at * (pivot - selection.online.lowest)
        more += selection.count * above
        self.layer_tokens_computed[row] += more
        self.layer_tokens_skipped[row] += max(prompt.skipped - more, 0)
        self.tokens_propagated[row] += selection.count
        # `_add_prompt` took every layer for one that computed all.
        self.entries_spared[row] += (prompt.settles_at - selection.count) * above

    def add_retrieval_step(
        self, step: Step, requests: Requests, unit: int, now: RetrievalPass | None
    ) -> None:
        """Adds what a step's decode tokens retrieve, drafted ones and the one before them alike.

        unit: tokens that are read together. now: the step's pass; None if nothing retrieves.
        """
        retrieval = step.retrieval
        assert retrieval is not None
        decodes = retrieval.generated > 0
        if retrieval.chunks:
            decodes[retrieval.chunks] = False  # Tokens that run again, after preemption.
        rows, budgets = requests.policy_rows[step.requests], retrieval.budgets * unit
        all_choose = np.zeros_like(retrieval.lens, dtype=bool)
        if now is not None and any(len(batches) > 1 for batches in now.batches):
            all_choose[now.each_chooses] = True
        self._steps.append((rows, step.stored_lens * decodes, retrieval.lens, budgets, all_choose))
        drafts = step.batch.num_draft_tokens_per_req
        if drafts is not None and retrieval.chunks:
            chunks = np.array(retrieval.chunks)
            chunks = chunks[drafts[chunks] > 0]
            places, after = rows_of(drafts[chunks] + 1)
            each = chunks[places]
            all_choose = np.repeat(all_choose[:, :1], len(each), axis=1)
            seen = step.stored_lens[:, each] - after
            seen *= step.ends[each] - after > requests.prompt_lens[step.requests][each]
            lens = np.where(seen >= retrieval.rules.floors[each], seen, 0)
            self._steps.append((rows[each], seen, lens, budgets[each], all_choose))
        if len(self._steps) >= _STEPS:
            self._add_steps()

    @property
    def retrieval(self) -> np.ndarray:
        """(rows, 5) int64, of decode steps: entries there are, scored and read, and steps of
        requests that retrieve and that read all."""
        self._add_steps()
        return self._retrieval

    def _add_steps(self) -> None:
        steps, self._steps = self._steps, []
        if steps:
            parts = zip(*steps, strict=True)
            self.add_retrieval(*(np.concatenate(part, axis=-1) for part in parts))

    def add_retrieval(
        self,
        rows: np.ndarray,
        seen: np.ndarray,
        lens: np.ndarray,
        budgets: np.ndarray,
        all_choose: np.ndarray,
    ) -> None:
        """Adds a step's decode tokens.

        Args:
            rows: (R,) policy rows. budgets: (R,) tokens, 0 of policies that do not retrieve.
            seen: (S, R) entries that are there for each request, 0 while its prompt comes in.
            lens: (S, R) entries of stages that retrieve, else 0.
            all_choose: (S, R) bool, of steps in which each layer of a stage that retrieves chooses.
        """
        starts = np.cumsum(self.stage_sizes) - self.stage_sizes
        dense = np.clip(self.retrieving.dense - self.first_layer - starts, 0, self.stage_sizes)
        layers = (self.stage_sizes - dense)[:, None]
        seen = seen * (budgets > 0)
        has = seen.any(axis=0)
        retrieves = lens[self._reads_parts].any(axis=0)
        per_layer = np.where(lens > 0, np.minimum(lens, budgets), seen)
        choosing = np.where(all_choose, layers, self._choosing[:, None])
        totals = np.stack(
            [
                self.stage_sizes @ seen,
                (choosing * lens).sum(axis=0),
                dense @ seen + (layers * per_layer).sum(axis=0),
                retrieves,
                has & ~retrieves,
            ],
            axis=1,
        )
        np.add.at(self._retrieval, rows, totals)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """JSON-able totals by policy name."""
        same = "prefix_hit", "prefix_cached", "prefix_states", "tokens_drafted", "tokens_accepted"
        told = {key: self._by_row(key) for key in ("unshared", "held", "saved", *same)}
        first, later = (self._histograms(key) for key in ("first_token", "per_token"))
        return {
            name: {
                "requests": int(self.requests[row]),
                "prompt_tokens": int(self.prompt_tokens[row]),
                "layer_tokens_computed": int(self.layer_tokens_computed[row]),
                "layer_tokens_skipped": int(self.layer_tokens_skipped[row]),
                "tokens_propagated": int(self.tokens_propagated[row]),
                "blocks_freed": int(self.blocks_freed[row]),
                "entries_retained": int(self.entries_kept[row] @ self.stage_sizes),
                "entries_dropped": int(
                    (self.entries_computed[row] - self.entries_kept[row]) @ self.stage_sizes
                    - self.entries_spared[row]
                ),
                "online_pivots": {str(k): n for k, n in sorted(self.pivots.get(row, {}).items())},
                "entries_retained_by_layer": np.repeat(
                    self.entries_kept[row], self.stage_sizes
                ).tolist(),
                "entries_held_in_decode": int(self.retrieval[row, 0]),
                "entries_scored": int(self.retrieval[row, 1]),
                "entries_read": int(self.retrieval[row, 2]),
                "retrieval_steps": int(self.retrieval[row, 3]),
                "dense_fallbacks": int(self.retrieval[row, 4]),
                "blocks_held": told["held"].get(row, 0),
                "blocks_saved": told["saved"].get(row, 0),
                "prefix_not_shared": told["unshared"].get(row, 0),
                **{key: told[key].get(row, 0) for key in same},
                **_latencies("first_token", FIRST_TOKEN_BOUNDS, first.get(row)),
                **_latencies("per_token", PER_TOKEN_BOUNDS, later.get(row)),
            }
            for name, row in self.policies.names
        }

    def _by_row(self, key: str) -> dict[int, int]:
        """What the scheduler counted by policy, by row.

        It may know policies that no request has run under here, or one that has no row here.
        """
        rows: dict[int, int] = {}
        for name, count in self.scheduler.get(key, {}).items():
            row = self.policies.row_of(name)
            rows[row] = rows.get(row, 0) + count
        return rows

    def _histograms(self, key: str) -> dict[int, np.ndarray]:
        """The scheduler's counts up to each bound and sum of seconds, by row; see `_by_row`."""
        rows: dict[int, np.ndarray] = {}
        for name, values in self.scheduler.get(key, {}).items():
            row = self.policies.row_of(name)
            rows[row] = rows.get(row, 0) + np.array(values)
        return rows


def _latencies(
    name: str, bounds: tuple[float, ...], values: np.ndarray | None
) -> dict[str, dict[str, int] | float]:
    """A histogram in the words of Prometheus: its label `le`, and how many took no longer."""
    if values is None:
        return {f"{name}_buckets": {}, f"{name}_seconds": 0.0}
    labels = [*map(str, bounds), "+Inf"]
    counts = dict(zip(labels, map(int, values[:-1]), strict=True))
    return {f"{name}_buckets": counts, f"{name}_seconds": float(values[-1])}
