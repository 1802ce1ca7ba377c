"""THE conversion between token positions and stored slots; scheduler and worker both call it.

Logical length is vLLM's and counts every token. In one KV stage of one request a policy may leave
a gap: prompt positions that hold no KV. Everything else is stored in order, so two numbers describe
the stage. The gap may change once, when the prompt is in: then entries chosen by score appear
or go, and only their count is known here. Where retention waits for generated tokens and others
are chosen to go on it changes twice. Positions and lengths are in tokens; positions count
from 0.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_kvx.policy.axes import NO_GAP, Gap, Retrieve
from vllm_kvx.policy.policy import KVPolicy

__all__ = ["NO_GAP", "STASH_PAGE", "Gap", "IntArray", "Storage", "storage_of", "stored_lens"]

IntArray = npt.NDArray[np.integer]

# Tokens of a stash page; a prompt takes whole pages.
STASH_PAGE = 64


@dataclass(frozen=True)
class Storage:
    """What one stage stores of one request, before and after its prompt is in.

    settles_at: N, the prompt's tokens; and with them those generated ones that retention waits for.
    prefill: the gap until the last of these is computed.
    rows: entries at the end of the step that computes it, before retention, with those that are
        drafted in it; the most ever held of them.
    decode: the gap from then on. Positions below it have no slot of their own any more if it
        differs from `prefill`: the entries that stayed are the first `kept` ones.
    chosen_at: the prompt's tokens, where some of them are chosen to go on before retention has what
        it waits for: `prefill` is the gap until then, `waiting` the one from there to `settles_at`.
        None where one step does both, or neither is done.
    turn: where it is not the end of the prompt, the position from which on `decode` is in force.
        No step may cross it. Entries from there on take the slots of those before it.
    """

    settles_at: int
    prefill: Gap = NO_GAP
    rows: int = 0
    decode: Gap = NO_GAP
    turn: int | None = None
    chosen_at: int | None = None
    waiting: Gap = NO_GAP

    @property
    def kept(self) -> int:
        """Entries of these tokens that stay."""
        return self.settles_at - self.decode.size

    @property
    def changes(self) -> bool:
        """True if entries appear or go with the last of them: then no step may cross it."""
        return self.prefill != self.decode or self.compacts

    @property
    def compacts(self) -> bool:
        """True if entries go with the last of them."""
        return self.kept < self.rows

    @property
    def until_chosen(self) -> "Storage":
        """What is stored up to the step that chooses tokens, which drops nothing."""
        assert self.chosen_at is not None
        rows = self.chosen_at - self.waiting.size
        return Storage(self.chosen_at, self.prefill, rows, self.waiting)

    @property
    def once_chosen(self) -> "Storage":
        """What is stored from then on, until retention has run."""
        return Storage(self.settles_at, self.waiting, self.rows, self.decode)

    def stored_len(self, logical_len: int) -> int:
        """Entries once `logical_len` tokens are computed and retention has run."""
        if self.chosen_at is not None and self.chosen_at <= logical_len < self.settles_at:
            return self.waiting.stored_len(logical_len)
        is_before = logical_len < self.settles_at if self.turn is None else logical_len <= self.turn
        return (self.prefill if is_before else self.decode).stored_len(logical_len)

    def peak_len(self, logical_len: int) -> int:
        """The most entries held on the way to `logical_len`."""
        stored = self.stored_len(logical_len)
        if self.turn is not None:
            return max(stored, self.prefill.stored_len(min(logical_len, self.turn)))
        return stored if logical_len < self.settles_at else max(stored, self.rows)


def storage_of(
    policy: KVPolicy,
    prompt_len: int,
    layer: int,
    block_size: int,
    num_layers: int,
    slides: bool = False,
) -> Storage:
    """What `policy` stores in the stage that begins at `layer` of a model of `num_layers`.

    slides: whether the stage's layers slide over a window.

    A gap by position stays as it is, and retention leaves it alone. Layers that chosen tokens run,
    if they are known, store those: above the choice all at once when the prompt is in; where the
    tokens run again, in the place of all. Retention keeps some of what a layer computed: entries,
    or whole blocks of `block_size`; and all of the generated tokens that it waits for. Of those
    that it drafts nothing stays.
    """
    if slides:
        return _of_windows(policy, prompt_len, layer)
    gap = gap_of(policy, prompt_len, layer)
    if gap.size or gap.grows:
        return Storage(prompt_len, gap, prompt_len - gap.size, gap)
    rows = peak = prompt_len
    selection = policy.selection(prompt_len, num_layers)
    # Where the layer is found online any may compute every token.
    if selection is not None and selection.online is None and layer >= selection.resumes_at:
        rows = selection.count
        if layer > selection.after:
            gap, peak = Gap(0, prompt_len), rows
    kept = rows
    if policy.retain is not None:
        kept = policy.retain.kept(prompt_len, rows, layer, block_size, num_layers)
    more = policy.num_generated
    peak += policy.num_drafted(prompt_len)
    decode = NO_GAP if kept == prompt_len else Gap(kept, prompt_len - kept)
    storage = Storage(prompt_len + more, gap, peak + more, decode)
    if not more or selection is None:
        return storage
    waiting = NO_GAP if rows == prompt_len else Gap(rows, prompt_len - rows)
    return replace(storage, chosen_at=prompt_len, waiting=waiting)


def _of_windows(policy: KVPolicy, prompt_len: int, layer: int) -> Storage:
    """`storage_of` layers that slide over a window, but for what is behind it."""
    gap = NO_GAP if policy.propagate is None else policy.propagate.window_gap(prompt_len, layer)
    turn = gap.start + gap.size
    if turn == 0:
        return Storage(prompt_len, NO_GAP, prompt_len, NO_GAP)
    return Storage(prompt_len, gap, prompt_len - turn, Gap(0, turn), turn)


def gap_of(policy: KVPolicy, prompt_len: int, layer: int) -> Gap:
    """The gap that `policy` leaves by position in the stage that begins at `layer`."""
    return NO_GAP if policy.propagate is None else policy.propagate.gap(prompt_len, layer)


def skipped_of(policy: KVPolicy, prompt_len: int, layer: int) -> Gap:
    """The prompt positions that do not run the layers from `layer` on, as far as position decides.

    They are those of `gap_of`, and those whose entries are projected instead.
    """
    return NO_GAP if policy.propagate is None else policy.propagate.skipped(prompt_len, layer)


def reads_part(retrieve: Retrieve, layer: int, entries: int) -> bool:
    """Whether a decode step may read less than all `entries` that a layer stores."""
    return retrieve.retrieving.retrieves(layer) and entries >= retrieve.floor(0)


def stored_len(
    policy: KVPolicy,
    prompt_len: int,
    logical_len: int,
    layer: int,
    block_size: int,
    num_layers: int,
) -> int:
    """Entries that the stage stores once `logical_len` tokens of the request are computed."""
    storage = storage_of(policy, prompt_len, layer, block_size, num_layers)
    return storage.stored_len(logical_len)


def stored_lens(logical_lens: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """`Gap(start, size).stored_len(logical_len)` elementwise; int arrays (R,) or broadcastable.

    Sizes of gaps that grow are those of the moment.
    """
    return logical_lens - np.minimum(np.maximum(logical_lens - starts, 0), sizes)


def stash_pages(num_tokens: int) -> int:
    """Stash pages that the hidden states of `num_tokens` prompt tokens take."""
    return -(-num_tokens // STASH_PAGE)
