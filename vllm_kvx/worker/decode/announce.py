"""What the log says of retrieval at start: which ops run, and from which length on."""

from typing import Any

from vllm.logger import init_logger

from vllm_kvx.ops.library import COMMAND
from vllm_kvx.ops.retrieval.backends import Backends
from vllm_kvx.ops.retrieval.costs import Begins
from vllm_kvx.ops.retrieval.crossover import NEVER
from vllm_kvx.policy.axes import Retrieve

logger = init_logger("vllm.kvx.retrieval")


def announce(policy: Retrieve, begins: Begins, backends: Backends, max_model_len: int) -> None:
    """Logs what `policy` reads on this machine; warns if it reads every context whole.

    begins: from where on it retrieves here. backends: the ops that run.
    """
    shorter = ", and shorter ones whole" if begins.shortest < NEVER else ""
    # A warning where faster ops could run, had they been built.
    log = logger.warning if COMMAND in backends.reason else logger.info
    log(
        "Retrieval: %s reads parts of contexts %s%s (dense_below=%s); ops: %s (%s)",
        policy,
        begins,
        shorter,
        policy.dense_below,
        backends,
        backends.reason,
    )
    if begins.shortest <= max_model_len:
        return
    build = (
        f"; CUDA ops pay earlier than Triton ones (`{COMMAND}`)"
        if backends.score == "triton" and policy.dense_below == "auto"
        else ""
    )
    logger.warning(
        "%s reads every context of this server whole, as full does: max_model_len is %d, and with "
        "these ops and this model it retrieves %s%s. To retrieve all the same, set "
        "dense_below=<tokens> in the policy, or 0",
        policy,
        max_model_len,
        begins if begins.shortest < NEVER else "at no length",
        build,
    )


def figures(policy: Retrieve, begins: Begins, backends: Backends, auto: int) -> dict[str, Any]:
    """The same for JSON. auto: entries from which on retrieval pays for one request."""
    return {
        "ops": str(backends),
        "score_ops": backends.score,
        "attend_ops": backends.attend,
        "ops_reason": backends.reason,
        "policy": str(policy),
        "dense_below": _known(begins.alone),
        "dense_below_batch": _known(begins.batch),
        "dense_below_one": _known(begins.one),
        "auto": _known(auto),
    }


def _known(entries: int) -> int | None:
    """A length for JSON; None if it is never reached."""
    return entries if entries < NEVER else None
