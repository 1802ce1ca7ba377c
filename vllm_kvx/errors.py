"""What users are told where something cannot be done: by tools, and by a server at start."""

from collections.abc import Iterator
from contextlib import contextmanager

# vLLM is an extra of this package, and the others come with it.
_COME_WITH_VLLM = ("httpx", "torch", "transformers", "vllm")


class ToolError(Exception):
    """A tool cannot do what it was asked for; the user sees the message and nothing else."""


@contextmanager
def vllm_needed() -> Iterator[None]:
    """Within, the lack of vLLM or of what comes with it is a ToolError that says what to install.

    So a tool's options can be read, and its help shown, where vLLM is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _COME_WITH_VLLM:
            raise
        raise ToolError(
            f"{error.name} is missing: pip install 'vllm-kvx[cuda]' or [cpu]"
        ) from error


REFUSAL = "_vllm_kvx_refusal"


@contextmanager
def refusing() -> Iterator[None]:
    """Within, a ValueError or RuntimeError is a refusal: its message says what to change.

    It stays the exception that it is, for those who start an engine in Python and catch it.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        setattr(error, REFUSAL, True)
        raise
