"""Which policies run beside what else a server does: drafts, and several ranks in turn."""

from vllm_kvx.policy.policy import KVPolicy


def beside_drafts(policy: KVPolicy) -> str | None:
    """Why `policy` cannot run where tokens are drafted (speculative decoding); None if it can."""
    if policy.propagate is not None and policy.propagate.overwrites:
        return (
            f"{policy.propagate} keeps the last token's entry alone, in the place of the one "
            "before, which is gone when a drafted token is rejected: drop --speculative-config, or "
            "run speed-K in its place"
        )
    return None


def beside_drafts_ahead(policy: KVPolicy) -> str | None:
    """Why `policy` cannot run where drafts meet asynchronous scheduling; None if it can.

    A step is planned there before it is known how many drafted tokens of the last one stay.
    """
    if not policy.num_generated:
        return None
    return (
        f"{policy.retain} waits for a number of generated tokens, and with drafted tokens and "
        "asynchronous scheduling only the most that there can be are known: set "
        "--no-async-scheduling, or leave out after="
    )


def beside_drafts_by_states(policy: KVPolicy) -> str | None:
    """Why `policy` cannot run where hidden states draft (EAGLE, MTP); None if it can."""
    if policy.propagate is None:
        return None
    return (
        f"EAGLE and MTP draft from the last layer's hidden states of every prompt token, and under "
        f"{policy.propagate} some tokens have none: use a policy that retains or retrieves, or set "
        "the method of --speculative-config to ngram or draft_model"
    )


def beside_own_drafts(policy: KVPolicy) -> str | None:
    """Why `policy` cannot run where the model drafts for itself; None if it can."""
    if policy.retain is None and policy.propagate is None:
        return None
    return (
        f"the model drafts its own tokens (method kvx) over all entries of a request, in all "
        f"layers, and {policy} leaves some out: use full, fier or quest, or the method ngram or "
        "draft_model of --speculative-config"
    )


def in_a_pipeline(policy: KVPolicy) -> str | None:
    """Why `policy` cannot run where several ranks have parts of the layers; None if it can."""
    if policy.retain is not None and policy.retain.unit == "block":
        return (
            f"{policy} ranks whole blocks by a sum over layers that several ranks of the pipeline "
            "have: use granularity=token, or set --pipeline-parallel-size 1"
        )
    return None
