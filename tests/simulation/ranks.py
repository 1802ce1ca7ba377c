"""The workers of a pipeline: each has a rank's layers, and runs steps when it gets to them."""

import pickle
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from support import inside
from support.configs import kv_cache_groups
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from simulation.cache import Mismatch
from simulation.live import Live
from simulation.server import Case
from simulation.state import Decoder, State
from simulation.traffic import Text
from simulation.worker import Worker

# The chance that a worker goes on by another step while it may.
GOES_ON = 0.7


@dataclass(frozen=True)
class Rank:
    """layers: that it has. groups: the KV groups of the model. is_last: whether it samples.

    graphs: with a step's number, whether all ranks replay a graph in it.
    """

    layers: range
    groups: Sequence[KVCacheGroupSpec]
    is_last: bool
    graphs: int


class RankWorker(Worker):
    """A rank. Tokens are sampled by the last one, from which the others hear of them.

    rows: by step that it has run, the tokens whose states it hands on: request and position.
    waiting: by step, whose tokens are still to come.
    """

    def __init__(self, config: VllmConfig, case: Case, rng: random.Random, rank: Rank) -> None:
        self._rank, self._step_number = rank, 0
        self.rows: dict[int, set[tuple[str, int]]] = {}
        self.waiting: dict[int, list[Live]] = {}
        total = config.model_config.get_total_num_hidden_layers()
        with inside.as_rank(rank.layers.start, total):
            super().__init__(config, case, rng)

    def layers_of(self, num_layers: int) -> range:
        return self._rank.layers

    def groups_of(self, config: VllmConfig, specs: dict[str, Any]) -> list[KVCacheGroupSpec]:
        groups = [
            replace(group, layer_names=[name for name in group.layer_names if name in specs])
            for group in self._rank.groups
        ]
        for group in groups:
            if any(specs[name] != group.kv_cache_spec for name in group.layer_names):
                raise Mismatch(f"a rank's layers {group.layer_names} have specs of their own")
        return groups

    def run_step(self, output: SchedulerOutput, number: int) -> ModelRunnerOutput:
        """The next step."""
        self._step_number = number
        self.rows[number], self.waiting[number] = set(), []
        return self.execute(output)

    def hear(self, number: int, tokens: Sequence[Sequence[int]]) -> None:
        """What the last rank has sampled in a step."""
        for one, sampled in zip(self.waiting.pop(number), tokens, strict=True):
            for token in sampled:
                if self._by_state.get(one.index) is one:
                    self._ids[one.index, len(one.tokens)] = token
                one.tokens.append(token)

    def _order(self, names: list[str]) -> None:
        # That of all ranks.
        names.sort(key=lambda name: crc32(f"{self._step_number}, {name}".encode()))

    def _replays(self) -> bool:
        # All ranks do, or none: vLLM goes by the batch.
        return crc32(f"{self._rank.graphs}, {self._step_number}".encode()) % 2 == 0

    def _run(self, batch: InputBatch) -> np.ndarray:
        for name, end in zip(batch.req_ids, batch.seq_lens.tolist(), strict=True):
            if end > len(self.live[name].tokens):
                raise Mismatch(f"{name} runs up to {end}, with a step under way that samples there")
        is_final = super()._run(batch)
        final, names = self.model.final, {one.index: name for name, one in self.live.items()}
        pairs = zip(final.requests.tolist(), final.positions.tolist(), strict=True)
        self.rows[self._step_number] = {(names[index], at) for index, at in pairs if at >= 0}
        return is_final

    def _sample(self, live: Live, is_final: bool, drafts: int) -> list[int]:
        if not self._rank.is_last and is_final and live.done >= len(live.tokens):
            self.waiting[self._step_number].append(live)
            return []
        return super()._sample(live, is_final, drafts)


