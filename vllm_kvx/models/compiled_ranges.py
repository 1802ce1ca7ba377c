"""Ranges of layers run from the pieces that vLLM compiled for the stock decoder.

So a server that drops rows compiles no more than a stock one. vLLM's compiled decoder gathers its
arguments (row count, token ids, positions, weights) and hands them to a program that calls the
pieces in order (``models/stitching``). Here that program is replaced, at the one attribute that
holds it: asked for a range of layers, it runs only the statements of that range, on the arguments
of that very call. So weights, buffers and row counts are always those that the stock decoder would
use, and the numbers are its own: ranges one after the other give its output bit for bit.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.codegen import generate_execution_code

from vllm_kvx.models.layer_ranges import LayerRanges, NoRanges
from vllm_kvx.models.stitching import PIECES, PROGRAM, Stitching, UnknownForm
from vllm_kvx.models.stream import Out, Projected, Stream

# Rows by which the residual stream is told from other tensors.
_CHECKED = 8
# Runs the stock decoder on (N,) ids and positions.
Decode = Callable[[Tensor, Tensor], Any]


class CompiledRanges:
    """Ranges of a decoder's layers, by its own compiled pieces."""

    def __init__(self, ranges: LayerRanges, decode: Decode) -> None:
        """Takes over the program of a decoder that vLLM has compiled by now.

        Raises:
            UnknownForm: it was compiled in another way, or its program is of another form.
        """
        compiled = _compiled_function(ranges.decoder)
        stock: Any = compiled.optimized_call
        if not isinstance(stock, partial) or PIECES not in stock.keywords:
            raise UnknownForm("its compiled pieces are called in another way")
        self._ranges, self._attention = ranges, ranges.attention
        self._program = Stitching(_source_of(compiled, stock.func.__code__))
        cuts = len(self._program.cuts)
        if cuts != ranges.num_layers:
            raise UnknownForm(f"{cuts} of its {ranges.num_layers} layers have attention outside")
        self._compiled = compiled
        self._decode, self._stock, self._pieces = decode, stock, stock.keywords[PIECES]
        self._scope: dict[str, Any] = stock.func.__globals__
        self._parts: dict[tuple[int, int], Callable[..., Any]] = {}
        # The part that the program's next call runs in its place, and what lives where it begins.
        self._asked: tuple[Callable[..., Any], dict[str, Tensor]] | None = None
        # Why ranges that have run may not be used, if so.
        self.problem = ""
        compiled.optimized_call = self._answer

    def run(
        self, first: int, last: int, ids: Tensor | None, positions: Tensor, stream: Stream | None
    ) -> Out:
        """Layers [first, last): (N,) ids if it begins the model, else the stream, which it takes.

        The stream is released, so that its memory is free for the layers.

        Raises:
            UnknownForm: the first time that this range runs, what comes out is not as expected.
            RuntimeError: vLLM ran the decoder past its compiled program.
        """
        live: dict[str, Tensor] = {}
        if first:
            assert stream is not None
            live = self._entering(first, positions, stream)
            # Nothing reads them, but their number is the number of rows.
            ids = torch.zeros(positions.shape[-1], dtype=torch.int32, device=positions.device)
        assert ids is not None
        is_new = (first, last) not in self._parts
        out = self._run_part(first, last, ids, positions, live)
        if last == self._ranges.num_layers:
            assert isinstance(out, Tensor)
            return out
        if is_new:
            self._check(last, out, positions)
        cut = self._program.cuts[last]
        return Stream((out[cut.residual],), Projected(out[cut.query], out[cut.key], out[cut.value]))

    def _check(self, layer: int, live: dict[str, Tensor], positions: Tensor) -> None:
        """Raises UnknownForm if what lives below `layer` is not what a pass would begin with."""
        rows = positions.shape[-1]
        cut, attention = self._program.cuts[layer], self._attention[layer]
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        shapes = {
            cut.query: (heads, attention.head_size),
            cut.key: (kv_heads, attention.head_size),
            cut.value: (kv_heads, attention.head_size_v),
            cut.output: (heads, attention.head_size_v),
        }
        for name, shape in shapes.items():
            if live[name].shape != (rows, *shape):
                raise UnknownForm(f"attention {layer} takes {list(live[name].shape)}")
        output, residual = live[cut.output], live[cut.residual]
        if residual.ndim != 2 or len(residual) != rows or residual.dtype != output.dtype:
            raise UnknownForm(
                f"below layer {layer} lives {list(residual.shape)} of {residual.dtype}, and its "
                f"attention writes {output.dtype}"
            )
        made = Projected(*(live[name][:_CHECKED] for name in (cut.query, cut.key, cut.value)))
        # LoRA layers take as many rows as are mapped to adapters.
        adapters = self._ranges.adapters
        try:
            with nullcontext() if adapters is None else adapters.first(_CHECKED):
                self._ranges.check(layer, residual[:_CHECKED], positions[..., :_CHECKED], made)
        except NoRanges as error:
            # Not raised amid a pass: ranks have different heads, and wait for each other.
            self.problem = error.why

    def _run_part(
        self, first: int, last: int, ids: Tensor, positions: Tensor, live: dict[str, Tensor]
    ) -> Any:
        """What the program's part puts out: the model's output, or by name what lives at `last`."""
        part = self._parts.get((first, last))
        if part is None:
            part = self._program.part(first, last).function(self._scope)
            self._parts[first, last] = part
        self._asked = part, live
        try:
            out = self._decode(ids, self._ranges.positions_of_decoder(positions))
            if self._asked is not None:
                raise RuntimeError("the decoder ran, and not the program that its pieces are in")
            return out
        finally:
            self._asked = None

    def give_back(self) -> None:
        """Leaves the decoder as vLLM made it."""
        self._compiled.optimized_call = self._stock

    def _answer(self, *given: Any) -> Any:
        """In the place of the program: the decoder takes its output out of a tuple."""
        asked, self._asked = self._asked, None
        if asked is None:
            return self._stock(*given)
        part, live = asked
        out = part(given, live, self._pieces)
        return out if isinstance(out, tuple) else (out,)

    def _entering(self, layer: int, positions: Tensor, stream: Stream) -> dict[str, Tensor]:
        """By name, what lives where attention of `layer` begins."""
        residual, made = stream.sum(), stream.projected
        stream.release()
        if made is None:
            made = self._ranges.projected(layer, (residual,), positions)
        cut, attention = self._program.cuts[layer], self._attention[layer]
        shape = len(residual), attention.num_heads, attention.head_size_v
        return {
            cut.query: made.query,
            cut.key: made.key,
            cut.value: made.value,
            cut.output: torch.empty(shape, dtype=residual.dtype, device=residual.device),
            cut.residual: residual,
        }


