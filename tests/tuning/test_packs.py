"""Examples go to batches once each, and to a file and back."""

import random

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tuning import packs
from vllm_kvx.tuning.packs import Example


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
    for batch in found:
        longest = max(len(examples[index]) for index in batch)
        assert longest * len(batch) <= 1024 or len(batch) == 1


def test_padding_is_little():
    examples = drawn(500)
    found = packs.packs(examples, 4096, seed=0)
    padded = sum(max(len(examples[i]) for i in batch) * len(batch) for batch in found)
    assert padded < 1.1 * sum(map(len, examples))


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
