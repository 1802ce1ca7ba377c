"""How the chosen tokens of prompts are shared out among passes of a bounded number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvx.worker.prefill.chunks import PromptChunk


@dataclass(frozen=True)
class Piece:
    """Chosen tokens [begin, end) of one prompt, counted among its chosen tokens."""

    chunk: PromptChunk
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        selection = self.chunk.state.selection
        return selection is not None and self.end == selection.count


def pack_selected(chunks: Sequence[PromptChunk], max_tokens: int) -> list[list[Piece]]:
    """Passes of at most `max_tokens` rows over the chosen tokens of these prompts, in order.

    A prompt's window stays in one pass, since its queries score the keys there.
    """
    sizes = []
    for chunk in chunks:
        assert chunk.state.selection is not None
        sizes.append((chunk.state.selection.count, chunk.state.window))
    return [
        [Piece(chunks[i], begin, end) for i, begin, end in pieces]
        for pieces in pack(sizes, max_tokens)
    ]


def pack(sizes: Sequence[tuple[int, int]], max_tokens: int) -> list[list[tuple[int, int, int]]]:
    """Passes of at most `max_tokens` rows over prompts of (rows, window), in order.

    Each has pieces (prompt, begin, end); the last `window` rows of a prompt are in one pass.
    """
    passes: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, (total, window) in enumerate(sizes):
        begin = 0
        while begin < total:
            end = min(begin + room, total)
            if 0 < total - end < window:
                end = total - window
            if end <= begin:
                passes.append([])
                room = max_tokens
                continue
            passes[-1].append((index, begin, end))
            room -= end - begin
            begin = end
    return passes