def _compiled_function(decoder: Any) -> Any:
    """vLLM's ``VllmSerializableFunction`` of a decoder."""
    ahead = getattr(decoder, "aot_compiled_fn", None)
    compiled = getattr(getattr(ahead, "_artifacts", None), "compiled_fn", None)
    if not hasattr(compiled, "optimized_call"):
        raise UnknownForm("it is not compiled ahead of time (VLLM_USE_AOT_COMPILE)")
    return compiled


def _source_of(compiled: Any, code: CodeType) -> str:
    """The source of the program that runs, whose code is `code`.

    What a cache kept is that of the process that compiled; this one may have written its own.
    """
    kept = getattr(compiled, "execution_code", None)
    if kept is not None and _is_source_of(kept, code):
        return str(kept)
    backend = getattr(compiled, "vllm_backend", None)
    if backend is not None and getattr(backend, "split_gm", None) is not None:
        source, _, _ = generate_execution_code(backend.split_gm)
        if _is_source_of(source, code):
            return str(source)
    raise UnknownForm("the source of its program is not known")


def _is_source_of(source: str, code: CodeType) -> bool:
    """Whether `source` defines the program with this very code."""
    constants = compile(source, code.co_filename, "exec").co_consts
    own = [each for each in constants if isinstance(each, CodeType) and each.co_name == PROGRAM]
    return own == [code]
