"""Examples go to batches once each, and to a file and back."""

import random

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed import packs
from vllm_kvx.tools.tune_speed.packs import Example


def drawn(count, seed=0):
    rng = random.Random(seed)
    return [
        Example(tuple(range(rng.randrange(1, 300))), tuple(range(rng.randrange(1, 40))), "own")
        for _ in range(count)
    ]


def test_every_example_is_in_one_batch_and_no_batch_is_too_large():
    examples = [*drawn(200), Example((1,) * 2000, (2,), "file")]
    found = packs.packs(examples, 1024, seed=3)
    assert sorted(index for batch in found for index in batch) == list(range(201))
    sizes = [sum(len(examples[index]) for index in batch) for batch in found]
    assert all(size <= 1024 or batch == [200] for size, batch in zip(sizes, found, strict=True))
    # A batch ends where the next example has no room.
    for size, following in zip(sizes, found[1:], strict=False):
        assert size + len(examples[following[0]]) > 1024


def test_the_same_seed_gives_the_same_batches():
    examples = drawn(100)
    assert packs.packs(examples, 512, seed=1) == packs.packs(examples, 512, seed=1)
    assert packs.packs(examples, 512, seed=1) != packs.packs(examples, 512, seed=2)


def test_examples_survive_their_file(tmp_path):
    examples = drawn(5)
    packs.write(tmp_path / "examples.jsonl", examples)
    assert packs.read(tmp_path / "examples.jsonl") == examples


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": [1], "answer": [2]}\n')
    with pytest.raises(ToolError, match=r"examples\.jsonl.*delete it"):
        packs.read(path)


def test_batches_have_short_and_long_examples():
    """As many of each as there are, so that steps do not depend on the lengths."""
    rng = random.Random(0)
    examples = [Example((1,) * rng.choice((10, 1000)), (2,), "own") for _ in range(2000)]
    shares = []
    for batch in packs.packs(examples, 40_000, seed=0)[:-1]:
        lengths = [len(examples[i]) for i in batch]
        shares.append(lengths.count(10) / len(lengths))
    assert len(shares) > 20 and all(0.3 < share < 0.7 for share in shares)
