"""Requests as they come: with prefixes in common, repeated, as next turns of earlier ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from simulation.servers import Server
from simulation.worker import VOCAB
from vllm_kvx.settings import POLICY_KEY

SALTS = (None, None, "salt")


@dataclass(frozen=True)
class Arrival:
    """A request, and what the model needs to know of it besides."""

    request: Request
    salt: str | None


class Traffic:
    """Draws the requests of one server.

    families: texts that prompts begin like.
    """

    def __init__(self, server: Server, by_priority: bool, rng: random.Random) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(server.block_size, sha256)
        self._server, self._by_priority, self._rng = server, by_priority, rng
        self._families = [self._text(2 * server.max_prompt) for _ in range(4)]
        self._recent: list[list[int]] = []
        self._count = 0

    def draw(self, finished: Sequence[list[int]]) -> Arrival:
        """A new request. finished: tokens of earlier ones, whose next turn it may be."""
        rng, server = self._rng, self._server
        tokens = self._prompt(finished)[: server.max_len - 1]
        self._recent = [*self._recent[-3:], tokens]
        longest = server.max_len - len(tokens)
        params = SamplingParams(
            max_tokens=min(rng.randrange(1, server.max_answer), longest),
            ignore_eos=True,
            temperature=0.0,
            extra_args={POLICY_KEY: rng.choice(server.requests)},
        )
        self._count += 1
        salt = rng.choice(SALTS)
        request = Request(
            f"request {self._count}",
            tokens,
            params,
            None,
            arrival_time=float(self._count),
            cache_salt=salt,
            block_hasher=self._hasher,
            priority=rng.randrange(3) if self._by_priority else 0,
        )
        return Arrival(request, salt)

    def _prompt(self, finished: Sequence[list[int]]) -> list[int]:
        rng = self._rng
        if finished and rng.random() < 0.35:
            earlier = rng.choice(finished)
            cut = rng.randrange(max(1, len(earlier) - 6), len(earlier) + 1)
            return earlier[:cut] + self._text(rng.randrange(4))
        if self._recent and rng.random() < 0.35:
            return list(rng.choice(self._recent))
        family, length = rng.choice(self._families), rng.randrange(1, self._server.max_prompt)
        if rng.random() < 0.3:
            return family[:length]
        cut = rng.randrange(length + 1)
        return family[:cut] + self._text(length - cut)

    def _text(self, length: int) -> list[int]:
        return [self._rng.randrange(VOCAB) for _ in range(length)]
