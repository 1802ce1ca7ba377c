"""Ranges of any decoder's layers, by its own forward: each as if it were a pipeline stage.

A vLLM decoder that supports pipeline parallelism runs layers [start_layer, end_layer) on
``IntermediateTensors``. It embeds if its pipeline group says that it is first, and normalises if
that says that it is last. Here it is asked for any range, and nothing has to be known of its
architecture: neither what its layers take, nor what it multiplies embeddings with.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.sequence import IntermediateTensors

from vllm_kvx.models.adapters import AdapterRows
from vllm_kvx.models.position_rows import PositionRows
from vllm_kvx.models.stream import Projected

_HIDDEN, _RESIDUAL = "hidden_states", "residual"
# What a decoder asks whether it is the first or the last stage.
_ASKED = "get_pp_group"
# Rows that try what a range computes.
TRIED = 8
# How far entries of one stream in two forms may be apart, of what those of two streams are: for
# rounding to 16 bits, and to 8 of queries.
_ROUNDING = 0.2


class Residual(Enum):
    """How the tensors between two layers make up the residual stream."""

    SUM = "hidden states and residual add up to it"
    HIDDEN = "it is the hidden states; a residual beside them is not read"


class NoRanges(ValueError):
    """The decoder cannot be asked for a range of its layers; the text says why."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"policies that propagate cannot run on this model, and those that only retain or "
            f"retrieve can: {why}"
        )
        self.why = why


class _Group(NamedTuple):
    """What a decoder asks of its pipeline group."""

    is_first_rank: bool
    is_last_rank: bool


class _Taken(BaseException):
    """Ends a layer where it calls its attention; `args` are what that takes."""


