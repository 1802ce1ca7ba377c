"""Samples as token ids: chat template applied, fitted to a length, evidence located."""

import random
from dataclasses import dataclass
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.evaluation.tasks.base import Sample, Task


@dataclass(frozen=True)
class Prompt:
    """A sample as the model sees it.

    token_ids: the templated prompt, generation prompt and the answer's beginning included.
    evidence: ascending indices of the tokens that overlap the sample's evidence.
    """

    sample: Sample
    token_ids: tuple[int, ...]
    evidence: tuple[int, ...]


def encode(sample: Sample, tokenizer: Any) -> Prompt:
    """The prompt of a sample; without a chat template the text as it is, BOS included.

    tokenizer: a fast one of transformers.
    """
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": sample.text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text, special = text + sample.begins, False
    else:
        text, special = sample.text + sample.begins, True
    encoded = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
    )
    shift = text.find(sample.text)
    if shift < 0:
        # A template may strip what surrounds a message.
        shift = text.find(sample.text.strip()) - (len(sample.text) - len(sample.text.lstrip()))
    spans = [(span.begin + shift, span.end + shift) for span in sample.evidence]
    evidence = [
        index
        for index, (begin, end) in enumerate(encoded["offset_mapping"])
        if any(begin < last and end > first for first, last in spans)
    ]
    return Prompt(sample, tuple(encoded["input_ids"]), tuple(evidence))


def fitted(task: Task, seed: str, longest: int, tokenizer: Any) -> Prompt:
    """The longest prompt of the task with at most `longest` tokens.

    seed: decides the sample; with the same seed longer prompts ask the same.

    Raises:
        ToolError: the shortest prompt of the task is longer.
    """

    def at(size: int) -> Prompt:
        return encode(task.make(random.Random(seed), size), tokenizer)

    best = at(0)
    if len(best.token_ids) > longest:
        raise ToolError(
            f"{task.name}: its shortest prompt has {len(best.token_ids)} tokens, more than "
            f"{longest}: use a greater length or leave the task out"
        )
    # Tokens grow about evenly with size, so a secant search needs few encodings.
    low, high, step = 0, None, 16
    while high is None or high - low > 1:
        size = low + step if high is None else (low + high) // 2
        prompt = at(size)
        if len(prompt.token_ids) <= longest:
            if high is None and len(prompt.token_ids) == len(best.token_ids) and size > 64:
                break  # The task grows no further.
            room, used = longest - len(prompt.token_ids), len(prompt.token_ids)
            low, best = size, prompt
            step = max(room * size // max(used, 1), 1)
        else:
            high = size
    return best
