"""The batches by which it is found out whether training fits are as large as training's."""

import pytest
import torch

from benchmarks.tuning.step_times import job
from vllm_kvx.tools.tune_speed import trial


@pytest.mark.parametrize(("longest", "answer"), [(8192, 256), (8192, 8192), (32768, 32768)])
@pytest.mark.parametrize("turns", [1, 8])
def test_they_have_nearly_as_many_tokens(longest: int, answer: int, turns: int) -> None:
    sizes = {"batch_tokens": 32768, "max_length": longest, "answer_tokens": answer, "turns": turns}
    tried = list(trial.largest(job("MODEL", "cpu", **sizes), torch.device("cpu")))
    assert len(tried) == (2 if turns == 1 else 3)
    for batch in tried:
        assert 0.96 * 32768 <= len(batch.tokens) <= 32768
    # Of the second nearly all rows run in the upper layers, and the third has turns of its own.
    assert tried[1].answers.sum() > 0.9 * len(tried[1].tokens)
    if turns > 1:
        assert len(tried[2].answers) == turns * len(tried[2].lengths)
