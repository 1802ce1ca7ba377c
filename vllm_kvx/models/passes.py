"""What a forward pass runs: the contract between the worker, which plans, and the decoder.

A step is a sequence of passes, each over some layers and over rows of its own. The worker hands
them over as an iterator and is asked for the next one when the one before has run: only then is
known what the device decided, and attention backends keep the metadata of one batch at a time.
N rows of a pass, T rows of the step's batch, H the hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

# By layer name, what vLLM's attention backends make of a batch.
AttnMetadata = dict[str, Any]


@dataclass(frozen=True)
class RequestRows:
    """Whose some rows are, which come request by request.

    requests: (P,) int64 places of these in the step's batch. counts: (P,) rows of each.
    """

    requests: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class BatchRows:
    """Token ids of the step's batch: all of them, or those of `rows`, (N,) int64."""

    rows: Tensor | None = None


@dataclass(frozen=True)
class TokenIds:
    """Token ids given here, (N,) int32 or int64."""

    ids: Tensor


@dataclass(frozen=True)
class Previous:
    """What the pass before put out: all of its rows, or `rows`, (N,) int64, of them."""

    rows: Tensor | None = None


@dataclass(frozen=True)
class Stashed:
    """States that wait: `rows`, (N,) int64, of `states`, (S, H)."""

    states: Tensor
    rows: Tensor


Source = BatchRows | TokenIds | Previous | Stashed


@dataclass(frozen=True)
class ToStash:
    """States that wait: `rows` of the pass's output, or all, go to `targets`, (n,) int64."""

    states: Tensor
    targets: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True)
class Queries:
    """Queries of a layer whose rows are not run, for what the worker does beside it.

    rows: (n,) int64, of the pass's output. positions: (n,) int64 of these tokens.
    requests: whose they are.
    run: takes the layer's number and its queries, (n, H, D), once its entries are stored.
    hooks: entered around it.
    """

    rows: Tensor
    positions: Tensor
    requests: RequestRows
    run: Callable[[int, Tensor], None]
    hooks: AbstractContextManager[None]


@dataclass(frozen=True)
class ToEntries:
    """Keys and values of layers [first, last), projected from the output without running them.

    rows: (n,) int64, of the pass's output. positions: (n,) int64 of these tokens.
    requests: whose they are.
    slot_mapping: (n,) int64 slots by layer name.
    queries: of each of these layers, after its entries; None if nothing asks for them.
    """

    first: int
    last: int
    rows: Tensor
    positions: Tensor
    requests: RequestRows
    slot_mapping: dict[str, Tensor]
    queries: Queries | None = None


@dataclass(frozen=True)
class ToOutput:
    """Final states: `rows` of the pass, or all, are those of `in_batch`, (n,) int64.

    None stands for all rows of the batch, in order.
    """

    in_batch: Tensor | None = None
    rows: Tensor | None = None


Sink = ToStash | ToEntries | ToOutput


@dataclass
class Pass:
    """One run of layers [first, last).

    Attributes:
        source: what the first layer reads. sinks: where the last one's output goes besides the
            next pass.
        requests: whose its rows are; None: those of the batch, all of them.
        positions: (N,) int64 token positions; None: those of the batch.
        attn_metadata: by layer name; None: the step's own.
        slot_mapping: (N,) int64 slots by layer name, where they differ from the step's.
        hooks: entered around the pass; the worker's hooks beside each layer's attention.
    """

    first: int
    last: int
    source: Source
    sinks: Sequence[Sink] = ()
    requests: RequestRows | None = None
    positions: Tensor | None = None
    attn_metadata: AttnMetadata | None = None
    slot_mapping: dict[str, Tensor] = field(default_factory=dict)
    hooks: AbstractContextManager[None] = field(default_factory=nullcontext)


class AdapterSelection(Protocol):
    """Tells LoRA layers which adapter each row has that they see next."""

    def select(self, rows: RequestRows | None) -> None:
        """rows: whose they are; None: those of the batch, all of them."""


@dataclass
class StepPlan:
    """What the next forward pass runs.

    Attributes:
        passes: one after the other; None: the stock decoder over the whole batch, with its own
            compiled graph and CUDA graphs.
        adapters: of requests in the batch that has passes; None if none of them has one.
        hooks: entered around the stock decoder.
        is_dummy: the step captures graphs or warms up.
    """

    passes: Iterator[Pass] | None = None
    adapters: AdapterSelection | None = None
    hooks: AbstractContextManager[None] = field(default_factory=nullcontext)
    is_dummy: bool = False
