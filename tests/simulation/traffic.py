"""Requests as they come: with prefixes in common, repeated, as next turns of earlier ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from simulation.server import Server
from vllm_kvx.config.settings import POLICY_KEY

VOCAB = 3  # Few, so that prompts have prefixes in common by chance too.
# Of most requests, so that many may share.
SALTS = (None, None, "salt")
# The share of the prompts that are an earlier request's next turn; `Server.repeats` are one of the
# last few.
NEXT_TURN = 0.35


@dataclass(frozen=True)
class Text:
    """Tokens under a cache salt; only requests with the same salt share their prefixes."""

    tokens: list[int]
    salt: str | None


class Traffic:
    """Draws the requests of one server."""

    def __init__(self, server: Server, by_priority: bool, rng: random.Random) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(server.block_size, sha256)
        self._server, self._by_priority, self._rng = server, by_priority, rng
        self._families = [self._tokens(2 * server.max_prompt) for _ in range(4)]
        self._recent: list[Text] = []
        self._count = 0

    def draw(self, finished: Sequence[Text]) -> Request:
        """A new request. finished: the texts of earlier ones, whose next turn it may be."""
        rng, server = self._rng, self._server
        text = self._prompt(finished)
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
            block_hasher=self._hasher,
            priority=rng.randrange(3) if self._by_priority else 0,
        )

    def _prompt(self, finished: Sequence[Text]) -> Text:
        rng, kind = self._rng, self._rng.random()
        if finished and kind < NEXT_TURN:
            earlier = rng.choice(finished)
            cut = max(len(earlier.tokens) - rng.randrange(7), 1)
            return Text(earlier.tokens[:cut] + self._tokens(rng.randrange(4)), earlier.salt)
        if self._recent and NEXT_TURN < kind < NEXT_TURN + self._server.repeats:
            return rng.choice(self._recent)
        return Text(self._new_prompt(), rng.choice(SALTS))

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
