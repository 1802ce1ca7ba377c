"""Which keys of ``vllm_xargs`` a request may have: ``kv_policy``, and those of others."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_kvx.config.quoting import quoted
from vllm_kvx.config.settings import INTERNAL_KEYS, PUBLIC_KEYS, REPLACED_KEYS
from vllm_kvx.config.spelling import POLICY_KEY, VLLM_KEYS, has_prefix, misspelling
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import is_bare
from vllm_kvx.server.misplaced import XARGS, refusal
from vllm_kvx.server.refusal_reasons import Reason, RefusedError

# What stands in policies' names -> a method that has such a parameter, if it can one that takes
# nothing else.
_PARAMETERS = {
    parameter: method.name
    for method in sorted(
        reversed(METHODS.values()), key=lambda m: not m.number and m.to_measure is None
    )
    for parameter in method.keys()  # noqa: SIM118 - it is no dict
}
_SERVER_KEYS = frozenset(PUBLIC_KEYS) - {POLICY_KEY}


class Stray(NamedTuple):
    """A key of ours that no request may have, and what to do about it."""

    key: str
    advice: str


def server_key(values: Mapping[str, Any]) -> Stray | None:
    """The key of `values` that is one of a server's, or a parameter of a policy."""
    return next((stray for key in values if (stray := _stray(key)) is not None), None)


def check_keys(extra_args: Mapping[str, Any]) -> None:
    """Checks the keys of a request's ``vllm_xargs``, or of its ``extra_args``.

    Those of vLLM and of other plugins pass. Of more than 64 keys the first 64 are compared for
    typos.

    Raises:
        RefusedError: a key begins with ``kv_`` and is not ``kv_policy``, resembles that, or is
            ``policy``.
    """
    if stray := server_key(extra_args):
        raise refusal(stray.key, f"in {XARGS}", stray.advice, Reason.MISSPELLED_KEY)
    found = misspelling(extra_args, (POLICY_KEY,))
    if key := found.key if found else "policy" if "policy" in extra_args else None:
        message = f"unknown key {key!r} in {XARGS}; did you mean {POLICY_KEY!r}?"
        raise RefusedError(Reason.MISSPELLED_KEY, key, message)
    for key in extra_args:
        is_ours = isinstance(key, str) and has_prefix(key)
        if is_ours and key != POLICY_KEY and key not in VLLM_KEYS:
            known = ", ".join([POLICY_KEY, *sorted(VLLM_KEYS)])
            message = f"unknown key {quoted(key)} in {XARGS}: of keys with kv_ it takes {known}"
            raise RefusedError(Reason.MISSPELLED_KEY, key, message)


def check_policy_type(extra_args: Mapping[str, Any]) -> None:
    """Checks that a policy which is given is text.

    Raises:
        RefusedError: it is not.
    """
    name = extra_args.get(POLICY_KEY)
    if name is not None and not isinstance(name, str):
        raise RefusedError(
            Reason.NOT_A_STRING,
            POLICY_KEY,
            f"{POLICY_KEY} must be a string such as 'speed-24' or 'full', got {quoted(name)}",
        )


def _stray(key: Any) -> Stray | None:
    if not isinstance(key, str) or not has_prefix(key):
        return None
    name = key.lower().replace("-", "_")
    if name in _PARAMETERS:
        example = _example(f"{_PARAMETERS[name]}:{name}=...")
        return Stray(key, f"parameters stand in the policy's name, such as {example}")
    if name in REPLACED_KEYS:
        example = _example(f"{REPLACED_KEYS[name]}=...")
        return Stray(key, f"it is part of a policy's name, such as {example}")
    if name in _SERVER_KEYS:
        return Stray(
            key,
            f"{name} is set when the server starts, in --additional-config, and of these keys a "
            f"request has {POLICY_KEY} alone",
        )
    if name in INTERNAL_KEYS:
        return Stray(key, f"a server sets {name} for its own processes: leave it out")
    return None


def _example(part: str) -> str:
    """The entry of a request whose policy has such a part, and says how much stays."""
    more = ",kv_rate=..." if is_bare(part) else ""
    return f'"{POLICY_KEY}": "{part}{more}"'
