"""From which length on a server's decode steps retrieve on this machine, and by which ops."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_kvx.policy.layout import RetrievalLayout
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok
from vllm_kvx.tools.doctor.sizes import Sizes

if TYPE_CHECKING:
    from vllm_kvx.ops.retrieval.backends import Backends


def reads(context: Context, served: KVPolicy, sizes: Sizes) -> Iterator[Finding]:
    """What a worker will say of retrieval when it has loaded the model; nothing without it."""
    retrieve = served.retrieve
    if retrieve is None or context.ops is None or context.vllm_config is None:
        return
    from vllm import envs

    from vllm_kvx.indexes.table import INDEXES
    from vllm_kvx.ops.retrieval.backends import Backends
    from vllm_kvx.ops.retrieval.costs import Begins, alone_from, step_costs
    from vllm_kvx.ops.retrieval.crossover import NEVER

    layout = RetrievalLayout.of(retrieve)
    model, parallel = context.vllm_config.model_config, context.vllm_config.parallel_config
    share = model.get_num_attention_heads(parallel) // sizes.kv_heads
    backends = Backends.of(
        *context.ops,
        model.dtype,
        sizes.head_dim,
        share,
        layout.reduction,
        INDEXES[layout.index].cuda_reductions,
    )
    # As a worker counts them: see ``worker.decode.room.entry_bytes``.
    head_bytes = 2 * sizes.head_dim * (2 if sizes.scale_bytes else sizes.entry_bytes)
    machine = backends.score, layout.reduction, sizes.kv_heads, head_bytes
    num_reqs = context.vllm_config.scheduler_config.max_num_seqs
    states, invariant = model.is_hybrid, envs.VLLM_BATCH_INVARIANT
    chooses = layout.retrieving.share_that_chooses(sizes.policy_layers)
    alone = retrieve.floor(alone_from(*machine, keeps_state=states, choosing=chooses))
    few = _rows_in_one_launch(context, backends, layout, share * sizes.kv_heads, sizes)
    taken = step_costs(*machine, states, invariant, chooses, few_rows=few)
    begins = Begins.of(alone, retrieve.floor(0), retrieve.budget, taken, num_reqs)
    by = f"(dense_below={retrieve.dense_below}; ops: {backends}, {backends.reason})"
    if begins.shortest <= sizes.longest:
        yield ok(f"{retrieve} reads parts of contexts {begins} {by}")
        return
    yield note(
        f"{retrieve} reads every context whole, as full does: the longest has {sizes.longest:,} "
        f"tokens, and it retrieves {begins if begins.shortest < NEVER else 'at no length'} {by}",
        "set dense_below=<tokens> in the policy, or use CUDA ops, which pay earlier",
    )


def _rows_in_one_launch(
    context: Context, backends: "Backends", layout: RetrievalLayout, heads: int, sizes: Sizes
) -> int:
    """Rows up to which a worker's layers take one launch, as its ``Scratch`` says."""
    import torch
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    from vllm_kvx.indexes.table import INDEXES
    from vllm_kvx.ops.retrieval.one_launch import does, longest_of, rows_in_graphs, suits

    config, shape = context.vllm_config, (heads, sizes.kv_heads, sizes.head_dim)
    model = config.model_config
    entries = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model)
    capped = getattr(model.hf_text_config, "attn_logit_softcapping", None)
    can = does(backends.score, layout.reduction, INDEXES[layout.index])
    can = can and layout.retrieving.reuse == 1 and torch.cuda.is_available()
    if not can or not suits(*shape, entries, model.dtype, capped):
        return 0
    drafts, most = config.num_speculative_tokens, config.scheduler_config.max_num_seqs
    longest = longest_of(*shape, most * (1 + drafts), torch.device("cuda"))[2]
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    return rows_in_graphs(longest, sizes.longest, captured)
