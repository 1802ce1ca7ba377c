"""Perplexity of held-out text under a policy's cache: what follows a long prompt, token by token.

The prompt comes in under the policy; the text that follows it is forced in decode, as if the model
had answered with it, and its logprobs are those of the decode path. So they see what the policy
kept and reads. Prompt logprobs would not: they are made before anything is dropped.
"""

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError

CONTINUATION_TOKENS = 128
_TEXT = Path(__file__).parents[1] / "tasks" / "data" / "prose.txt.xz"


@dataclass(frozen=True)
class Passage:
    """Tokens of a text, and those that follow."""

    token_ids: tuple[int, ...]
    continuation: tuple[int, ...]


def passages(source: str | None, tokenizer: Any, length: int, count: int) -> list[Passage]:
    """`count` passages, spread over a text; each has `length` tokens with what follows.

    source: a text file; None for the built-in text, which is public domain prose and known to
    most models: compare its figures with `full`, and with nothing else.

    Raises:
        ToolError: the file cannot be read, or is too short.
    """
    text = _read(source)
    tokens: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer("", verbose=False)["input_ids"][:1]
    wanted = length - len(first)
    if len(tokens) < wanted or wanted <= CONTINUATION_TOKENS:
        raise ToolError(
            f"perplexity at {length} tokens: {source or 'the built-in text'} has {len(tokens)} "
            f"tokens, and more than {CONTINUATION_TOKENS} are needed: give a longer text with "
            "--text FILE, or another length"
        )
    found = []
    for index in range(count):
        # Spread by the golden ratio, so that more passages leave the first where they were.
        begin = int((index * 0.6180339887 % 1) * (len(tokens) - wanted + 1))
        piece = (*first, *tokens[begin : begin + wanted])
        found.append(Passage(piece[:-CONTINUATION_TOKENS], piece[-CONTINUATION_TOKENS:]))
    return found


def _read(source: str | None) -> str:
    if source is None:
        return lzma.decompress(_TEXT.read_bytes()).decode().replace("\n", " ")
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ToolError(f"cannot read {source}: {reason}") from error
