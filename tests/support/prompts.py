"""Prompts: random ones for tiny models, questions for the trained checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

VOCAB = 512  # Of every tiny model. Tokens below 3 are special.
# Prompt lengths around block and chunk edges.
EDGES = (2, 3, 31, 32, 33, 63, 64, 65, 95, 96, 97, 128, 129, 191, 193)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    (prompt,) = prompts_of((length,), seed)
    return prompt


def distinct_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts in which no token comes twice: in layer 0 a token's keys have one norm."""
    generator = torch.Generator().manual_seed(seed)
    return [(3 + torch.randperm(VOCAB - 3, generator=generator)[:n]).tolist() for n in lengths]


def lookups(
    count: int, values: int = 1
) -> tuple[list[list[int]], list[str], Callable[[list[int]], str]]:
    """Prompts of the checkpoint's task, what it should answer, and how to read its tokens.

    values: words of an answer; those after the first one are found by decode steps.
    """
    from transformers import AutoTokenizer

    from benchmarks.checkpoint.prompts import make_prompt
    from support.models import LOOKUP

    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    questions = [make_prompt(seed, 1024, tokenizer, values) for seed in range(count)]
    prompts = [tokenizer(question).input_ids for question, _ in questions]
    return prompts, [answer for _, answer in questions], tokenizer.decode


def shares_again(
    engine: Any,
    policies: Sequence[str],
    prompts: list[list[int]],
    expected: list[str],
    decode: Callable[[list[int]], str],
) -> tuple[dict[str, float], int]:
    """Asks `lookups` under each policy, and again after a prefix hit.

    Returns: the share that is right by policy and turn, and how many tokens were in the cache.
    """
    score, cached = dict[str, float](), 0
    for name in policies:
        # Backwards, since the pool holds the last ones alone.
        for turn, step in (("", 1), (" again", -1)):
            each = [name] * len(prompts)
            answers = engine.generate(prompts[::step], max_tokens=4, policies=each)
            wanted = expected[::step]
            right = [decode(a.tokens) == e for a, e in zip(answers, wanted, strict=True)]
            score[name + turn] = sum(right) / len(right)
            cached += sum(answer.cached for answer in answers)
    return score, cached
