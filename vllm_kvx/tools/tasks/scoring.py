"""How answers to generated questions are scored."""

import re
from collections.abc import Sequence


def share_found(answer: str, references: Sequence[str]) -> float:
    """The share of the references that stand in the answer, whatever their case.

    This is RULER's `string_match_all`.
    """
    answer = answer.lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def share_of_words(answer: str, reference: str) -> float:
    """The share of the reference's words that the answer has, in the reference's order.

    It is the longest common subsequence of words over the reference's words. Case and punctuation
    do not count, and neither do words of the answer around those of the reference.
    """
    said, asked = _words(answer), _words(reference)
    # common[j]: the longest common subsequence of the words read so far and asked[:j].
    common = [0] * (len(asked) + 1)
    for word in said:
        before = 0
        for j, other in enumerate(asked, start=1):
            above = common[j]
            common[j] = before + 1 if word == other else max(above, common[j - 1])
            before = above
    return common[-1] / len(asked)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
