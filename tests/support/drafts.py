"""Drafts of a test's choice, in the place of an engine's drafter."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.engine import Answer
from support.prompts import VOCAB

WRONG = VOCAB - 1


@dataclass
class Drafter:
    """Drafts the tokens of known answers, some of them right.

    answers: by prompt, its known answer; of other prompts all drafts are wrong.
    right: how many of a request's next drafts are to be right, asked for each request and step.
    accepted: how often so many drafts of a step stayed.
    """

    engine: Any
    right: Callable[[], int]
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    accepted: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, engine: Any, right: Callable[[], int]) -> "Drafter":
        """Takes the place of the engine's own drafter."""
        drafter = cls(engine, right)
        drafter._propose = engine.runner.speculator.propose
        engine.runner.speculator.propose = drafter.propose
        update = engine.scheduler.make_spec_decoding_stats

        def counted(*args: Any, num_accepted_tokens: int, **options: Any) -> Any:
            drafter.accepted[num_accepted_tokens] += 1
            return update(*args, num_accepted_tokens=num_accepted_tokens, **options)

        engine.scheduler.make_spec_decoding_stats = counted
        return drafter

    def know(self, answers: Sequence[Answer]) -> None:
        self.answers.update({tuple(a.prompt): a.tokens for a in answers})

    def remove(self) -> None:
        """The engine's own drafter drafts again."""
        self.engine.runner.speculator.propose = self._propose

    def propose(self, batch: Any, *args: Any, **options: Any) -> Tensor:
        states, count = self.engine.runner.req_states, self.engine.runner.num_speculative_steps
        device = states.all_token_ids.gpu.device
        drafts = torch.zeros(batch.num_reqs, count, dtype=torch.int64, device=device)
        for row, index in enumerate(batch.idx_mapping_np.tolist()):
            length, prompt_len = int(states.total_len.gpu[index]), int(states.prompt_len.np[index])
            ids = states.all_token_ids.gpu[index].tolist()
            answer = self.answers.get(tuple(ids[:prompt_len]))
            known = [] if answer is None else answer[length - prompt_len :][:count]
            known += [WRONG] * (count - len(known))
            right = self.right() if answer is not None else 0
            wrong = [token + 1 if token < WRONG else WRONG - 1 for token in known[right:]]
            drafts[row] = torch.tensor(known[:right] + wrong)
        return drafts


@dataclass(frozen=True)
class Drafted:
    """What was drafted for one request in one step.

    tokens: those that it had, its prompt's and the last sampled one among them. drafts: (K,).
    """

    request: str
    tokens: list[int]
    drafts: list[int]


def watch_own_drafts(engine: Any) -> list[Drafted]:
    """Grows by all that the model drafts for itself."""
    drafter, states, found = engine.runner.speculator, engine.runner.req_states, list[Drafted]()
    propose = drafter.propose

    def watched(batch: Any, *args: Any, **options: Any) -> Tensor:
        drafts: Tensor = propose(batch, *args, **options)
        for row, index in enumerate(batch.idx_mapping_np.tolist()):
            if batch.req_ids[row] in drafter.drafted:
                ids = states.all_token_ids.gpu[index][: int(states.total_len.gpu[index])]
                found.append(Drafted(batch.req_ids[row], ids.tolist(), drafts[row].tolist()))
        return drafts

    drafter.propose = watched
    return found


def some(seed: int, count: int) -> Callable[[], int]:
    """Of `count` drafts any number is right, at random."""
    rng = random.Random(seed)
    return lambda: rng.randrange(count + 1)
