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
    beside: whether the engine's own drafter drafts, too, and its drafts are thrown away.
    """

    engine: Any
    right: Callable[[], int]
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    accepted: Counter[int] = field(default_factory=Counter)
    beside: bool = False

    @classmethod
    def of(cls, engine: Any, right: Callable[[], int], beside: bool = False) -> "Drafter":
        """Takes the place of the engine's own drafter."""
        drafter = cls(engine, right, beside=beside)
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
        if self.beside:
            self._propose(batch, *args, **options)
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
    states: (N, C) of all tokens but the last one, where they are what drafts follow from.
    """

    request: str
    tokens: list[int]
    drafts: list[int]
    states: Tensor | None = None


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


class StateDrafts:
    """Watches a drafter that goes by the model's hidden states.

    found: all that it drafted for requests whose prompts are in.
    """

    def __init__(self, engine: Any) -> None:
        self.found: list[Drafted] = []
        self._states, self._runner = engine.runner.req_states, engine.runner
        # By the tokens of a prompt up to one of them, which any request may have computed; and by
        # request and position behind it.
        self._known: dict[Any, Tensor] = {}
        self._propose = engine.runner.speculator.propose
        engine.runner.speculator.propose = self

    def __call__(
        self,
        batch: Any,
        metadata: Any,
        slots: Any,
        last: Tensor,
        auxiliary: list[Tensor] | None,
        sampled: Tensor,
        rejected: Tensor,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        given = (metadata, slots, last, auxiliary, sampled, rejected)
        drafts: Tensor = self._propose(batch, *given, *args, **options)
        states = last if not auxiliary else torch.cat(auxiliary, -1)
        if not options.get("dummy_run"):
            self._note(batch, states, sampled.tolist(), rejected.tolist(), drafts)
        return drafts

    def _note(
        self, batch: Any, states: Tensor, sampled: list[int], rejected: list[int], drafts: Tensor
    ) -> None:
        held, starts = self._states, batch.query_start_loc.tolist()
        for row, index in enumerate(batch.idx_mapping_np.tolist()):
            name, prompt_len = batch.req_ids[row], int(held.prompt_len.np[index])
            length = int(held.total_len.gpu[index])
            ids = held.all_token_ids.gpu[index][:length].tolist()
            for place in range(starts[row], starts[row + 1] - rejected[row]):
                at = int(batch.positions[place])
                self._known[_key(name, ids, at, prompt_len)] = states[place].to("cpu", copy=True)
            # vLLM 0.33 drafts nothing (-1) for a request that can take no more.
            if sampled[row] and int(drafts[row][0]) >= 0:
                keys = [_key(name, ids, at, prompt_len) for at in range(length - 1)]
                of_all = torch.stack([self._known[key] for key in keys])
                self.found.append(Drafted(name, ids, drafts[row].tolist(), of_all))


def _key(request: str, ids: list[int], at: int, prompt_len: int) -> Any:
    return tuple(ids[: at + 1]) if at < prompt_len else (request, at)


def some(seed: int, count: int) -> Callable[[], int]:
    """Of `count` drafts any number is right, at random."""
    rng = random.Random(seed)
    return lambda: rng.randrange(count + 1)
