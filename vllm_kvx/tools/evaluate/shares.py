"""What a policy keeps of a prompt, and reads of it in a decode step: counts, as the scheduler's."""

from collections.abc import Collection
from typing import NamedTuple

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import reads_part, skipped_of, storage_of


class Shares(NamedTuple):
    """What a policy spends on a prompt, as shares in [0, 1] of what stock vLLM spends.

    kept: entries that stay in the KV cache. read: entries that each decode step reads.
    propagated: rows that run through the layers.
    """

    kept: float
    read: float
    propagated: float


def untouched_tokens(policy: KVPolicy) -> int:
    """How many tokens of every answer are those without retention, which waits (`after=n`).

    They are n + 1: entries go at the end of the step that answers the last of them. 0 without.
    """
    return policy.num_generated + 1 if policy.num_generated else 0


def ends_early(policy: KVPolicy, generated: int) -> bool:
    """Whether an answer of so many tokens says nothing of what `policy` retains."""
    return generated <= untouched_tokens(policy)


def shares_of(
    policy: KVPolicy,
    prompt_len: int,
    block_size: int,
    num_layers: int,
    sliding: Collection[int] = (),
    generated: int | None = None,
) -> Shares:
    """The shares of `policy` for such a prompt.

    sliding: layers that slide over a window, which are left out of what is kept and read.
    generated: tokens of the answer; None for more than a policy waits for before it drops entries.

    Layers that are found while the prompt runs count as the highest that may be, and those that a
    server may split (``worker/split_layers``) as whole.
    """
    # The last token is never run.
    is_early = generated is not None and generated <= policy.num_generated
    selection = policy.selection(prompt_len, num_layers)
    kept = read = rows = 0
    for layer in range(num_layers):
        if selection is not None and layer > selection.after:
            rows += selection.count
        else:
            rows += prompt_len - skipped_of(policy, prompt_len, layer).size
        if layer in sliding:
            continue
        storage = storage_of(policy, prompt_len, layer, block_size, num_layers)
        # All of what the layer computed, where nothing was dropped.
        stored = prompt_len - storage.waiting.size if is_early else storage.kept
        kept += stored
        retrieve = policy.retrieve
        if retrieve is None or not reads_part(retrieve, layer, stored):
            read += stored
        else:
            read += min(stored, retrieve.budget)
    if selection is not None and selection.resumes_at == 0:
        # Chosen tokens run again from the first layer; those above the choice are counted.
        rows += selection.count * (selection.after + 1)
    total = prompt_len * (num_layers - len(sliding))
    return Shares(kept / total, read / total, rows / (prompt_len * num_layers))
