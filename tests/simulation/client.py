"""A client that sends what a test says, instead of random traffic."""

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from simulation.engine import Engine
from simulation.server import Case, Server
from simulation.traffic import lora_request
from vllm_kvx.config.settings import POLICY_KEY

# Of a server in which nothing is short.
AMPLE = Case(
    is_async=False,
    by_priority=False,
    shares_prefixes=False,
    reserves_prompts=True,
    max_seqs=8,
    max_batch=1024,
    max_chunk=0,
    num_blocks=1000,
    resets=0,
    copies_pages=False,
)
# Steps in which everything has to have happened.
MANY = 1000


class Client:
    """Sends requests to an engine and notes in which step each began."""

    def __init__(self, server: Server, config: VllmConfig, case: Case) -> None:
        """config: see ``Server.config``."""
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(server.block_size, sha256)
        self.engine = Engine(server, config, case)
        self.began: dict[str, int] = {}
        self._steps = self._sent = 0

    def send(
        self,
        name: str,
        policy: str,
        prompt: Sequence[int],
        answer: int = 2,
        priority: int = 0,
        adapter: int = 0,
    ) -> None:
        """prompt: token ids below ``VOCAB``. answer: how many tokens it has.

        adapter: see ``Text``.
        """
        params = SamplingParams(
            max_tokens=answer, ignore_eos=True, temperature=0.0, extra_args={POLICY_KEY: policy}
        )
        self._sent += 1
        self.engine.add(
            Request(
                name,
                list(prompt),
                params,
                None,
                arrival_time=float(self._sent),
                lora_request=lora_request(adapter),
                block_hasher=self._hasher,
                priority=priority,
            )
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for name in self.engine.advance():
                self.began.setdefault(name, self._steps)
            self._steps += 1

    def until_begun(self, name: str) -> None:
        for _ in range(MANY):
            if name in self.began:
                return
            self.step()
        raise AssertionError(f"{name} never begins")

    def order(self) -> Sequence[str]:
        """Requests in the order in which they began, once all have ended."""
        for _ in range(MANY):
            if not self.engine.live:
                break
            self.step()
        self.engine.finish()
        return sorted(self.began, key=lambda name: self.began[name])
