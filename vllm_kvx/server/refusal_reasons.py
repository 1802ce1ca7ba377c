"""Why requests are refused: every 400 of ours has one of these reasons, and is counted by it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Reason(StrEnum):
    """What is wrong with a request; the error's message says more."""

    MISSPELLED_KEY = "misspelled_key"  # A key of vllm_xargs that is nearly ours, or a server's.
    MISPLACED = "misplaced"  # A policy in a part of the request that nobody reads.
    NOT_A_STRING = "not_a_string"
    MALFORMED = "malformed"  # A name that is no policy's.
    NOT_SERVED = "not_served"  # A policy, or a composition, that no server runs.
    NOT_FOR_MODEL = "not_for_model"  # It needs layers that the model does not have.
    NOT_ALLOWED = "not_allowed"  # The operator lets no request name it.
    NO_ROOM = "no_room"  # It does not fit the server's layout.
    PROMPT_LOGPROBS = "prompt_logprobs"  # They need layers that the policy skips.
    LOGPROB_TOKEN_IDS = "logprob_token_ids"  # Where drafts are verified, vLLM leaves them out.
    HANDED_OVER = "handed_over"  # What another server has computed of its prompt does not fit it.
    BEAM_SEARCH = "beam_search"
    MEDIA = "media"  # Images, audio or video, where a policy serves a model's text alone.


class RefusedError(ValueError):
    """A request is refused.

    reason: what it is counted by. key: the one of the request's keys that is at fault.
    """

    def __init__(self, reason: Reason, key: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.key = key


OnRefusal = Callable[[Reason], None]


def count_for(model_name: str) -> OnRefusal:
    """Counts refusals of a server's requests in this process."""

    def count(reason: Reason) -> None:
        # Other processes load what calls this and refuse nothing.
        from vllm_kvx.server.metrics import REFUSED, counter

        counter(REFUSED, model_name, str(reason)).inc()

    return count


def begin(model_name: str) -> None:
    """Starts every reason's series at 0, so that the first refusal is an increase."""
    from vllm_kvx.server.metrics import REFUSED, counter

    for reason in Reason:
        counter(REFUSED, model_name, str(reason))


@contextmanager
def refusing(reason: Reason, on_refusal: OnRefusal) -> Iterator[None]:
    """Tells `on_refusal` of a ValueError that comes out of the block; it goes on."""
    try:
        yield
    except ValueError:
        on_refusal(reason)
        raise
