"""The model as its own drafter: method ``kvx`` of ``--speculative-config``.

    {"method": "kvx", "policy": "fier-256", "num_speculative_tokens": 4}

vLLM knows no such method, and has no place for one in Model Runner V2. So before it reads the
arguments, what is ours goes into ``additional_config`` under the internal key ``kv_drafts``, and
vLLM is told `ngram`, which schedules drafts as ours are: made in the worker at the end of a step,
verified in the next. The worker has its own drafter in the place of vLLM's
(``worker/self_drafter.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvx.config.spelling import POLICY_KEY
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy

DRAFTS_KEY = "kv_drafts"
METHOD = "kvx"
# What vLLM is told in its place.
STAND_IN = "ngram"
# A step is verified by reading all of the cache, and each draft reads all weights once more. See
# docs/use/speculative-decoding.md for the count.
CACHE_TO_WEIGHTS = 1.0
_EXAMPLE = '{"method": "kvx", "policy": "fier-256", "num_speculative_tokens": 4}'
_OURS = {"policy": "fier-256", "cache_to_weights": CACHE_TO_WEIGHTS}
_COUNT, _COUNTS = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
# Further keys of the speculative configuration that vLLM has flags for, as arguments call them.
_FLAGS = {"model": "spec_model", _COUNT: "spec_tokens"}


@dataclass(frozen=True)
class Drafts:
    """How the model drafts for itself.

    policy: what its passes read of the cache: a policy that retrieves and does nothing else.
    cache_to_weights: tokens are drafted in steps whose requests hold at least so many bytes of keys
        and values for each byte of weights; 0: always.
    """

    policy: KVPolicy
    cache_to_weights: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Drafts | None":
        """What ``additional_config`` has of it; None without.

        Raises:
            PolicyError: the policy does not parse, or does more than retrieve.
            ValueError: another value that drafts cannot go by.
        """
        given = config.get(DRAFTS_KEY)
        if given is None:
            return None
        if not isinstance(given, dict) or set(given) != set(_OURS):
            raise ValueError(
                f"{DRAFTS_KEY} is what the server makes of method {METHOD}: remove it, and set "
                f"--speculative-config '{_EXAMPLE}'"
            )
        share = given["cache_to_weights"]
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1e9:
            raise ValueError(
                "cache_to_weights of --speculative-config must be a number of at least 0, the "
                "bytes of cached keys and values for each byte of weights from which on tokens are "
                f"drafted, got {share!r}"
            )
        return cls(_policy(given["policy"]), float(share))


def _policy(name: Any) -> KVPolicy:
    where = "policy of --speculative-config"
    try:
        policy = parse_policy(name)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None
    if policy.retrieve is None or len(policy.parts) > 1:
        raise PolicyError(
            f"{where}: the model drafts from entries that it retrieves, which all stay for the "
            f"step that verifies: set it to fier-256 or another policy that retrieves and does "
            f"nothing else, got {policy}"
        )
    if policy.retrieve.dense_below != "auto":
        raise PolicyError(
            f"{where}: drafts retrieve at every length, and cache_to_weights says where there are "
            f"any: leave out dense_below of {policy}"
        )
    return policy


def take_drafts(args: Any) -> None:
    """Moves what is ours of the speculative configuration of `args`, vLLM's ``EngineArgs``.

    Raises:
        ValueError: there is no policy, no number of tokens, or a key that the method does not know.
    """
    given = _with_flags(args)
    known = ("method", *_OURS, _COUNT, _COUNTS)
    if unknown := [key for key in given if key not in known]:
        raise ValueError(
            f"method {METHOD} of --speculative-config knows {', '.join(known)}, "
            f"not {', '.join(map(repr, unknown))}"
        )
    config = args.additional_config
    if not isinstance(config, dict) or config.get(POLICY_KEY) is None:
        raise ValueError(
            f"method {METHOD} of --speculative-config needs a KV policy, by which requests are "
            "answered: set --kv-policy full too"
        )
    if given.get(_COUNT) is None:
        raise ValueError(
            f"method {METHOD} of --speculative-config needs {_COUNT}, for example {_EXAMPLE}"
        )
    ours = {key: given.pop(key, default) for key, default in _OURS.items()}
    args.additional_config = {**config, DRAFTS_KEY: ours}
    args.speculative_config = {**given, "method": STAND_IN}
    for flag in _FLAGS.values():
        setattr(args, flag, None)


def _with_flags(args: Any) -> dict[str, Any]:
    """The speculative configuration of `args`, with what flags of their own say of it."""
    given = {key.replace("-", "_"): value for key, value in args.speculative_config.items()}
    for key, flag in _FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None and key in given:
            raise ValueError(
                f"--{flag.replace('_', '-')} and {key} of --speculative-config say the same: drop "
                "one of them"
            )
        given |= {} if value is None else {key: value}
    return given
