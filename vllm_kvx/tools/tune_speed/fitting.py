"""Many dialogues fitted to their lengths, in several processes: each takes some encodings."""

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.dialogues import Dialogue, Templated, templated
from vllm_kvx.tools.tune_speed.lookups import fitted_lookup, long_contexts

# Fewer are fitted sooner than processes start.
_FEW, _MOST_PROCESSES = 200, 16
# Tokens by which a lookup may be longer than wanted, in turn.
_MORE = (0, 128, 512)


class Wanted(NamedTuple):
    """A lookup of at most `longest` tokens, or `behind` with a long text of that length in front.

    seed: decides the document. recite: whether the lookup is a recital, with its answer. turns:
    questions to the text.
    """

    seed: str
    longest: int
    behind: Dialogue | None = None
    recite: bool = False
    turns: int = 1


def fitted(wanted: Sequence[Wanted], tokenizer: Any) -> list[tuple[Dialogue, Templated]]:
    """What is wanted, in order, as text and as tokens, with progress on stderr."""
    workers = min(os.cpu_count() or 1, _MOST_PROCESSES)
    if len(wanted) < _FEW or workers == 1:
        _use(tokenizer)
        return [_fit(each) for each in tqdm(wanted, unit=" prompts", dynamic_ncols=True)]
    # Not forked: an engine may be running, whose threads and device children cannot share.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        # Through its pipe a process takes so much only when it has imported its modules, and the
        # next one starts after that.
        file = Path(folder) / "tokenizer.pickle"
        file.write_bytes(pickle.dumps(tokenizer))
        with ProcessPoolExecutor(workers, context, _load, (file,)) as pool:
            found = pool.map(_fit, wanted, chunksize=8)
            return list(tqdm(found, total=len(wanted), unit=" prompts", dynamic_ncols=True))


_tokenizer: Any = None


def _use(tokenizer: Any) -> None:
    """Keeps the tokenizer in this process."""
    global _tokenizer
    _tokenizer = tokenizer


def _load(file: Path) -> None:
    _use(pickle.loads(file.read_bytes()))


def _fit(wanted: Wanted) -> tuple[Dialogue, Templated]:
    dialogue = _dialogue(wanted)
    return dialogue, templated(dialogue, _tokenizer)


def _dialogue(wanted: Wanted) -> Dialogue:
    if wanted.behind is None:
        return _lookup(wanted)
    try:
        (found,) = long_contexts([wanted.behind], wanted.seed, wanted.longest, _tokenizer)
        return found
    except ToolError:
        # It is too long to have a text of this length in front.
        return wanted.behind


def _lookup(wanted: Wanted) -> Dialogue:
    """A lookup, longer than wanted where a long chat template leaves no room for one."""
    for more in _MORE:
        try:
            return fitted_lookup(
                wanted.seed, wanted.longest + more, _tokenizer, wanted.recite, wanted.turns
            )
        except ToolError as error:
            failure = error
    raise failure