class Ranks:
    """All of them, as the scheduler's side sees one worker; see ``Worker``."""

    def __init__(self, config: VllmConfig, case: Case, rng: random.Random) -> None:
        count = config.parallel_config.pipeline_parallel_size
        total = config.model_config.get_total_num_hidden_layers()
        whole = Decoder(range(total), {})
        with inside.as_rank(0, total):
            State(config, whole)
        layers = whole.every_layer()
        groups = kv_cache_groups(
            config, {x.layer_name: x.get_kv_cache_spec(config) for x in layers}
        )
        graphs = rng.getrandbits(32)
        spans = [range(*get_pp_indices(total, rank, count)) for rank in range(count)]
        self.workers = [
            RankWorker(
                *(config, case, random.Random(rng.random())),
                Rank(span, groups, span is spans[-1], graphs),
            )
            for span in spans
        ]
        self.kv_cache_config = self.workers[0].kv_cache_config
        self.transfers, self.num_drafts, self.drafted = None, 0, DraftTokenIds([], [])

    @property
    def counts(self) -> Counter[str]:
        """Of the rank where it happened most."""
        counts = Counter[str]()
        for worker in self.workers:
            counts |= worker.counts
        return counts

    @property
    def finished(self) -> list[Text]:
        return self.workers[0].finished

    def expect(self, req_id: str, text: Text) -> None:
        for worker in self.workers:
            worker.expect(req_id, text)

    def check_idle(self) -> None:
        for worker in self.workers:
            worker.check_idle()


class Late:
    """Steps on their way through workers, the first one of which is at most as many steps ahead of
    the last one as there are, since it then hears of a step's tokens.
    """

    def __init__(self, workers: Sequence[Worker], rng: random.Random) -> None:
        self._workers, self._rng = workers, rng
        self._outputs: deque[SchedulerOutput] = deque()
        self._first = 0  # The number of the first one of these.
        self._done = [0] * len(workers)  # How many steps each has run.
        self._results: dict[int, ModelRunnerOutput] = {}

    def submit(self, output: SchedulerOutput, copies: bool) -> int:
        """The step's number. copies: as it is sent; the scheduler goes on changing its own."""
        self._outputs.append(pickle.loads(pickle.dumps(output)) if copies else output)
        return self._first + len(self._outputs) - 1

    def go_on(self) -> None:
        """Each worker may run some of its steps."""
        for rank in range(len(self._workers)):
            while self._rng.random() < GOES_ON and self._done[rank] < self._limit(rank):
                self._run(rank)

    def result(self, number: int) -> ModelRunnerOutput:
        """Of the earliest step that nobody has asked for."""
        self._run_to(len(self._workers) - 1, number + 1)
        self._first += 1
        self._outputs.popleft()
        return self._results.pop(number)

    def _limit(self, rank: int) -> int:
        return self._done[rank - 1] if rank else self._first + len(self._outputs)

    def _run_to(self, rank: int, count: int) -> None:
        while self._done[rank] < count:
            if rank:
                self._run_to(rank - 1, self._done[rank] + 1)
            self._run(rank)

    def _run(self, rank: int) -> None:
        number, last = self._done[rank], len(self._workers) - 1
        if rank < last:  # Tokens of the step that left the pipeline are there before.
            self._run_to(last, number - last)
        worker, output = self._workers[rank], self._outputs[number - self._first]
        if isinstance(worker, RankWorker):
            result = worker.run_step(output, number)
            self._hand_on(rank, number, result)
        else:
            result = worker.execute(output)
        self._done[rank] += 1
        if rank == last:
            self._results[number] = result

    def _hand_on(self, rank: int, number: int, result: ModelRunnerOutput) -> None:
        workers: Any = self._workers
        if rank:
            missing = workers[rank].rows[number] - workers[rank - 1].rows.pop(number)
            if missing:
                raise Mismatch(f"rank {rank} runs rows {missing} that have left before it")
        if rank < len(workers) - 1:
            return
        workers[rank].rows.pop(number)
        workers[rank].waiting.pop(number)
        tokens = [sampled for sampled in result.sampled_token_ids if sampled]
        for worker in workers[:rank]:
            worker.hear(number, tokens)
