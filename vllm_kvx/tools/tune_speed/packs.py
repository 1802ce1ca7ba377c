"""Answered prompts, put together to batches of about one size."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_kvx.errors import ToolError


@dataclass(frozen=True)
class Example:
    """A prompt with the answer to learn from, as token ids.

    kind: where the prompt is from: the name of a generator, `own` or `file`.
    earlier: answers that stand in the prompt and are learnt from, too: the first token of each and
        how many it has, in order. What is before it is its prompt.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    kind: str
    earlier: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        """Tokens that the model runs: the answer's last one predicts nothing."""
        return len(self.prompt) + len(self.answer) - 1

    def spans(self) -> tuple[tuple[int, int], ...]:
        """First token and number of tokens of every answer that is learnt from, in order."""
        return (*self.earlier, (len(self.prompt), len(self.answer)))

    def learnt(self) -> list[int]:
        """The tokens of these answers."""
        tokens = (*self.prompt, *self.answer)
        return [token for first, count in self.spans() for token in tokens[first : first + count]]


def packs(examples: Sequence[Example], tokens: int, seed: int) -> list[list[int]]:
    """Indices of examples by batch, of at most `tokens` tokens, or one example.

    A batch has examples of any length, as they come, so that every step moves the weights for long
    prompts and short ones.
    """
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    found: list[list[int]] = []
    room = 0
    for index in order:
        if not found or len(examples[index]) > room:
            found.append([])
            room = tokens
        found[-1].append(index)
        room -= len(examples[index])
    return found


def write(path: Path, examples: Sequence[Example]) -> None:
    """Stores examples, a line of JSON each."""
    lines = "".join(json.dumps(asdict(example)) + "\n" for example in examples)
    partial = path.with_suffix(".partial")
    partial.write_text(lines, encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> list[Example]:
    """What `write` stored.

    Raises:
        ToolError: the file is not what `write` stored.
    """
    try:
        return list(_examples(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(f"cannot read {path}: {error}; delete it to have it made anew") from error


def _examples(path: Path) -> Iterator[Example]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            # Files of before there were turns have none.
            earlier = tuple((first, tokens) for first, tokens in entry.get("earlier", ()))
            yield Example(tuple(entry["prompt"]), tuple(entry["answer"]), entry["kind"], earlier)
