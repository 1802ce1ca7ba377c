"""What a server that prefills says of a prompt that it hands over under a policy that keeps a part.

vLLM's routers pass the ``kv_transfer_params`` of the first server's answer on to the second one.
An object of ours lies in them, plain JSON. What is kept of a prompt cannot give the prompt's last
state again, which saw all of it, so the first token travels along and is not computed anew.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# Where vLLM keeps them among a request's ``extra_args``; and our object in them.
TRANSFER, KEY = "kv_transfer_params", "kvx"
# What vLLM's connectors are told: to hold the prompt's blocks for another server, or to fetch them.
HOLDS, FETCHES = "do_remote_decode", "do_remote_prefill"
# By which a first token is drawn: those of both requests must be equal.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "logprobs"),
    "structured_outputs",
)


@dataclass(frozen=True)
class HandedOver:
    """A prompt that was computed elsewhere, of which its policy keeps some entries.

    policy: its canonical name. token: the first one that was generated.
    sampling: the `SAMPLING` parameters by which it was drawn. adapter: the LoRA adapter's name.
    logprob_ids, logprobs: of the sampled token and the likeliest, as vLLM lists them; empty where
        none were asked for. rank: the sampled token's.
    """

    policy: str
    token: int
    sampling: Mapping[str, Any]
    adapter: str | None = None
    logprob_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    rank: int = 0

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "HandedOver | None":
        """What ``kv_transfer_params`` say; None if they have nothing of ours.

        Raises:
            ValueError: what they have is not what a server of ours writes.
        """
        told = params.get(KEY)
        if told is None:
            return None
        try:
            found = cls(
                told["policy"],
                told["token"],
                told["sampling"],
                told["adapter"],
                tuple(map(int, told["logprob_ids"])),
                tuple(-math.inf if each is None else float(each) for each in told["logprobs"]),
                int(told["rank"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            found = None
        is_sound = (
            found is not None
            and isinstance(found.policy, str)
            and type(found.token) is int
            and found.token >= 0
            and isinstance(found.sampling, Mapping)
            and len(found.logprob_ids) == len(found.logprobs)
        )
        if found is None or not is_sound:
            raise ValueError(
                f"{KEY} in {TRANSFER} is not what a server that prefills has answered: pass its "
                f"{TRANSFER} on as they are"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """The object in ``kv_transfer_params``."""
        return {
            "policy": self.policy,
            "token": self.token,
            "sampling": dict(self.sampling),
            "adapter": self.adapter,
            "logprob_ids": list(self.logprob_ids),
            # JSON has no infinity: a token that sampling rules out may be among the likeliest.
            "logprobs": [each if math.isfinite(each) else None for each in self.logprobs],
            "rank": self.rank,
        }


def transfer_of(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A request's ``kv_transfer_params``; empty if it has none."""
    params = (extra_args or {}).get(TRANSFER)
    return params if isinstance(params, Mapping) else {}


def sampling_of(params: "SamplingParams") -> dict[str, Any]:
    """The `SAMPLING` parameters of a request that vLLM has admitted, fit for JSON.

    Of structured outputs a digest, as schemas may be long.
    """
    return {name: _plain(getattr(params, name, None)) for name in SAMPLING}


def _plain(value: Any) -> Any:
    """`value` as it comes back from JSON; what is empty is None."""
    if is_dataclass(value) and not isinstance(value, type):
        # Without what vLLM has noted there of its own.
        asked = {k: v for k, v in asdict(value).items() if v is not None and k[0] != "_"}
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()} or None
    if isinstance(value, (list, tuple, set)):
        return list(value) or None
    return value
