"""Instructions that a program can check, as IFEval's are (arXiv 2311.07911), with our own texts."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm_kvx.tools.tasks.base import FixedTask, Sample
from vllm_kvx.tools.tasks.short_answers import rows_of


class Instructions(FixedTask):
    """How an answer has to look: its words, lines, case, format. It is right if all of it holds."""

    name = "instructions"
    about = "instructions whose observance a program checks, without a long text"
    is_short = True
    # Longer than any right answer, so that an answer that loops is seen to.
    max_tokens = 256

    def samples(self) -> Sequence[Sample]:
        """The references of a sample are its rules, such as `words 5`."""
        return self._samples

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        return tuple(
            Sample(row["prompt"], tuple(row["rules"])) for row in rows_of("instructions.jsonl")
        )

    def score(self, answer: str, sample: Sample) -> float:
        return float(all(holds(rule, answer) for rule in sample.references))


def holds(rule: str, answer: str) -> bool:
    """Whether an answer keeps a rule: a name of RULES, and after a space what it is about."""
    name, _, what = rule.partition(" ")
    return RULES[name](answer.strip(), what)


def _words(answer: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", answer)


def _lines(answer: str) -> list[str]:
    return [line.strip() for line in answer.splitlines() if line.strip()]


def _has_word(answer: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words.lower())}(?!\w)", answer.lower()) is not None


def _begins(answer: str, words: str) -> bool:
    return answer.lower().startswith(words.lower())


def _ends(answer: str, words: str) -> bool:
    return answer.rstrip(" \n.!?\"'*").lower().endswith(words.lower())


def _sentences(answer: str, count: str) -> bool:
    # A full stop within a number or an abbreviation ends nothing: no space and capital follow.
    ends = re.findall(r"[.!?]+[\"'”’)]*(?=\s+\W*[A-Z0-9]|\s*$)", answer)
    return len(ends) == int(count)


def _paragraphs(answer: str, count: str) -> bool:
    return len([part for part in re.split(r"\n\s*\n", answer) if part.strip()]) == int(count)


def _numbered(answer: str, count: str) -> bool:
    found = [match[1] for line in _lines(answer) if (match := re.match(r"(\d+)\.\s*\S", line))]
    return found == [str(number) for number in range(1, int(count) + 1)]


def _bullets(answer: str, count: str) -> bool:
    return sum(line.startswith("- ") for line in _lines(answer)) == int(count)


def _items(answer: str, count: str) -> bool:
    items = [item.strip(" .") for item in answer.split(",")]
    return len(items) == int(count) and all(items)


def _read_json(answer: str) -> Any:
    """The value that an answer is, in a code fence or not; None for none."""
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", answer, re.DOTALL)
    try:
        return json.loads(fenced[1] if fenced else answer)
    except ValueError:
        return None


def _is_object(answer: str, keys: str) -> bool:
    value = _read_json(answer)
    return isinstance(value, dict) and set(value) == set(keys.split(","))


def _is_array(answer: str, count: str) -> bool:
    value = _read_json(answer)
    return isinstance(value, list) and len(value) == int(count)


def _is_quoted(answer: str, _: str) -> bool:
    return len(answer) > 2 and answer[0] in '"“' and answer[-1] in '"”'


# (answer, what the rule is about) -> whether it holds.
RULES: Mapping[str, Callable[[str, str], bool]] = {
    "words": lambda answer, count: len(_words(answer)) == int(count),
    "least_words": lambda answer, count: len(_words(answer)) >= int(count),
    "most_words": lambda answer, count: len(_words(answer)) <= int(count),
    "only": lambda answer, word: {each.lower() for each in _words(answer)} == {word},
    "upper": lambda answer, _: answer.isupper(),
    "lower": lambda answer, _: answer.islower(),
    "includes": _has_word,
    "excludes": lambda answer, words: not _has_word(answer, words),
    "lacks": lambda answer, sign: sign not in answer,
    "begins": _begins,
    "ends": _ends,
    "sentences": _sentences,
    "paragraphs": _paragraphs,
    "lines": lambda answer, count: len(_lines(answer)) == int(count),
    "bullets": _bullets,
    "numbered": _numbered,
    "items": _items,
    "json": _is_object,
    "json_items": _is_array,
    "quoted": _is_quoted,
}
