"""How a chunk's attention is shared out: pieces of its context, each of which fits into scratch."""

from itertools import pairwise
from typing import NamedTuple

# Entries that are undone at once, where a context has more.
SLICE = 32_768
# A request with so many rows, or fewer, is read as it is stored. With more, vLLM's kernel does not
# share a long context among programs, and takes longer than undoing it.
SHORT = 1


class Piece(NamedTuple):
    """Entries [first, end) of a request, and where their bounds lie among all pieces' bounds."""

    first: int
    end: int
    place: int


class Chunk(NamedTuple):
    """One request's rows [begin, stop) of a batch, that attend to entries which are undone first.

    request: its row of the block table.
    pieces: of its entries, in order. All rows see all of every piece but the last, in which the
        rows' own entries are the last ones: there each row sees those up to its own.
    """

    request: int
    begin: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """How many rows the request has."""
        return self.stop - self.begin


class Plan(NamedTuple):
    """What of a batch attends to undone entries.

    num_requests, num_rows: those before the chunks, which are read as they are stored.
    longest: the most rows of one of these.
    chunks: of all other requests with rows.
    bounds: by piece, (0, rows, 0, entries): where FlashAttention looks for either's end.
    """

    num_requests: int
    num_rows: int
    longest: int
    chunks: tuple[Chunk, ...]
    bounds: tuple[tuple[int, int, int, int], ...]


# Of a batch without requests.
NOTHING = Plan(0, 0, 0, (), ())


def plan_of(
    starts: list[int], lens: list[int], block_size: int, short: int, most: int | None = None
) -> Plan:
    """Shares out a batch of R requests.

    Args:
        starts: R + 1 bounds of their rows. lens: R numbers of entries, the rows' own included.
        block_size: entries of a block, at whose bounds pieces begin.
        short: rows of a request that is read as it is stored, at most. Once one has more, all
            behind it are undone: vLLM sorts a batch by rows.
        most: entries of a piece, at most, unless the rows' own are more; `SLICE` unless given.
    """
    counts = [stop - begin for begin, stop in pairwise(starts)]
    first = next((i for i, count in enumerate(counts) if count > short), len(counts))
    chunks: list[Chunk] = []
    bounds: list[tuple[int, int, int, int]] = []
    for request in range(first, len(counts)):
        if not counts[request]:
            continue
        pieces = []
        # Batches that vLLM makes up have no entries.
        length = max(lens[request], counts[request])
        for begin, end in _pieces(length, counts[request], block_size, most or SLICE):
            pieces.append(Piece(begin, end, len(bounds)))
            bounds.append((0, counts[request], 0, end - begin))
        chunks.append(Chunk(request, starts[request], starts[request + 1], tuple(pieces)))
    longest = max(counts[:first], default=0)
    return Plan(first, starts[first], longest, tuple(chunks), tuple(bounds))


def _pieces(length: int, rows: int, block_size: int, most: int) -> list[tuple[int, int]]:
    """[first, end) of the pieces of `length` entries, the last of which has those of all `rows`."""
    most = max(most // block_size, 1) * block_size
    # The last piece begins where a block does, and has the rows' own entries.
    last = max(length - max(rows, most), 0)
    last = min(-(-last // block_size), (length - rows) // block_size) * block_size
    return [(begin, min(begin + most, last)) for begin in range(0, last, most)] + [(last, length)]


def scratch_entries(max_model_len: int, max_rows: int, block_size: int) -> int:
    """The most entries that are undone at once, for requests and steps of such sizes."""
    return min(max(SLICE, max_rows) + block_size, max_model_len)
