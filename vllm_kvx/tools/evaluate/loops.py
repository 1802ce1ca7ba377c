"""Answers that end in a loop: the same few tokens again and again (SPEED, appendix G)."""

import re
from collections.abc import Sequence

# The paper's, Eq. 9 and the text before it.
WINDOW = 256
LONGEST_UNIT, MOST_TRAILING = 20, 8
LEAST_TOKENS, LEAST_REPEATS = 12, 3

# A word or number, a sign, or a character of a script that puts no space between words.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def tokens_of(text: str) -> list[str]:
    """The text's words and signs, whatever the model's own tokens are.

    The paper names a "lightweight regex tokenizer" and not its expression: this one is ours.
    """
    return _TOKEN.findall(text)


def can_loop(text: str) -> bool:
    """Whether an answer has as many tokens as a loop needs."""
    return len(tokens_of(text)) >= LEAST_TOKENS


def has_loop(text: str) -> bool:
    """Whether an answer ends in a loop (Eq. 9).

    Among its last 256 tokens it ends in a unit of 1 to 20 tokens that is repeated at least three
    times over at least 12 tokens. The last repeat may be cut short, and up to 8 other tokens may
    follow. A repeat that is cut short counts among the tokens, and not among the repeats.
    """
    tail = tokens_of(text)[-WINDOW:]
    for trailing in range(min(MOST_TRAILING, len(tail) - LEAST_TOKENS) + 1):
        end = len(tail) - trailing
        for unit in range(1, LONGEST_UNIT + 1):
            span = _span(tail, end, unit)
            if span >= LEAST_TOKENS and span // unit >= LEAST_REPEATS:
                return True
    return False


def _span(tokens: Sequence[str], end: int, unit: int) -> int:
    """Tokens of the longest piece before `end` in which each token is that of `unit` before."""
    begin = end - unit
    while begin > 0 and tokens[begin - 1] == tokens[begin - 1 + unit]:
        begin -= 1
    return end - max(begin, 0)
