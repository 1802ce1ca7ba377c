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


def test_mixed_batches_have_every_example_once_and_parts_that_fit():
    examples = [*drawn(300), Example((1,) * 3000, (2,), "file")]
    found = packs.mixed(examples, 1024, seed=3)
    assert sorted(i for batch in found for part in batch for i in part) == list(range(301))
    for batch in found:
        for part in batch:
            longest = max(len(examples[index]) for index in part)
            assert longest * len(part) <= 1024 or len(part) == 1
    # About as many tokens each, but for the example that is longer than a batch.
    sizes = sorted(sum(len(examples[i]) for part in batch for i in part) for batch in found)
    assert sizes[-1] >= 3000 and all(1024 / 2 < size < 1024 * 2 for size in sizes[:-3])


def test_batches_have_short_and_long_examples():
    """As many of each as there are, so that steps do not depend on the lengths."""
    rng = random.Random(0)
    examples = [Example((1,) * rng.choice((10, 1000)), (2,), "own") for _ in range(2000)]
    shares = []
    for batch in packs.mixed(examples, 40_000, seed=0):
        lengths = [len(examples[i]) for part in batch for i in part]
        shares.append(lengths.count(10) / len(lengths))
    assert len(shares) > 20 and all(0.3 < share < 0.7 for share in shares)


def test_parts_cost_the_least(monkeypatch):
    monkeypatch.setattr(packs, "PART", 50)
    for seed in range(20):
        examples = drawn(9, seed)
        (batch,) = packs.mixed(examples, 10**6, seed)
        lengths = sorted(map(len, examples))

        def cost(parts):
            return sum(50 + max(part) * len(part) for part in parts)

        def splits(rest):
            for first in range(1, len(rest) + 1):
                for others in splits(rest[first:]) if first < len(rest) else [[]]:
                    yield [rest[:first], *others]

        mine = cost([[len(examples[i]) for i in part] for part in batch])
        assert mine == min(map(cost, splits(lengths)))


def test_many_short_examples_are_quickly_put_together():
    """Examples of one length are parted where they have to be alone."""
    examples = [Example((1,) * (10 + number % 5), (2,), "own") for number in range(20_000)]
    found = packs.mixed(examples, 65_536, seed=0)
    assert len(found) == 4
    assert all(len(part) > 1000 for batch in found for part in batch)