class LayerRanges:
    """Ranges of one decoder's layers."""

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[Attention],
        hidden_size: int,
        dtype: torch.dtype,
        position_rows: PositionRows | None = None,
    ) -> None:
        """Finds the decoder in `model`.

        Args:
            attention: of each layer, in order. hidden_size: H of the states between two layers.
            position_rows: of a decoder that takes several positions a token.

        Raises:
            NoRanges: the model's decoder does not run as a pipeline stage.
        """
        self.decoder = decoder_of(model)
        self.position_rows = position_rows
        # Of LoRA layers, once these are in the decoder.
        self.adapters: AdapterRows | None = None
        self.attention, self.num_layers = attention, len(attention)
        self.hidden_size = hidden_size
        # Past the wrapper that torch.compile puts around a decoder's call.
        self._forward: Callable[..., Any] = inspect.unwrap(type(self.decoder).forward)
        # A decoder's forward may call that of a base class, from another module.
        forwards = [
            each.__dict__["forward"]
            for each in type(self.decoder).__mro__[:-1]
            if "forward" in each.__dict__
        ]
        scopes = {
            id(scope): scope
            for each in forwards
            if _ASKED in (scope := inspect.unwrap(each).__globals__)
        }
        self._scopes: list[dict[str, Any]] = list(scopes.values())
        name = type(self.decoder).__name__
        if (
            not self._scopes
            or "intermediate_tensors" not in inspect.signature(self._forward).parameters
        ):
            raise NoRanges(f"{name} does not run as a stage of a pipeline")
        if (self.decoder.start_layer, self.decoder.end_layer) != (0, self.num_layers):
            raise NoRanges(f"{name} has {self.decoder.end_layer} layers of {self.num_layers}")
        # Of the decoder, or of the model around it alone.
        owner: Any = self.decoder if hasattr(self.decoder, _MAKE_EMPTY) else model
        made = getattr(owner, _MAKE_EMPTY)(0, dtype, torch.device("cpu"))
        self._has_residual = _RESIDUAL in made.tensors
        if not set(made.tensors) <= {_HIDDEN, _RESIDUAL}:
            raise NoRanges(f"{name} hands {', '.join(made.tensors)} from stage to stage")
        self.residual = Residual.SUM if self._has_residual else Residual.HIDDEN

    @contextmanager
    def as_stage(self, first: int, last: int) -> Iterator[None]:
        """Inside, the decoder is a stage of layers [first, last)."""
        own, stock = self.decoder.__dict__, [scope[_ASKED] for scope in self._scopes]
        group = _Group(first == 0, last == self.num_layers)
        before = own["start_layer"], own["end_layer"]
        for scope in self._scopes:
            scope[_ASKED] = lambda: group
        own["start_layer"], own["end_layer"] = first, last
        try:
            yield
        finally:
            for scope, before_us in zip(self._scopes, stock, strict=True):
                scope[_ASKED] = before_us
            own["start_layer"], own["end_layer"] = before

    def forward(
        self,
        ids: Tensor | None,
        positions: Tensor,
        hidden: Tensor | None,
        residual: Tensor | None,
    ) -> Any:
        """The stage that `as_stage` has set, of (N,) ids or (N, H) states.

        Args:
            positions: (N,) or (R, N) int64, see `positions_of_decoder`.

        Returns:
            (N, H) final states; or hidden states and residual, None where there is none.
        """
        given = None
        if hidden is not None:
            tensors = {_HIDDEN: hidden}
            if residual is not None:
                tensors[_RESIDUAL] = residual
            given = IntermediateTensors(tensors)
        at = self.positions_of_decoder(positions)
        out = self._forward(self.decoder, ids, at, given, None)
        if not isinstance(out, IntermediateTensors):
            return out
        return out[_HIDDEN], out[_RESIDUAL] if self._has_residual else None

    def positions_of_decoder(self, positions: Tensor) -> Tensor:
        """What the decoder takes of (N,) int64 positions: (R, N) where it has R rows of them.

        Rows of a text are equal. Those that have the decoder's form are returned as they are.
        """
        if self.position_rows is None or positions.ndim == 2:
            return positions
        return self.position_rows.of(positions)

    def entering(self, terms: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Hidden states and residual, as the decoder takes them, of a stream's terms."""
        hidden, *rest = terms
        if not self._has_residual:
            return hidden, None
        return hidden, rest[0] if rest else torch.zeros_like(hidden)

    def leaving(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
        """The stream's terms, of what a stage puts out."""
        if self.residual is Residual.HIDDEN or residual is None:
            return (hidden,)
        return hidden, residual

    def projected(
        self,
        layer: int,
        terms: tuple[Tensor, ...],
        positions: Tensor,
        *,
        quantizes: bool = True,
    ) -> Projected:
        """What the attention of `layer` takes: the layer's own code runs up to it, and no further.

        Args:
            terms: of the stream below the layer, (n, H) each. positions: (n,) int64.
            quantizes: whether the query is quantized where the attention backend wants that.
        """
        attention: Any = self.attention[layer]

        def take(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            raise _Taken(query, key, value)

        attention.__dict__["forward"] = take
        # vLLM's own kernels add and normalise in place, and callers read their states again.
        copies = tuple(term.clone() for term in terms)
        try:
            with self.as_stage(layer, layer + 1):
                self.forward(None, positions, *self.entering(copies))
            raise NoRanges(f"layer {layer} runs without calling its attention")
        except _Taken as taken:
            query, key, value = taken.args
        finally:
            del attention.__dict__["forward"]
        if quantizes and attention.query_quant is not None:
            query, _ = attention.query_quant(query, attention._q_scale)
        return Projected(
            query.reshape(-1, attention.num_heads, attention.head_size),
            key.reshape(-1, attention.num_kv_heads, attention.head_size),
            value.reshape(-1, attention.num_kv_heads, attention.head_size_v),
        )

    @torch.no_grad()
    def find_residual(
        self, layers: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Finds what makes up the residual stream, by the keys that `layers` make of it.

        Once the weights are loaded: without them all forms look alike.

        Raises:
            NoRanges: below one of them it is neither the sum nor the hidden states alone.
        """
        try:
            found = {self._residual_below(layer, dtype, device) for layer in layers}
        except NoRanges:
            raise
        except Exception as error:
            # Such as one that reads what an earlier layer has left.
            name = type(self.decoder).__name__
            raise NoRanges(f"{name} does not run from a layer within: {error!r}") from error
        if len(found) > 1:
            raise NoRanges(f"the residual stream of {type(self.decoder).__name__} changes its form")
        if found:
            self.residual = found.pop()

    def _residual_below(self, layer: int, dtype: torch.dtype, device: torch.device) -> Residual:
        hidden, other = _streams(2, (TRIED, self.hidden_size), dtype, device)
        positions, zeros = torch.arange(TRIED, device=device), torch.zeros_like(hidden)

        def keys(*terms: Tensor) -> Tensor:
            return self.projected(layer, terms, positions).key.float()

        if not self._has_residual:
            keys(hidden)
            return Residual.HIDDEN
        both = keys(hidden, other)
        from_sum = _distance(both, keys(hidden + other, zeros))
        from_hidden = _distance(both, keys(hidden, zeros))
        if from_sum < _ROUNDING * from_hidden:
            return Residual.SUM
        if from_hidden < _ROUNDING * from_sum:
            return Residual.HIDDEN
        raise NoRanges(
            f"the residual stream of {type(self.decoder).__name__} below layer {layer} is not "
            "known: neither is it its hidden states, nor do they and the residual add up to it"
        )

    @torch.no_grad()
    def check_ranges(
        self, edges: Sequence[int], projected: Sequence[int], device: torch.device
    ) -> None:
        """Runs some tokens through the ranges between `edges`, 0 and the number of layers included.

        Attention is left out: it has no cache yet, and is not what might need the layers below.

        Args:
            projected: layers whose keys and values are made of the last states between two ranges.

        Raises:
            NoRanges: a range does not run by itself, or all of them do not make up the decoder.
        """
        positions, name = torch.arange(TRIED, device=device), type(self.decoder).__name__
        ids = positions.int()
        ranges = f"the ranges that begin with layers {', '.join(map(str, edges[:-1]))}"
        # What vLLM compiles by itself in a layer, such as activations, would be compiled for this.
        with torch.compiler.set_stance("force_eager"), self._without_attention():
            # A decoder that does not run whole fails by its own words.
            whole, other = (
                self._run((0, self.num_layers), of, positions) for of in (ids, ids + TRIED)
            )
            try:
                out = self._run(edges, ids, positions)
            except Exception as error:
                raise NoRanges(f"{name} does not run in {ranges}: {error!r}") from error
        # Not a number is no match either.
        if not _distance(out, whole) <= _ROUNDING * _distance(whole, other):
            raise NoRanges(f"{name} makes other states of {ranges} than of all layers at once")
        (stream,) = _streams(1, (TRIED, self.hidden_size), whole.dtype, device)
        for layer in projected:
            try:
                self.projected(layer, (stream,), positions)
            except NoRanges:
                raise
            except Exception as error:
                raise NoRanges(f"{name} does not run from layer {layer}: {error!r}") from error

    def _run(self, edges: Sequence[int], ids: Tensor, positions: Tensor) -> Tensor:
        """(n, H) final states of (n,) ids, range by range."""
        states: tuple[Tensor | None, Tensor | None] = (None, None)
        out: Any = None
        for first, last in pairwise(edges):
            with self.as_stage(first, last):
                out = self.forward(None if first else ids, positions, *states)
            if last < self.num_layers:
                states = self.entering(self.leaving(*out))
        assert isinstance(out, Tensor)
        return out

    @contextmanager
    def _without_attention(self) -> Iterator[None]:
        """Inside, attention puts out its queries."""

        def take(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            output_shape: torch.Size | None = None,
            output_dtype: torch.dtype | None = None,
        ) -> Tensor:
            out = query.to(output_dtype or query.dtype, copy=True)
            return out.reshape(output_shape or (len(query), -1))

        layers: list[Any] = list(self.attention)
        for layer in layers:
            layer.__dict__["forward"] = take
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]

    @torch.no_grad()
    def check(self, layer: int, stream: Tensor, positions: Tensor, made: Projected) -> None:
        """Compares `made`, which attention of `layer` takes, with what the layer makes of `stream`.

        Args:
            stream: (n, H), what is taken for the residual stream below the layer.

        Raises:
            NoRanges: it is another tensor.
        """
        own = self.projected(layer, (stream,), positions)
        # What biases add is in every stream's.
        scale = stream.float().std().to(stream.dtype)
        (noise,) = _streams(1, stream.shape, stream.dtype, stream.device)
        other = self.projected(layer, (noise * scale,), positions)
        for part in ("query", "key", "value"):
            ours = getattr(own, part)
            apart = _distance(ours, getattr(other, part))
            if _distance(ours, getattr(made, part)) > _ROUNDING * apart:
                raise NoRanges(f"below layer {layer} lives another tensor than the residual stream")


_MAKE_EMPTY = "make_empty_intermediate_tensors"


def decoder_of(model: nn.Module) -> Any:
    """The module of `model` that runs its layers, as a pipeline stage would.

    Raises:
        NoRanges: there is none, or there are several.
    """
    found = [
        each
        for each in model.modules()
        if hasattr(each, "start_layer") and hasattr(each, "end_layer")
    ]
    if len(found) != 1:
        raise NoRanges(f"{type(model).__name__} has {len(found)} decoders that run as stages")
    return found[0]


def _distance(some: Tensor, others: Tensor) -> float:
    """The mean distance of two tensors' elements."""
    return float((some.float() - others.float()).abs().mean())


def _streams(
    count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Normal numbers, the same on every rank; vLLM's own generators draw none of them."""
    make = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=make).to(device, dtype) for _ in range(count)]
