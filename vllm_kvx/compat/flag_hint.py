"""What `vllm` says of a flag that it does not know, where one of ours is nearly so named."""

from collections.abc import Callable
from typing import Any

# How argparse begins the message.
_UNKNOWN = "unrecognized arguments: "
_FLAGS = ("kv_policy", "kv_layout", "kv_request_policies")


def with_flag_hint(original: Callable[..., Any]) -> Callable[..., Any]:
    """A parser's `error`, whose message says too which flag of ours was meant.

    Not the parser that has our flags reports those that it does not know, but the one of which
    `serve` is a subcommand: so this is for the class of both.
    """

    def error(self: Any, message: str) -> Any:
        return original(self, message + flag_hint(message))

    return error


def flag_hint(message: str) -> str:
    """What to add to an argparse error `message`; empty where no flag in it resembles ours."""
    if not message.startswith(_UNKNOWN):
        return ""
    from vllm_kvx.config.settings import PUBLIC_KEYS
    from vllm_kvx.config.spelling import misspelling

    for word in message.removeprefix(_UNKNOWN).split():
        if not word.startswith("--"):
            continue
        key = word[2:].partition("=")[0].replace("-", "_")
        found = misspelling([key], PUBLIC_KEYS)
        name = found.name if found else key
        if name in _FLAGS:
            return f"; did you mean --{name.replace('_', '-')}?"
        if name in PUBLIC_KEYS:
            return f"; did you mean --additional-config.{name}?"
    return ""
