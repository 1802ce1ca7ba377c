"""Samples as token ids: chat template applied, fitted to a length, evidence located."""

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks.base import Sample, Task

# A prompt that leaves at most this share of its length unused is not made longer.
UNUSED = 1 / 256
# Units of filler in the second prompt that the search for a length encodes.
PROBE = 64
# Prompts after which the search halves what is left instead of estimating.
ESTIMATES = 6


@dataclass(frozen=True)
class EncodedSample:
    """A sample as the model sees it.

    token_ids: the templated prompt, generation prompt and the answer's beginning included.
    evidence: ascending indices of the tokens that overlap the sample's evidence.
    """

    sample: Sample
    token_ids: tuple[int, ...]
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class _Templated:
    """What the tokenizer reads for a sample.

    shift: where the sample's text begins in it. special: whether the tokenizer adds its own special
    tokens; a chat template has them already.
    """

    text: str
    shift: int
    special: bool


def encode(sample: Sample, tokenizer: Any, chat: bool = True) -> EncodedSample:
    """The prompt of a sample; without a chat template the text as it is, BOS included.

    tokenizer: a fast one of transformers. chat: whether to apply its chat template, if it has one.

    Raises:
        ToolError: the tokenizer does not say where its tokens stand, or its template changes the
            text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ToolError(
            f"{tokenizer.name_or_path}: its tokenizer does not say where tokens stand in a text: "
            "a tokenizer.json in its folder is needed"
        )
    read = _templated(sample, tokenizer, chat)
    encoded = tokenizer(
        read.text, add_special_tokens=read.special, return_offsets_mapping=True, verbose=False
    )
    offsets = encoded["offset_mapping"]
    # Special tokens that are added at the ends have the offsets (0, 0).
    real = [index for index, (begin, end) in enumerate(offsets) if end > begin]
    begins, ends = [offsets[index][0] for index in real], [offsets[index][1] for index in real]
    evidence: set[int] = set()
    for span in sample.evidence:
        first = bisect_right(ends, span.begin + read.shift)
        last = bisect_left(begins, span.end + read.shift)
        evidence.update(real[first:last])
    return EncodedSample(sample, tuple(encoded["input_ids"]), tuple(sorted(evidence)))


def _templated(sample: Sample, tokenizer: Any, chat: bool) -> _Templated:
    chat = chat and bool(tokenizer.chat_template)
    text = sample.text
    if chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    shift = text.find(sample.text)
    if shift < 0:
        # A template may strip what surrounds a message.
        stripped = text.find(sample.text.strip())
        if stripped < 0:
            raise ToolError(f"{tokenizer.name_or_path}: its chat template changes the text it gets")
        shift = stripped - (len(sample.text) - len(sample.text.lstrip()))
    if sample.begins:
        # Where nothing comes between question and answer, a space does.
        follows = text.endswith(sample.text.rstrip()) and not text[-1:].isspace()
        text += " " * follows + sample.begins
    return _Templated(text, shift, special=not chat)


def following(sample: Sample, answer: str, tokenizer: Any) -> tuple[int, ...]:
    """The prompt of a sample's second question, after an answer to the first.

    Raises:
        ToolError: the chat template takes no second turn.
    """
    then = sample.then
    assert then is not None, "only a sample with a second question has a second turn"
    said = f"{sample.begins}{answer}"
    if tokenizer.chat_template:
        turns = (("user", sample.text), ("assistant", said), ("user", then.text))
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes
            name = tokenizer.name_or_path
            raise ToolError(f"{name}: its chat template takes no second turn: {error}") from error
    else:
        text = f"{_templated(sample, tokenizer, chat=False).text}{answer}\n{then.text}"
    if then.begins:
        text += " " * (not text[-1:].isspace()) + then.begins
    special = not tokenizer.chat_template
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return tuple(ids)


def _count(sample: Sample, tokenizer: Any) -> int:
    """Tokens of the sample's prompt."""
    read = _templated(sample, tokenizer, chat=True)
    ids = tokenizer(read.text, add_special_tokens=read.special, verbose=False)["input_ids"]
    return len(ids)


def fitted(task: Task, seed: str, longest: int, tokenizer: Any) -> EncodedSample:
    """A prompt of the task with at most `longest` tokens, and hardly fewer.

    It leaves at most UNUSED of them, or less than what one more unit of filler needs.

    seed: decides the sample; with the same seed longer prompts ask the same.

    Raises:
        ToolError: the shortest prompt of the task is longer.
    """

    def tokens(size: int) -> int:
        return _count(task.make(random.Random(seed), size), tokenizer)

    # The longest size known to fit and the shortest known not to, each with its tokens.
    low, used = 0, tokens(0)
    if used > longest:
        raise ToolError(
            f"{task.name}: its shortest prompt has {used} tokens, more than "
            f"{longest}: use a greater length or leave the task out"
        )
    high: int | None = None
    size, rounds = PROBE, 0
    aim = longest * (1 - UNUSED / 2)
    while used < longest * (1 - UNUSED) and (high is None or high - low > 1):
        now, rounds = tokens(size), rounds + 1
        if high is None and now <= used:
            break  # The task grows no further.
        # Tokens grow about evenly with size: two prompts say how much a unit needs.
        unit = max((now - used) / (size - low), 1e-9)
        if now <= longest:
            low, used = size, now
        else:
            high = size
        size = low + max(round((aim - used) / unit), 1)
        if high is not None:
            size = min(size, high - 1) if rounds < ESTIMATES else (low + high) // 2
    return encode(task.make(random.Random(seed), low), tokenizer)


def shortened(sample: Sample, longest: int, tokenizer: Any, chat: bool = True) -> EncodedSample:
    """The sample's prompt with at most `longest` tokens: a longer text loses its middle.

    As LongBench does, as many tokens are kept of the text's beginning as of its end, before the
    chat template is applied. The sample of the prompt is the one without the middle.

    Raises:
        ToolError: the template alone is longer, or the sample has evidence, which could be lost.
    """
    if sample.evidence:
        raise ToolError("a sample with evidence is fitted to a length, not shortened")
    prompt = encode(sample, tokenizer, chat)
    if len(prompt.token_ids) <= longest:
        return prompt
    offsets = tokenizer(
        sample.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )["offset_mapping"]
    kept = len(offsets) - (len(prompt.token_ids) - longest)
    # What is put together may split into a few more tokens than its halves have.
    while kept >= 2:
        end = kept // 2
        text = sample.text[: offsets[kept - end - 1][1]] + sample.text[offsets[-end][0] :]
        short = Sample(text, sample.references, begins=sample.begins)
        prompt = encode(short, tokenizer, chat)
        if len(prompt.token_ids) <= longest:
            return prompt
        kept -= len(prompt.token_ids) - longest
    raise ToolError(f"no text fits into {longest} tokens: use a greater length")
