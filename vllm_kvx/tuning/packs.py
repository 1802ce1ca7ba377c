"""Answered prompts, put together to batches of about one size."""

import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_kvx.errors import ToolError

# What a part of a batch costs besides its padded tokens, in tokens: its kernels are launched one
# by one, however little they do. It decides about speed alone.
PART = 4096


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
    """Indices of examples by batch, of at most `tokens` padded tokens, or one example.

    Examples of about one length share a batch, in which padding is little. The order of batches is
    left to the sampler.
    """
    order = list(range(len(examples)))
    # Among examples of one length, those of a batch are not neighbours in the file.
    random.Random(seed).shuffle(order)
    order.sort(key=lambda index: len(examples[index]))
    found: list[list[int]] = []
    for index in order:
        # The one that is added last is the longest.
        if found and len(examples[index]) * (len(found[-1]) + 1) <= tokens:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def mixed(examples: Sequence[Example], tokens: int, seed: int) -> list[list[list[int]]]:
    """Indices of examples by batch of about `tokens`, and in a batch by part.

    A batch has examples of any length, as they come, so that every step moves the weights for long
    prompts and short ones. Parts are run one after the other: at most `tokens` padded tokens each,
    or one example.
    """
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    total = sum(map(len, examples))
    count, before = max(round(total / tokens), 1), 0
    batches: list[list[int]] = [[] for _ in range(count)]
    for index in order:
        batches[before * count // total].append(index)
        before += len(examples[index])
    # An example may be longer than a batch.
    return [_parts(examples, batch, tokens) for batch in batches if batch]


def _parts(examples: Sequence[Example], batch: Sequence[int], tokens: int) -> list[list[int]]:
    """The batch in parts of about one length, so that they take the least time together."""
    order = sorted(batch, key=lambda index: len(examples[index]))
    lengths = [len(examples[index]) for index in order]
    changes = [i for i, length in enumerate(lengths) if i == 0 or length != lengths[i - 1]]
    # By examples so far: the least cost, and where the last part begins.
    best = [(0, 0)]
    for end in range(1, len(order) + 1):
        longest = lengths[end - 1]
        first = max(end - max(tokens // longest, 1), 0)
        # To part examples of one length only costs, unless they do not fit.
        begins = {first, *changes[bisect_left(changes, first) : bisect_left(changes, end)]}
        costs = ((best[begin][0] + longest * (end - begin) + PART, begin) for begin in begins)
        best.append(min(costs))
    parts, end = [], len(order)
    while end:
        begin = best[end][1]
        parts.append(order[begin:end])
        end = begin
    return parts[::-1]


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
