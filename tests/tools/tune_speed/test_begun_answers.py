"""Some examples have a part of their answer in the prompt."""

import random

from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.teacher import BEGUN, SHORTEST_BEGUN, begun


def test_the_tokens_stay_and_the_border_moves():
    rng, moved = random.Random(0), 0
    for number in range(2000):
        length = 1 + number % 40
        example = Example((1, 2, 3), tuple(range(10, 10 + length)), "own")
        found = begun(example, rng)
        assert found.prompt + found.answer == example.prompt + example.answer
        assert found.kind == "own"
        if found != example:
            moved += 1
            assert length >= SHORTEST_BEGUN
            assert len(found.prompt) > 3 and len(found.answer) >= length / 2
    possible = sum(1 + number % 40 >= SHORTEST_BEGUN for number in range(2000))
    assert abs(moved / possible - BEGUN) < 0.05


def test_short_answers_stay_whole():
    example = Example((1,), (2,) * (SHORTEST_BEGUN - 1), "table")
    assert all(begun(example, random.Random(seed)) == example for seed in range(200))
