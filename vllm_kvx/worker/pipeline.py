"""Which of the model's policy layers a worker has, where pipeline parallelism shares them out."""

from typing import NamedTuple

from torch import distributed
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group


class RankLayers(NamedTuple):
    """Policy layers are numbered over the whole model; a worker has those of [first, first + n).

    first: the number of its first one. total: how many the model has.
    """

    first: int
    total: int


def layers_of_rank(count: int, config: VllmConfig) -> RankLayers:
    """The numbers of this worker's policy layers, of which it has `count`.

    The ranks of a pipeline tell each other, since a configuration need not say of each layer what
    it is: every one of them has to call this.
    """
    if config.parallel_config.pipeline_parallel_size == 1:
        return RankLayers(0, count)
    pipeline = get_pp_group()
    counts = [0] * pipeline.world_size
    distributed.all_gather_object(counts, count, group=pipeline.cpu_group)
    return RankLayers(sum(counts[: pipeline.rank_in_group]), sum(counts))
