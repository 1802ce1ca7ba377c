"""Prompts for the demo checkpoint: a document of public-domain text with notes scattered in it.

A note is a line `- zebra coffee.`, the question at the end is `Question: zebra`, and the answer
` coffee.` followed by the end-of-sequence token. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm_kvx.tools.tasks import filler

QUESTION = "Question:"
MAX_NOTES = 128


# Keys and values: one vocabulary, each a single token, none in the text.
words = filler.nouns
sentences = filler.prose


def make_prompt(seed: int, length_tokens: int, tokenizer: Any, values: int = 1) -> tuple[str, str]:
    """A prompt of exactly `length_tokens` tokens (BOS included) and the text that answers it.

    The document holds `length_tokens // 32` notes (2 to 128) of `values` words (1 to 3) each; one
    of them, at a random depth, is asked for. `tokenizer` is the checkpoint's, as transformers loads
    it: any object with `encode(text, add_special_tokens=...)` that returns ids.
    """
    rng = random.Random(seed)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    notes = max(2, min(length_tokens // 32, MAX_NOTES))
    names = rng.sample(words(), notes * (1 + values))
    pairs = [
        (names[i], " ".join(names[i + 1 : i + 1 + values]))
        for i in range(0, len(names), 1 + values)
    ]
    lines = [f"- {key} {value}.\n" for key, value in pairs]
    key, value = rng.choice(pairs)
    question = f"{QUESTION} {key}"

    space = length_tokens - 1 - count("".join(lines) + question)
    if space < 0:
        raise ValueError(f"length_tokens={length_tokens} is too short for {notes} notes")
    text = sentences()
    start = rng.randrange(len(text))
    filler: list[str] = []
    for i in range(len(text)):
        line = text[(start + i) % len(text)] + "\n"
        size = count(line)
        # What is left must be nothing, or enough for a shortened sentence.
        if size != space and size > space - 8:
            break
        filler.append(line)
        space -= size
        if space == 0:
            break
    if space:
        filler.append(_shortened(space, start, count))

    # Notes go between sentences, the order of both kept.
    places = sorted(rng.randrange(len(filler) + 1) for _ in lines)
    document: list[str] = []
    for i, line in enumerate([*filler, ""]):
        while places and places[0] <= i:
            places.pop(0)
            document.append(lines.pop(0))
        document.append(line)
    prompt = "".join(document) + question
    if len(tokenizer.encode(prompt)) != length_tokens:
        raise RuntimeError("the tokenizer does not split this text line by line")
    return prompt, f" {value}."


def _shortened(size: int, start: int, count: Callable[[str], int]) -> str:
    """A line of exactly `size` tokens: the first words of a sentence at or after `start`."""
    text = sentences()
    for i in range(len(text)):
        parts = text[(start + i) % len(text)].split()
        for n in range(1, len(parts) + 1):
            line = " ".join(parts[:n]).rstrip(".,;:!?") + ".\n"
            if (tokens := count(line)) >= size:
                if tokens == size:
                    return line
                break
    return "\n" * size
