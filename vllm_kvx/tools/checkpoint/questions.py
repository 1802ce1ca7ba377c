"""What the criterion `answers` asks: generated lookups, whose evidence is known, or own prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PretrainedConfig

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.checkpoint.answers import Question
from vllm_kvx.tools.checkpoint.dense_decoder import sliding_window
from vllm_kvx.tools.checkpoint.prompts import check_lengths
from vllm_kvx.tools.tasks.base import Task
from vllm_kvx.tools.tasks.prompts import EncodedSample, fitted
from vllm_kvx.tools.tasks.table import TASKS

# Tokens of the longest answer that is waited for: a wrong one has no end.
LONGEST_ANSWER = 64
# Of a user's prompt, whose right answer nobody knows.
OWN_ANSWER = 16
# The tasks, in turns. A model that answers none of the first family, such as a base model, is asked
# those of the second, which need no instruction. Long values, such as a UUID, tell layers apart
# that short ones do not: their later tokens are found by decode steps alone.
FAMILIES: dict[str, tuple[str, ...]] = {
    "instructions": ("niah_multikey_1", "niah_single_3", "several_words", "niah_multivalue"),
    "notes": ("notes", "notes_3"),
}


@dataclass(frozen=True)
class Score:
    """How right an answer's tokens are, by the task's own score."""

    task: Task
    prompt: EncodedSample
    tokenizer: Any

    def __call__(self, answer: Sequence[int]) -> float:
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return self.task.score(text, self.prompt.sample)


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The model's tokenizer.

    Raises:
        ToolError: there is none that loads.
    """
    missing = ToolError(
        f"{model} has no tokenizer that loads, so no lookups can be generated: give "
        "prompt_token_ids to --prompts, in a .jsonl file"
    )
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise missing from error
    if not tokenizer("word", verbose=False)["input_ids"]:
        # For some models transformers makes up an empty tokenizer.
        raise missing
    return tokenizer


def lookups(
    family: str, count: int, length: int, tokenizer: Any, config: PretrainedConfig, window: int
) -> list[Question]:
    """`count` lookups of the tasks of `family` in turns, of at most `length` tokens.

    The same for the same model, so that a second run finds the same.

    Raises:
        ToolError: the model takes no prompts that are long enough.
    """
    questions = []
    for score in scores(family, count, length, LONGEST_ANSWER, tokenizer, config):
        prompt, limit = score.prompt, min(score.task.max_tokens, LONGEST_ANSWER)
        questions.append(Question(prompt.token_ids, prompt.evidence, score, limit))
    check_lengths([question.token_ids for question in questions], window, None)
    return questions


def scores(
    family: str,
    count: int,
    length: int,
    longest_answer: int,
    tokenizer: Any,
    config: PretrainedConfig,
) -> list[Score]:
    """The prompts of `lookups`, which leave room for `longest_answer` tokens, with their scores.

    Raises:
        ToolError: the model takes no prompts that are long enough.
    """
    tasks = [TASKS[name] for name in FAMILIES[family]]
    context = getattr(config, "max_position_embeddings", None) or length + longest_answer
    limits = (length, context - longest_answer, sliding_window(config) or length)
    made = []
    for number in range(count):
        task = tasks[number % len(tasks)]
        prompt = fitted(task, f"calibration {number}", min(limits), tokenizer)
        made.append(Score(task, prompt, tokenizer))
    return made


def own(prompts: Sequence[Sequence[int]]) -> list[Question]:
    """A user's prompts, whose answers are whatever the full model says."""
    return [Question(tuple(prompt), limit=OWN_ANSWER) for prompt in prompts]
