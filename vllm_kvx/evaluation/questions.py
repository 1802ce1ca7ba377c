"""The questions of a run: every task's samples as prompts, at every length."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from os import cpu_count
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.evaluation.engine import Asked
from vllm_kvx.evaluation.perplexity import passages
from vllm_kvx.evaluation.prompts import fitted
from vllm_kvx.evaluation.summary import PERPLEXITY
from vllm_kvx.evaluation.tasks.base import Sample, Task
from vllm_kvx.evaluation.tasks.table import TASKS

# Tasks, lengths and samples below this are made without starting processes.
_FEW = 32

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Posed:
    """A prompt and how its answer is judged.

    sample: None for perplexity, whose answer is forced.
    """

    asked: Asked
    task: Task | None = None
    sample: Sample | None = None

    def score(self, text: str, nats: float) -> float:
        """Of an answer: the share that is right, or its nats a token."""
        if self.task is None or self.sample is None:
            return nats
        return self.task.score(text, self.sample)


def check_lengths(tasks: Sequence[str], lengths: Sequence[int], context: int) -> None:
    """Raise ToolError for a length at which a task's prompt and answer outrun the context."""
    for length in lengths:
        for name in tasks:
            answer = TASKS[name].max_tokens if name in TASKS else 0
            if length + answer > context:
                raise ToolError(
                    f"length {length}: with {answer} tokens of an answer to {name} that is more "
                    f"than the model's context of {context}: use --lengths up to "
                    f"{context - answer}"
                )


def pose(
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    tokenizer_of: Callable[[], Any],
    text: str | None,
    progress: Callable[[int], None],
) -> dict[Key, Posed]:
    """The prompts by task, length and index.

    tokenizer_of: loads the tokenizer; called once in each process that makes prompts, so it can be
    pickled. text: perplexity's file. progress: called with how many more are made.

    Raises:
        ToolError: a prompt of a task cannot be made as short as that.
    """
    wanted = [
        (task, length, index)
        for length in lengths
        for task in tasks
        if task in TASKS
        for index in range(samples)
    ]
    posed: dict[Key, Posed] = {}
    workers = min(cpu_count() or 1, len(wanted) // _FEW)
    if workers > 1:
        with ProcessPoolExecutor(
            workers, get_context("spawn"), _load, (tokenizer_of, seed)
        ) as pool:
            for key, made in zip(wanted, pool.map(_pose, wanted, chunksize=4), strict=True):
                posed[key] = made
                progress(1)
    else:
        _load(tokenizer_of, seed)
        for key in wanted:
            posed[key] = _pose(key)
            progress(1)
    if PERPLEXITY in tasks:
        tokenizer = tokenizer_of()
        for length in lengths:
            for index, passage in enumerate(passages(text, tokenizer, length, samples)):
                asked = Asked(passage.token_ids, 0, passage.continuation)
                posed[PERPLEXITY, length, index] = Posed(asked)
                progress(1)
    return posed


_LOADED: dict[str, Any] = {}


def _load(tokenizer_of: Callable[[], Any], seed: int) -> None:
    _LOADED.update(tokenizer=tokenizer_of(), seed=seed)


def _pose(key: Key) -> Posed:
    name, length, index = key
    task = TASKS[name]
    # Without the length: a longer prompt asks the same.
    prompt = fitted(task, f"{_LOADED['seed']}-{name}-{index}", length, _LOADED["tokenizer"])
    return Posed(Asked(prompt.token_ids, task.max_tokens), task, prompt.sample)


@lru_cache(maxsize=4)
def load_tokenizer(model: str, revision: str | None) -> Any:
    """A model's tokenizer, a fast one.

    Raises:
        ToolError: there is none that loads.
    """
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise ToolError(f"{model} has no tokenizer that loads: {error}") from error
    if not tokenizer.is_fast:
        raise ToolError(f"{model} has no fast tokenizer, by which evidence is located")
    return tokenizer


def expand(names: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Task names, groups replaced by their members, each once.

    Raises:
        ToolError: a name that is neither.
    """
    found: list[str] = []
    for name in names:
        if name in groups:
            found += groups[name]
        elif name in TASKS or name == PERPLEXITY or name.startswith("longbench"):
            found.append(name)
        else:
            known = [*groups, *TASKS, PERPLEXITY, "longbench-<task>"]
            raise ToolError(f"there is no task {name!r}; tasks and groups: {', '.join(known)}")
    return list(dict.fromkeys(found))
