"""LongBench's own metrics (arXiv 2308.14508): one answer against one reference, 0 to 1.

They compute what the benchmark's script computes, its oddities included, so that figures compare.
"""

import importlib
import importlib.util
import logging
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

from vllm_kvx.errors import ToolError

# (answer, reference, the data set's classes) -> 0 to 1.
Metric = Callable[[str, str, Sequence[str]], float]

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = frozenset(string.punctuation)
_ALL_PUNCTUATION = _PUNCTUATION | frozenset(_CHINESE_PUNCTUATION)


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 over words, without case, punctuation and articles."""
    return _f1(_english_words(answer), _english_words(reference))


def f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 over jieba's words, without punctuation."""
    return _f1(_chinese_words(answer), _chinese_words(reference))


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    same = sum((Counter(answer) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(answer), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def _english_words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _chinese_words(text: str) -> list[str]:
    words = (
        "".join("".join(c for c in word.lower() if c not in _ALL_PUNCTUATION).split())
        for word in _library("jieba").cut(text, cut_all=False)
    )
    return [word for word in words if word]


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The F measure of ROUGE-L over words, in [0, 1]."""
    try:
        return float(_library("rouge").Rouge().get_scores([answer], [reference])[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0  # The answer has no words, or more than the library takes.


def rouge_l_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The F measure of ROUGE-L over the words that jieba cuts, in [0, 1]."""
    cut = _library("jieba").cut
    return rouge_l(" ".join(cut(answer, cut_all=False)), " ".join(cut(reference, cut_all=False)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n if the reference is one of the n classes that the answer names."""
    named = [name for name in classes if name in answer]
    # As the benchmark does, from the list that is being read: the name after a dropped one stays.
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The share of the answer's numbers that are the reference."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count`, where the reference is `Paragraph 12` or `段落12`."""
    number = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    return count(answer, number[1]) if number else 0.0


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """How alike the first line of code and the reference are, in whole percent.

    It is fuzzywuzzy's ratio as computed without python-Levenshtein.
    """
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    line = next(code, "")
    if not line or not reference:
        return float(line == reference)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


# What a metric needs beside the standard library.
NEEDS: dict[Metric, tuple[str, ...]] = {
    f1_zh: ("jieba",),
    rouge_l: ("rouge",),
    rouge_l_zh: ("jieba", "rouge"),
}


def check_installed(metric: Metric) -> None:
    """Raise ToolError if a library that the metric needs is missing."""
    missing = [name for name in NEEDS.get(metric, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise ToolError(
            f"LongBench's metric needs {' and '.join(missing)}: pip install 'vllm-kvx[eval]'"
        )


def _library(name: str) -> Any:
    with warnings.catch_warnings():
        # jieba's code is older than some of Python's warnings.
        warnings.simplefilter("ignore")
        library = importlib.import_module(name)
    if name == "jieba":
        library.setLogLevel(logging.WARNING)  # It says when it has read its dictionary.
    return library
