"""Requests as they come: with prefixes in common, repeated, as next turns of earlier ones."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from simulation.server import Server
from vllm_kvx.config.handed_over import TRANSFER
from vllm_kvx.config.settings import POLICY_KEY

VOCAB = 3  # Few, so that prompts have prefixes in common by chance too.
# Of most requests, so that many may share.
SALTS = (None, None, "salt")
# The share of the prompts that are an earlier request's next turn; `Server.repeats` are one of the
# last few.
NEXT_TURN = 0.35
# The share of the texts that keep their adapter; those that are new have none.
SAME_ADAPTER = 0.4


@dataclass(frozen=True)
class Text:
    """Tokens under a cache salt and an adapter; only requests with the same share their prefixes.

    adapter: a number from 1 on; 0 is none.
    """

    tokens: list[int]
    salt: str | None
    adapter: int = 0

    @property
    def under(self) -> str:
        """What its tokens' entries are made under; see `made_under`."""
        return made_under(self.salt, name_of(self.adapter))


def made_under(salt: str | None, adapter: str | None) -> str:
    """Entries are made of the same only under the same: of no salt and no adapter, nothing."""
    return (salt or "") + ("" if adapter is None else f", by {adapter}")


def name_of(adapter: int) -> str | None:
    """What events and requests call an adapter; None if it is none."""
    return f"adapter {adapter}" if adapter else None


def lora_request(adapter: int) -> LoRARequest | None:
    """What a request with this adapter says."""
    name = name_of(adapter)
    return None if name is None else LoRARequest(name, adapter, f"nowhere/{name}")


class Traffic:
    """Draws the requests of one server."""

    def __init__(self, server: Server, by_priority: bool, rng: random.Random) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(server.block_size, sha256)
        self._server, self._by_priority, self._rng = server, by_priority, rng
        self._families = [self._tokens(2 * server.max_prompt) for _ in range(4)]
        self._recent: list[Text] = []
        self._count = 0
        # Adapters are drawn apart: a server without them gets what it got.
        self._of_adapters = random.Random(rng.random() if server.adapters else 0)

    def draw(self, finished: Sequence[Text]) -> Request:
        """A new request. finished: the texts of earlier ones, whose next turn it may be."""
        rng, server = self._rng, self._server
        text = self._with_adapter(self._prompt(finished))
        tokens = text.tokens[: server.max_len - 1]
        self._recent = [*self._recent[-3:], text]
        longest = server.max_len - len(tokens)
        params = SamplingParams(
            max_tokens=min(rng.randrange(1, server.max_answer), longest),
            ignore_eos=True,
            temperature=0.0,
            extra_args={POLICY_KEY: rng.choice(server.requests)},
        )
        self._count += 1
        return Request(
            f"request {self._count}",
            tokens,
            params,
            None,
            arrival_time=float(self._count),
            cache_salt=text.salt,
            lora_request=lora_request(text.adapter),
            block_hasher=self._hasher,
            priority=rng.randrange(3) if self._by_priority else 0,
        )

    def passed_on(
        self,
        request: Request,
        answer: int,
        transfer: Mapping[str, Any],
        policy: str | None = None,
    ) -> Request:
        """The same request, for another server.

        transfer: its ``kv_transfer_params``. policy: another one than the request's.
        """
        params, name = request.sampling_params, request.request_id
        assert params is not None and request.prompt_token_ids is not None
        extra_args = {**(params.extra_args or {}), TRANSFER: dict(transfer)}
        if policy is not None:
            extra_args[POLICY_KEY] = policy
        return Request(
            name,
            list(request.prompt_token_ids),
            SamplingParams(
                max_tokens=answer, ignore_eos=True, temperature=0.0, extra_args=extra_args
            ),
            None,
            arrival_time=request.arrival_time,
            cache_salt=request.cache_salt,
            lora_request=request.lora_request,
            block_hasher=self._hasher,
            priority=request.priority,
        )

    def _prompt(self, finished: Sequence[Text]) -> Text:
        rng, kind = self._rng, self._rng.random()
        if finished and kind < NEXT_TURN:
            earlier = rng.choice(finished)
            cut = max(len(earlier.tokens) - rng.randrange(7), 1)
            return replace(earlier, tokens=earlier.tokens[:cut] + self._tokens(rng.randrange(4)))
        if self._recent and NEXT_TURN < kind < NEXT_TURN + self._server.repeats:
            return rng.choice(self._recent)
        return Text(self._new_prompt(), rng.choice(SALTS))

    def _with_adapter(self, text: Text) -> Text:
        """Many a text is asked again of another adapter, or of the base model."""
        rng = self._of_adapters
        if not self._server.adapters or rng.random() < SAME_ADAPTER:
            return text
        return replace(text, adapter=rng.randrange(1 + self._server.adapters))

    def _new_prompt(self) -> list[int]:
        """It begins as a family does; it may be all of it, or end where a block does."""
        rng, size = self._rng, self._server.block_size
        family, length = rng.choice(self._families), rng.randrange(1, self._server.max_prompt)
        if rng.random() < 0.3:
            length = -(-length // size) * size
        cut = length if rng.random() < 0.3 else rng.randrange(length + 1)
        return family[:cut] + self._tokens(length - cut)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(count)]
