"""RULER's frequent words (arXiv 2404.06654): the three most frequent of a coded text."""

import math
import random
import string
from itertools import count

from vllm_kvx.tools.tasks import filler
from vllm_kvx.tools.tasks.base import Sample, Task
from vllm_kvx.tools.tasks.scoring import share_found

ASKED = 3
LETTERS = 6
ZETA_2 = math.pi**2 / 6
# With fewer words the third is as frequent as the fourth.
LEAST = 100


class FrequentWords(Task):
    """Words of six letters, the k-th of them with a frequency of 1 / (k^2 zeta(2)).

    Wording and score are RULER's, and so is the most frequent word, `...`, which is noise. One unit
    of size is one word. There is no evidence: the answer is spread over the whole text.
    """

    name = "fwe"
    about = "RULER: the three most frequent words of a coded text"
    max_tokens = 50

    def make(self, rng: random.Random, size: int) -> Sample:
        coded = filler.distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=LETTERS)))
        asked = [next(coded) for _ in range(ASKED)]
        words: list[str] = []
        for rank in count(1):
            times = int((LEAST + size) / (rank**2 * ZETA_2))
            if times == 0:
                break
            word = "..." if rank == 1 else asked[rank - 2] if rank < ASKED + 2 else next(coded)
            words += [word] * times
        rng.shuffle(words)
        text = " ".join(words)
        return Sample(
            text="Read the following coded text and track the frequency of each coded word. Find "
            f"the three most frequently appeared coded words. {text}\nQuestion: Do not provide any "
            "explanation. Please ignore the dots '....'. What are the three most frequently "
            "appeared words in the above coded text?",
            references=tuple(asked),
            begins="Answer: According to the coded text above, the three most frequently appeared "
            "words are:",
        )

    def score(self, answer: str, sample: Sample) -> float:
        return share_found(answer, sample.references)
