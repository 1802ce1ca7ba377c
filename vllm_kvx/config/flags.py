"""What `vllm serve`'s flags of ours and `--additional-config` say together."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vllm_kvx.config.settings import AUTO_KEY, LAYOUT_KEY, REQUESTS_KEY
from vllm_kvx.config.spelling import POLICY_KEY
from vllm_kvx.policy.auto import is_auto, parse_auto
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy


def merge_flags(
    flag: str | None, requests: str | None, config: Any, layout: Sequence[str] | None = None
) -> dict[str, Any]:
    """`config`, the user's ``--additional-config``, with what the flags say in it.

    flag: of ``--kv-policy``; requests: of ``--kv-request-policies``; layout: of ``--kv-layout``;
    None where not given.

    Raises:
        ValueError: a flag and `config` differ, or `config` is not a JSON object.
    """
    config = {} if config is None else config
    if not isinstance(config, dict):
        raise ValueError(f"--additional-config must be a JSON object, got {config!r}")
    if requests is not None:
        if config.get(REQUESTS_KEY, requests) != requests:
            raise ValueError(
                f"--kv-request-policies {requests} and --additional-config with {REQUESTS_KEY} "
                f"{config[REQUESTS_KEY]!r} differ; drop one of them"
            )
        config = {**config, REQUESTS_KEY: requests}
    if layout is not None:
        other = config.get(LAYOUT_KEY)
        if other is not None and not _same_policies(other, layout):
            raise ValueError(
                f"--kv-layout {' '.join(layout)} and --additional-config with {LAYOUT_KEY} "
                f"{other!r} name different policies; drop one of them"
            )
        config = {**config, LAYOUT_KEY: list(layout)}
    if flag is None:
        return config
    other, chosen = config.get(POLICY_KEY), config.get(AUTO_KEY)
    if isinstance(chosen, dict) and is_auto(flag) and chosen.get("named") == str(parse_auto(flag)):
        # A further API server process reads the flag again, for which its parent chose already.
        return config
    if other is not None and other != flag and _meant(other) != _meant(flag):
        raise ValueError(
            f"--kv-policy {flag} and --additional-config with {POLICY_KEY} {other!r} name "
            "different policies; drop one of them"
        )
    return {**config, POLICY_KEY: flag}


def _meant(name: str) -> object:
    """What a name of a server's policy means; PolicyError if it means nothing."""
    return parse_auto(name) if is_auto(name) else parse_policy(name)


def _same_policies(names: Any, others: Sequence[str]) -> bool:
    """Whether `names`, of a configuration, are the policies of `others`, in whatever order."""
    if not isinstance(names, (list, tuple)):
        return False
    with suppress(PolicyError):
        return set(map(parse_policy, names)) == set(map(parse_policy, others))
    return False
