"""Prompts that a model writes itself, from the empty turn of the user (Magpie, arXiv 2406.08464).

A chat model that is given its template up to where the user's words would begin goes on with a
question such as those that it was tuned on.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.dialogues import (
    SENTINEL,
    Dialogue,
    assistant,
    encoded,
    rendered,
    special_ids,
    user,
)

# Words of a prompt that is asked for, at least and at most.
SHORTEST, LONGEST = 3, 600
# What templates are made of, in any of the families that are served.
_TEMPLATE = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?s>|\[/?INST\]|<</?SYS>>|</?(start|end)_of_turn>"
    r"|<(bos|eos|pad|unk)>|</?think>"
)
# A text that compresses to less than this share repeats itself; short ones compress badly.
_COMPRESSED, _COMPRESSIBLE = 0.22, 200
# Words of the sequences by which texts are told apart, and the share of a text's sequences that
# others may have.
_SEQUENCE, _SHARED = 4, 0.7


def user_turn_prefix(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to where the user's words begin, its system turn included.

    Raises:
        ToolError: there is no chat template, or it changes the words of the user.
    """
    before, _ = _around_user(tokenizer)
    # Most tokenizers have the space in the first word's token.
    return list(encoded(before.rstrip(" "), tokenizer))


def stop_ids(tokenizer: Any) -> list[int]:
    """Tokens that end a turn: EOS, and what the template puts after the user's and the answer.

    Raises:
        ToolError: there is no chat template, or no token ends the user's turn in it.
    """
    _, after = _around_user(tokenizer)
    end = _first_special(after, tokenizer)
    if end is None:
        raise ToolError(
            f"{tokenizer.name_or_path}: no special token ends the user's turn in its chat "
            "template, so the model cannot write prompts itself: use --lookups 1, or --prompts "
            "with --count 0"
        )
    answered = rendered((user("x"), assistant(SENTINEL)), tokenizer)
    end_of_answer = _first_special(answered.rpartition(SENTINEL)[2], tokenizer)
    return sorted({end, end_of_answer, tokenizer.eos_token_id} - {None})


def _around_user(tokenizer: Any) -> tuple[str, str]:
    """What the template puts before and after the words of the user."""
    text = rendered((user(SENTINEL),), tokenizer)
    if text.count(SENTINEL) != 1:
        raise ToolError(
            f"{tokenizer.name_or_path}: its chat template does not give the user's words once and "
            "unchanged, so the model cannot write prompts itself: use --lookups 1, or --prompts "
            "with --count 0"
        )
    before, _, after = text.partition(SENTINEL)
    return before, after


def _first_special(text: str, tokenizer: Any) -> int | None:
    special = special_ids(tokenizer)
    return next((token for token in encoded(text, tokenizer) if token in special), None)


def _words(text: str) -> list[str]:
    """The words; in Chinese and Japanese, which have no spaces, each character is one."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text)


def usable(text: str) -> bool:
    """Whether the text is a prompt that a user could have written.

    It has between SHORTEST and LONGEST words, nothing of a template, and does not repeat itself.
    """
    words = _words(text)
    if not SHORTEST <= len(words) <= LONGEST or _TEMPLATE.search(text):
        return False
    if "\N{REPLACEMENT CHARACTER}" in text or not re.search(r"[^\W\d_]{2}", text):
        return False
    data = text.encode()
    if len(data) >= _COMPRESSIBLE and len(zlib.compress(data)) < _COMPRESSED * len(data):
        return False
    ((_, most),) = Counter(words).most_common(1)
    return most <= max(3, len(words) // 2)


def distinct(texts: Iterable[str]) -> list[str]:
    """The texts, stripped, without those that say nearly what an earlier one says.

    A text is left out if most of its sequences of words stand in one or more earlier ones.
    """
    kept: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for text in texts:
        words = _words(text.casefold())
        count = max(len(words) - _SEQUENCE + 1, 1)
        sequences = {tuple(words[i : i + _SEQUENCE]) for i in range(count)}
        if len(sequences & seen) <= _SHARED * len(sequences) and text.strip():
            kept.append(text.strip())
            seen |= sequences
    return kept


def dialogues(texts: Iterable[str]) -> list[Dialogue]:
    """What is usable of the texts that a model wrote, each once, for the model to answer."""
    written = (text for text in texts if usable(text))
    return [Dialogue((user(text),), "own") for text in distinct(written)]
