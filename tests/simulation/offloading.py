"""The worker's side of KV connectors that keep blocks elsewhere, over the simulated cache.

vLLM's own connectors decide what is stored and loaded. Here a transfer reads or writes its blocks
at any time up to the one at which vLLM has to have it done, so that a block which is given to
somebody else before that is found by what it holds.
"""

import random
from collections import Counter
from collections.abc import Set
from typing import Any, Protocol, cast

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput

from simulation.cache import Cache
from simulation.live import Ints

# The chance that a transfer is done in a step.
DONE = 0.3
# vLLM's host memory has whole pages.
_PAGE = 4096


class Transfers(Protocol):
    """A worker's side of a KV connector. Its blocks are read and written beside the steps."""

    counts: Counter[str]

    def begin(self, output: SchedulerOutput) -> None:
        """Before a step's forward pass."""

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        """After it; what the scheduler hears of."""

    @property
    def are_done(self) -> bool:
        """Whether nothing is under way."""


class Offloading:
    """vLLM's ``OffloadingConnector``, but for the copies."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        num_chunks: int,
        cache: Cache,
        rng: random.Random,
    ) -> None:
        """num_chunks: that the host has room for. `config` is told of it, for the scheduler."""
        transfer: Any = config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        page = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
        size = extra["blocks_per_chunk"]
        extra["cpu_bytes_to_use"] = num_chunks * -(-page * size // _PAGE) * _PAGE
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, kv_cache_config))
        self.counts = Counter[str]()
        self._copies = _Copies(cache, size, rng, self.counts)
        self._worker = OffloadingConnectorWorker(spec, config, kv_cache_config)
        self._worker.worker = self._copies

    def begin(self, output: SchedulerOutput) -> None:
        self._worker.handle_preemptions(cast(Any, output.kv_connector_metadata))

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        metadata = cast(Any, output.kv_connector_metadata)
        self._worker.start_kv_transfers(metadata)
        self._worker.prepare_store_kv(metadata)
        _, received = self._worker.get_finished(output.finished_req_ids)
        told = self._worker.build_connector_worker_meta()
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=told)

    @property
    def are_done(self) -> bool:
        return not self._copies.pending


def offloading(config: VllmConfig, worker: Any) -> Offloading:
    """Of a server's worker; how much room there is, and in what chunks, is drawn.

    config: is told, for the scheduler.
    """
    rng = random.Random(worker.rng.random())
    transfer: Any = config.kv_transfer_config
    transfer.kv_connector_extra_config = {"blocks_per_chunk": rng.choice([1, 1, 2])}
    num_chunks = rng.choice([20, 200])
    return Offloading(config, worker.kv_cache_config, num_chunks, worker.cache, rng)


class _Copies(OffloadingWorker):
    """Copies between blocks and the host's memory.

    pending: by number, whether the transfer stores, the host's chunks, the blocks, and the place of
        the first one of these in its chunk.
    """

    def __init__(self, cache: Cache, size: int, rng: random.Random, counts: Counter[str]) -> None:
        """size: blocks of a chunk."""
        self._cache, self._size, self._rng, self._counts = cache, size, rng, counts
        self.pending: dict[int, tuple[bool, Ints, Ints, int]] = {}
        self._done: list[int] = []
        # By chunk and place in it, what all layers have in a block.
        self._held: dict[tuple[int, int], Ints] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        first = src_spec.block_indices[0] % self._size
        self.pending[job_id] = True, dst_spec.block_ids, src_spec.block_ids, first
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        first = dst_spec.block_indices[0] % self._size
        self.pending[job_id] = False, src_spec.block_ids, dst_spec.block_ids, first
        return True

    def get_finished(self) -> list[TransferResult]:
        for job in [job for job in self.pending if self._rng.random() < DONE]:
            self._run(job)
        done, self._done = self._done, []
        return [TransferResult(job, success=True) for job in done]

    def wait(self, job_ids: Set[int]) -> None:
        for job in sorted(job_ids & self.pending.keys()):
            self._counts["waited for"] += 1
            self._run(job)

    def _run(self, job: int) -> None:
        stores, chunks, blocks, first = self.pending.pop(job)
        places = np.arange(first, first + len(blocks))
        for place, block in zip(places.tolist(), blocks.tolist(), strict=True):
            where = int(chunks[place // self._size]), place % self._size
            if stores:
                self._held[where] = self._cache.entries_in(block)
            else:
                self._cache.put_entries(block, self._held[where])
        self._counts["blocks stored" if stores else "blocks loaded"] += len(blocks)
        self._done.append(job)
