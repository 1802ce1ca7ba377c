"""Clients that hold sessions: each asks on with all that was said, in a pool too small for them."""

import random
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from simulation.cache import Mismatch
from simulation.engine import Engine
from simulation.server import Case, Server
from simulation.traffic import SALTS, VOCAB
from vllm_kvx.config.settings import POLICY_KEY

# The chance of each: a running turn is aborted, the prefix cache is reset, a step is reported
# early, a session asks under another policy from now on.
ABORT, RESET, EARLY_REPORT, CHANGE = 0.01, 0.002, 0.3, 0.1
# That an idle session asks: every fourth is quick, and finds more of what it left.
QUICK, SLOW = 0.5, 0.02
# Steps in which a turn has to end.
MANY = 3000


@dataclass
class Session:
    """All that was said, and the requests of the turn that runs: a prompt may be asked twice."""

    policy: str
    salt: str | None
    tokens: list[int]
    asked: list[Request]


class Sessions:
    """`count` sessions of a server, whose pool has a third of the blocks that stock would need.

    They are half as long as they may become, on average.

    turns: how many have been answered. aborted: how many were not waited for.
    """

    def __init__(self, server: Server, config: VllmConfig, seed: int, count: int = 20) -> None:
        """config: see ``Server.config``."""
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(server.block_size, sha256)
        self._server, self._rng = server, random.Random(f"{server.policy}, sessions {seed}")
        blocks = server.num_groups * -(-server.max_len // server.block_size)
        self.case = Case(
            is_async=bool(seed % 2),
            by_priority=False,
            shares_prefixes=True,
            reserves_prompts=self._rng.random() < 0.5,
            max_seqs=count,
            max_batch=self._rng.choice([24, 64, 128]),
            max_chunk=0,
            num_blocks=max(count * blocks // 2 // 3, blocks + 2),
            resets=0,
            copies_pages=False,
        )
        self.engine = Engine(server, config, self.case, self._rng)
        self._sessions = [self._new() for _ in range(count)]
        self.turns = self.aborted = self._sent = 0

    def run(self, turns: int) -> None:
        """Until so many turns have been answered, and then until nothing runs.

        Raises:
            Mismatch: a request saw what a cold run would not; or something is left when all are
                done.
        """
        engine, rng, steps, answered = self.engine, self._rng, 0, 0
        while self.turns < turns:
            steps, answered = (steps + 1 if self.turns == answered else 0), self.turns
            if steps > MANY:
                raise Mismatch(f"no turn ends in {MANY} steps: {list(engine.live)}")
            for number, session in enumerate(self._sessions):
                self._end_turn(number)
                if not session.asked and rng.random() < (SLOW if number % 4 else QUICK):
                    self._ask(self._sessions[number])
            if engine.live and rng.random() < ABORT:
                self.aborted += 1
                engine.abort(rng.choice(list(engine.live)))
            if rng.random() < RESET:
                engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            engine.step()
            if engine.must_report or (engine.has_unreported and rng.random() < EARLY_REPORT):
                engine.report()
        engine.finish()

    def _new(self) -> Session:
        """Something was said before."""
        rng = self._rng
        said = [rng.randrange(VOCAB) for _ in range(rng.randrange(self._server.max_len * 3 // 4))]
        return Session(rng.choice(self._server.requests), rng.choice(SALTS), said, [])

    def _end_turn(self, number: int) -> None:
        """If the turn's requests have ended, the first one's answer is what was said."""
        session, live = self._sessions[number], self.engine.live
        if not session.asked or any(request.request_id in live for request in session.asked):
            return
        self.turns += 1
        session.tokens, session.asked = list(session.asked[0].all_token_ids), []
        if self._rng.random() < CHANGE:
            session.policy = self._rng.choice(self._server.requests)

    def _ask(self, session: Session) -> None:
        """The next turn; a session that has become too long begins anew."""
        rng, server = self._rng, self._server
        question = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        if len(session.tokens) + len(question) + server.max_answer >= server.max_len:
            session.tokens = []
        prompt = [*session.tokens, *question]
        params = SamplingParams(
            max_tokens=rng.randrange(1, server.max_answer),
            ignore_eos=True,
            temperature=0.0,
            extra_args={POLICY_KEY: session.policy},
        )
        for _ in range(1 if rng.random() < 0.9 else 2):
            self._sent += 1
            request = Request(
                f"request {self._sent}",
                prompt,
                params,
                None,
                arrival_time=float(self._sent),
                cache_salt=session.salt,
                block_hasher=self._hasher,
            )
            session.asked.append(request)
            self.engine.add(request)
