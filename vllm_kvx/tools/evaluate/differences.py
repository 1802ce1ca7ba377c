"""Which policies differ: paired comparisons of two rows over the prompts that both answered."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from vllm_kvx.tools.evaluate.intervals import LEAST_DIFFERENT, Interval, of_difference
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary


@dataclass(frozen=True)
class Difference:
    """Two rows over the scored prompts that both answered.

    better, worse: by their mean scores; as they were asked for, where these are equal.
    count: how many prompts. differ: about how many of their texts the scores differ.
    by: the mean of `better`'s score less `worse`'s, with the interval of a paired bootstrap.
    """

    better: Row
    worse: Row
    count: int
    differ: int
    by: Interval

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves 0 out, and enough texts differ for any test to say so."""
        return self.by.low > 0 and self.differ >= LEAST_DIFFERENT


def differences(summary: Summary) -> Iterator[Difference]:
    """Every pair of rows, the yardstick among them; none of rows without a prompt in common.

    Each interval is of its pair alone: among many pairs one of twenty may err.
    """
    scores = {
        row: {
            question: answer.score
            for question, answer in summary.answers(row).items()
            if question.task != PERPLEXITY
        }
        for row in summary.rows
    }
    for first, second in combinations(summary.rows, 2):
        both = [question for question in scores[first] if question in scores[second]]
        pairs = [(scores[first][question], scores[second][question]) for question in both]
        if not pairs:
            continue
        better, worse = first, second
        if sum(a for a, _ in pairs) < sum(b for _, b in pairs):
            better, worse = second, first
            pairs = [(b, a) for a, b in pairs]
        texts = [question.text for question in both]
        differ = len({text for text, (a, b) in zip(texts, pairs, strict=True) if a != b})
        yield Difference(better, worse, len(pairs), differ, of_difference(pairs, texts))
