"""What a pipeline of ranks keeps a server from running: where its layers are cut into ranks."""

from typing import TYPE_CHECKING

from vllm_kvx.config.policy_layers import is_full, layer_kinds

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvx.config.settings import KVSettings

ONE_RANK = "set --pipeline-parallel-size 1 and use --tensor-parallel-size"


def in_pipeline(c: "VllmConfig") -> bool:
    """Whether several ranks have parts of the layers."""
    return c.parallel_config.pipeline_parallel_size > 1


def spans_of_ranks(c: "VllmConfig") -> list[tuple[int, int]]:
    """The layers [first, last) of each rank, as vLLM shares them out."""
    from vllm.distributed.utils import get_pp_indices

    ranks = c.parallel_config.pipeline_parallel_size
    total = c.model_config.get_total_num_hidden_layers()
    return [get_pp_indices(total, rank, ranks) for rank in range(ranks)]


def has_rank_without_policy_layers(c: "VllmConfig") -> bool:
    """Whether a rank has no layer with full attention, as far as the configuration tells."""
    if not in_pipeline(c):
        return False
    kinds = layer_kinds(c.model_config.hf_text_config)
    if len(kinds) != c.model_config.get_total_num_hidden_layers():
        return False
    return any(not any(map(is_full, kinds[first:last])) for first, last in spans_of_ranks(c))


def where_rows_leave(c: "VllmConfig", settings: "KVSettings") -> list[str]:
    """What keeps the policies of a server that propagates from running in a pipeline.

    A rank runs all of its layers on the same rows, so that rows can leave between two ranks alone.
    """
    layout = settings.layout
    if not in_pipeline(c) or not layout.propagates or layout.selects:
        return []
    if c.lora_config:
        return [
            "a rank of the pipeline maps the rows of a whole step to their LoRA adapters, and some "
            f"rows leave before it: drop --enable-lora, or {ONE_RANK}"
        ]
    if layout.projects or layout.online_cuts:
        return [
            "swiftkv-K projects entries of all layers above its cut from the states below it, and "
            f"other ranks of the pipeline have these layers: {ONE_RANK}, or drop swiftkv from the "
            "KV policy and kv_layout"
        ]
    if layout.sliding:
        return [
            "some layers of this model slide over a window, and rows do not leave between ranks of "
            f"such a model: {ONE_RANK}, or drop the policies that propagate from the KV policy and "
            "kv_layout"
        ]
    edges = [first for first, _ in spans_of_ranks(c)[1:]]
    problems = []
    for cut in layout.row_cuts:
        if cut not in edges:
            near = min(edges, key=lambda edge: (abs(edge - cut), -edge))
            problems.append(
                f"rows would leave before layer {cut}, within a rank of the pipeline, whose layers "
                f"all run the same rows: use speed-{near} (ranks begin with layers "
                f"{', '.join(map(str, edges))}), or {ONE_RANK}"
            )
    return problems
