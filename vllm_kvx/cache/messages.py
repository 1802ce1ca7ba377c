"""What scheduler and workers tell each other in a step, beside what vLLM's own outputs say.

vLLM pickles a step's ``SchedulerOutput`` for every worker, and one worker's ``ModelRunnerOutput``
on the way back. Neither has a field for a plug-in, so a message is one more attribute of the
object, which pickle takes along. Messages hold nothing but Python's own types and dataclasses of
this module. Most steps carry none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

_STEP = "kv_policy_step"
_RESULT = "kv_policy_result"


@dataclass(frozen=True)
class PrivateBlocks:
    """The blocks that a prompt's kept entries go to in one KV group; others may read the old ones.

    places: ascending, places in the request's list of blocks. blocks: ids of those that take them.
    """

    places: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StateBlocks:
    """Blocks of one request's states in a step.

    read: of the tokens from the prompt's first on. write: to be filled, with the states of the
    `places`, ascending, counted in blocks.
    """

    read: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    write: tuple[int, ...] = ()


@dataclass(frozen=True)
class PolicyStep:
    """What the scheduler tells the workers of a step.

    Attributes:
        private: by id of a request whose prompt ends in the step and moves out of its blocks, a
            list by KV group; None where a group takes no new block.
        states: by request id, the blocks of hidden states that the step reads and fills.
        stats: totals of the scheduler for the metrics; None where there is no news.
    """

    private: Mapping[str, Sequence[PrivateBlocks | None]] = field(default_factory=dict)
    states: Mapping[str, StateBlocks] = field(default_factory=dict)
    stats: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PolicyResult:
    """What a worker tells the scheduler of a step.

    Attributes:
        kept: by id of a request whose prompt keeps whole blocks, and by KV stage, the places of
            the blocks that stay, ascending.
    """

    kept: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)


def attach(output: SchedulerOutput, step: PolicyStep) -> None:
    """Puts the message on a step that the scheduler made, unless the message is empty."""
    if step.private or step.states or step.stats is not None:
        setattr(output, _STEP, step)


def step_of(output: SchedulerOutput) -> PolicyStep | None:
    """The message that came with a step; None if none did."""
    return getattr(output, _STEP, None)


def attach_result(output: ModelRunnerOutput, result: PolicyResult) -> None:
    """Puts the message on a step's result, unless the message is empty."""
    if result.kept:
        setattr(output, _RESULT, result)


def result_of(output: ModelRunnerOutput) -> PolicyResult | None:
    """The message that came with a step's result; None if none did."""
    return getattr(output, _RESULT, None)
