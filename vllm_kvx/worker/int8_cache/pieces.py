"""How a step's attention over undone entries is shared out: pieces that fit into scratch.

Short contexts of several requests share a piece; a long one has several.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

# Entries that are undone at once, where a context has more.
SLICE = 32_768
# A request with so many rows, or fewer, is read as it is stored. With more, vLLM's kernel does not
# share a long context among programs, and takes longer than undoing it.
SHORT = 1


class Piece(NamedTuple):
    """Entries that are undone at once: of each of a chunk's requests, from `first` on.

    total: of all requests. longest: the most of one request.
    place: where the bounds of its rows and of its entries lie among all (``Chunk.bounds_at``).
    """

    first: int
    total: int
    longest: int
    place: int


class Chunk(NamedTuple):
    """Rows [begin, stop) of a batch, that attend to entries which are undone first.

    request: the first one's row of the block table. num_requests: which follow one another there.
    longest: the most rows of one of them.
    pieces: of their entries, in order. Several requests have one piece, with all of their entries.
        All rows see all of every piece but the last, in which a request's own entries are its last
        ones: there each row sees those up to its own.
    """

    request: int
    num_requests: int
    begin: int
    stop: int
    longest: int
    pieces: tuple[Piece, ...]

    def bounds_at(self, piece: Piece) -> tuple[slice, slice]:
        """Where among all bounds those of a piece's rows lie, and those of its entries."""
        middle = piece.place + self.num_requests + 1
        return slice(piece.place, middle), slice(middle, middle + self.num_requests + 1)


class Plan(NamedTuple):
    """What of a batch attends to undone entries.

    num_requests, num_rows: those before the chunks, which are read as they are stored.
    longest: the most rows of one of these.
    chunks: of all other requests with rows.
    bounds: by piece, 0 and where each request's rows end in the chunk, and then the same of its
        entries: FlashAttention looks for them there.
    """

    num_requests: int
    num_rows: int
    longest: int
    chunks: tuple[Chunk, ...]
    bounds: tuple[int, ...]


# Of a batch without requests.
NOTHING = Plan(0, 0, 0, (), ())


def plan_of(
    starts: list[int],
    lens: list[int],
    block_size: int,
    short: int,
    most: int | None = None,
    together: int | None = None,
) -> Plan:
    """Shares out a batch of R requests.

    Args:
        starts: R + 1 bounds of their rows. lens: R numbers of entries, the rows' own included.
        block_size: entries of a block, at whose bounds pieces begin.
        short: rows of a request that is read as it is stored, at most. Once one has more, all
            behind it are undone: vLLM sorts a batch by rows.
        most: entries of a piece, at most, unless the rows' own are more; `SLICE` unless given.
        together: entries of a piece that several requests share, at most; as `most` unless given.
    """
    counts = [stop - begin for begin, stop in pairwise(starts)]
    first = next((i for i, count in enumerate(counts) if count > short), len(counts))
    most = most or SLICE
    chunks: list[Chunk] = []
    bounds: list[int] = []
    # Batches that vLLM makes up have no entries.
    lens = [max(length, count) for length, count in zip(lens, counts, strict=True)]
    for begin, end in _shared(first, counts, lens, together or most):
        rows, entries = counts[begin:end], lens[begin:end]
        each = [(0, entries)]
        if len(rows) == 1:
            cuts = _pieces(entries[0], rows[0], block_size, most)
            each = [(since, [until - since]) for since, until in cuts]
        pieces = []
        for since, sizes in each:
            pieces.append(Piece(since, sum(sizes), max(sizes), len(bounds)))
            bounds += [*accumulate(rows, initial=0), *accumulate(sizes, initial=0)]
        of_rows = starts[begin], starts[end], max(rows)
        chunks.append(Chunk(begin, len(rows), *of_rows, tuple(pieces)))
    longest = max(counts[:first], default=0)
    return Plan(first, starts[first], longest, tuple(chunks), tuple(bounds))


def _shared(
    first: int, counts: list[int], lens: list[int], together: int
) -> Iterator[tuple[int, int]]:
    """[begin, end) of requests from `first` on that are undone at once; none without rows."""
    begin, entries = first, 0
    for request in range(first, len(counts)):
        if begin < request and (not counts[request] or entries + lens[request] > together):
            yield begin, request
            begin, entries = request, 0
        if not counts[request]:
            begin = request + 1
        else:
            entries += lens[request]
    if begin < len(counts):
        yield begin, len(counts)


def _pieces(length: int, rows: int, block_size: int, most: int) -> list[tuple[int, int]]:
    """[first, end) of the pieces of `length` entries, the last of which has those of all `rows`."""
    most = max(most // block_size, 1) * block_size
    # The last piece begins where a block does, and has the rows' own entries.
    last = max(length - max(rows, most), 0)
    last = min(-(-last // block_size), (length - rows) // block_size) * block_size
    return [(begin, min(begin + most, last)) for begin in range(0, last, most)] + [(last, length)]


def undone_together(max_model_len: int, max_rows: int) -> int:
    """The most entries of several requests that are undone at once; those of a step's rows fit.

    No more than one request may have by itself, or a step: short contexts take little scratch.
    """
    return min(max(SLICE, max_rows), max(max_model_len, max_rows))


def is_cut(length: int) -> bool:
    """Whether a context of so many entries may have several pieces, whatever a step has rows."""
    return length > SLICE


def scratch_entries(max_model_len: int, max_rows: int, block_size: int) -> int:
    """The most entries that are undone at once, for requests and steps of such sizes."""
    return min(max(SLICE, max_rows) + block_size, max(max_model_len, max_rows))
