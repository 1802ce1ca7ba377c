"""What vLLM's runner launches in every step, by numpy for a whole batch instead of row by row.

Triton's interpreter runs a kernel's programs one after the other, and vLLM launches one for every
request and KV group: on small models that takes longer than the model. Here a launch of such a
kernel is done at once. What it writes is the same, bit for bit.

A function of ``quick_batch`` or ``quick_sampling`` stands for a kernel, and has its parameters:
where a release of vLLM has others, its kernel is interpreted. So is a launch for which a function
returns False, before it writes anything; its docstring says which those are.
"""

import inspect
from collections.abc import Callable
from typing import Any

from vllm_kvx.compat import quick_batch, quick_sampling

# Does a launch, given its grid and the kernel's arguments; False: it is to be interpreted.
Whole = Callable[..., bool]

# By module below vLLM's runner, and by kernel, what has the parameters of one release or another.
_WHOLE: dict[tuple[str, str], tuple[Whole, ...]] = {
    ("block_table", "_compute_slot_mappings"): (quick_batch.compute_slot_mappings,),
    ("block_table", "_gather_block_tables"): (
        quick_batch.gather_block_tables,
        quick_batch.gather_readable_block_tables,
    ),
    ("buffer_utils", "_apply_write"): (quick_batch.apply_write,),
    ("input_batch", "_prepare_prefill_inputs"): (quick_batch.prepare_prefill_inputs,),
    ("input_batch", "_prepare_pos_seq_lens"): (quick_batch.prepare_pos_seq_lens,),
    ("input_batch", "_combine_sampled_and_draft_tokens"): (
        quick_batch.combine_sampled_and_draft_tokens,
    ),
    ("input_batch", "_get_num_sampled_and_rejected"): (quick_batch.get_num_sampled_and_rejected,),
    ("input_batch", "_post_update"): (quick_batch.post_update, quick_batch.post_update_and_drafts),
    ("sample.logprob", "_topk_log_softmax"): (quick_sampling.topk_log_softmax,),
    ("sample.logprob", "_ranks"): (quick_sampling.ranks,),
    ("sample.gumbel", "_gumbel_sample"): (quick_sampling.gumbel_sample,),
}
_RUNNER = "vllm.v1.worker.gpu."


def whole_of(kernel: Any) -> Whole | None:
    """What does all programs of a launch of `kernel`, a Python function; None: the interpreter."""
    key = kernel.__module__.removeprefix(_RUNNER), kernel.__name__.removesuffix("_kernel")
    for whole in _WHOLE.get(key, ()):
        names = list(inspect.signature(whole).parameters)[1:]
        if names == list(inspect.signature(kernel).parameters):
            return whole
    return None
