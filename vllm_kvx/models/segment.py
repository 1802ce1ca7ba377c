"""Ranges of decoder layers, each compiled on its own."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig

from vllm_kvx.models.layer_ranges import LayerRanges
from vllm_kvx.models.stream import Out, Stream

# What a decoder hands from stage to stage; after the last layer normed states.
_SegmentOut = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class DecoderSegment(nn.Module):
    """Layers ``[start, end)`` of a decoder; the first embeds, the last normalises."""

    ranges: LayerRanges
    start: int
    end: int

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        ranges: LayerRanges,
        start: int,
        end: int,
    ) -> None:
        super().__init__()
        # Plain references: the decoder stays the owner of its modules and of their names.
        self.__dict__.update(ranges=ranges, start=start, end=end)

    def run(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> _SegmentOut:
        """(N,) ids or (N, hidden) states -> states and residual, or normed states at the end.

        The decoder has to be the stage of these layers.
        """
        out: _SegmentOut = self.ranges.forward(input_ids, positions, hidden_states, residual)
        return out


def compiled_segment(name: str) -> type[DecoderSegment]:
    """A class for the segment of this name.

    vLLM finds a compiled artifact by the qualified name of ``forward``, so two segments of one
    class would load each other's.
    """

    class Segment(DecoderSegment):
        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            hidden_states: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> _SegmentOut:
            return self.run(input_ids, positions, hidden_states, residual)

    Segment.__qualname__ = Segment.__name__ = name
    Segment.forward.__qualname__ = f"{name}.forward"
    # The last of positions: there may be several rows of them.
    dims: dict[str, Any] = {"input_ids": 0, "positions": -1, "hidden_states": 0, "residual": 0}
    return support_torch_compile(dynamic_arg_dims=dims)(Segment)


class Segments(nn.Module):
    """The segments of a decoder, for one or several ways to cut it.

    There are segments between the layers where rows may leave the batch, and finer ones between
    those where a pass may begin or end whose pivot is found meanwhile. Where rows never leave there
    are none.
    """

    def __init__(
        self,
        ranges: LayerRanges,
        row_cuts: Sequence[int],
        online_cuts: Sequence[int],
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.num_layers, self.ranges = ranges.num_layers, ranges
        # By first layer: end, and place in the list.
        self._from: dict[int, list[tuple[int, int]]] = {}
        self._paths: dict[tuple[int, int], list[DecoderSegment]] = {}
        made: list[DecoderSegment] = []
        # Every way to cut the whole decoder.
        self.edges: list[tuple[int, ...]] = []
        if row_cuts or online_cuts:
            self.edges.append((0, *row_cuts, self.num_layers))
        if online_cuts:
            self.edges.append((0, *online_cuts, self.num_layers))
        for edges in self.edges:
            for start, end in pairwise(edges):
                index = len(made)
                # By its layers too: a switch that the cache's key does not know may move a cut.
                place = f"{index}_{start}_{end}"
                with set_model_tag(f"kvx_segment_{place}"):
                    segment = compiled_segment(f"Segment{place}")(
                        vllm_config=vllm_config,
                        prefix=f"{prefix}.segments.{index}",
                        ranges=ranges,
                        start=start,
                        end=end,
                    )
                self._from.setdefault(start, []).append((end, index))
                made.append(segment)
        self.all = nn.ModuleList(made)

    def __bool__(self) -> bool:
        return bool(len(self.all))

    def run(
        self,
        first: int,
        last: int,
        ids: torch.Tensor | None,
        positions: torch.Tensor,
        stream: Stream | None,
    ) -> Out:
        """Layers [first, last): (N,) ids if it begins the model, else the stream, which it takes.

        The stream is released: nobody reads it any more.
        """
        states: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if stream is not None:
            states = self.ranges.entering(stream.terms)
            stream.release()
        at = self.ranges.positions_of_decoder(positions)
        for segment in self.path(first, last):
            with self.ranges.as_stage(segment.start, segment.end):
                out = segment(ids, at, *states)
            ids = None
            if isinstance(out, torch.Tensor):
                return out
            states = out
        hidden, residual = states
        assert hidden is not None
        return Stream(self.ranges.leaving(hidden, residual))

    def run_first(self, ids: torch.Tensor | None, positions: torch.Tensor) -> None:
        """Runs the segment that a step's direct pass begins with, of (N,) ids and positions."""
        segment: DecoderSegment = self.all[0]  # type: ignore[assignment]
        with self.ranges.as_stage(segment.start, segment.end):
            segment(ids, self.ranges.positions_of_decoder(positions), None, None)

    def path(self, first: int, last: int) -> list[DecoderSegment]:
        """The fewest segments that make up layers [first, last).

        Raises:
            ValueError: no segments begin and end there.
        """
        key = (first, last)
        if key not in self._paths:
            found = self._search(first, last)
            if found is None:
                raise ValueError(f"no segments make up layers {first} to {last - 1}")
            self._paths[key] = [self.all[index] for index in found]  # type: ignore[misc]
        return self._paths[key]

    def _search(self, first: int, last: int) -> list[int] | None:
        if first == last:
            return []
        best: list[int] | None = None
        for end, index in self._from.get(first, ()):
            rest = self._search(end, last) if end <= last else None
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = [index, *rest]
        return best
