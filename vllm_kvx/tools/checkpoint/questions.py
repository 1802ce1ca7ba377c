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

# Tokens of the longest answer that is waited for, and how many more than a right one's are: a wrong
# one has no end, and one that is begun in other words than ours is still right.
LONGEST_ANSWER, MORE_WORDS = 128, 24
# Of a user's prompt, whose right answer nobody knows.
OWN_ANSWER = 16
# By family, the tasks that `diagnose --method speed` asks in turns. A model that answers none of
# the first family, such as a base model, is asked those of the second, which need no instruction.
FAMILIES: dict[str, tuple[str, ...]] = {
    "instructions": ("niah_multikey_1", "niah_single_3", "several_words", "niah_multivalue"),
    "notes": ("notes", "notes_3"),
}
# The same of `calibrate`. Where tokens are selected, kinds of prompts are lost that others do not
# show: a text that is nothing but facts (niah_multikey_2 and _3), several facts at once
# (niah_multivalue, niah_multiquery), and answers whose later tokens are found by decode steps alone
# (niah_single_3, several_words, long_phrase).
CALIBRATION: dict[str, tuple[str, ...]] = {
    "instructions": (
        *("niah_multikey_1", "niah_multikey_2", "several_words", "niah_multivalue"),
        *("niah_multikey_3", "niah_multiquery", "long_phrase", "niah_single_3"),
    ),
    "notes": ("notes", "notes_alone", "notes_3"),
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

    @property
    def limit(self) -> int:
        """Tokens of an answer that is waited for: twice those of the asked values, and some."""
        values = " ".join(self.prompt.sample.references)
        needed = len(self.tokenizer(values, add_special_tokens=False, verbose=False)["input_ids"])
        return min(self.task.max_tokens, LONGEST_ANSWER, 2 * needed + MORE_WORDS)


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
    family: str,
    numbers: Sequence[int],
    length: int,
    tokenizer: Any,
    config: PretrainedConfig,
    window: int,
) -> list[Question]:
    """Lookups of the tasks of CALIBRATION's `family` in turns, of at most `length` tokens.

    numbers: which of them, counted from 0. The same for the same model, so that a second run finds
    the same.

    Raises:
        ToolError: the model takes no prompts that are long enough.
    """
    tasks = CALIBRATION[family]
    questions = []
    for score in scores(tasks, numbers, length, LONGEST_ANSWER, tokenizer, config):
        prompt, kind = score.prompt, score.task.name
        questions.append(Question(prompt.token_ids, prompt.evidence, score, score.limit, kind))
    check_lengths([question.token_ids for question in questions], window, None)
    return questions


def scores(
    tasks: Sequence[str],
    numbers: Sequence[int],
    length: int,
    longest_answer: int,
    tokenizer: Any,
    config: PretrainedConfig,
) -> list[Score]:
    """Prompts of these tasks in turns, with their scores; they leave room for an answer.

    numbers: which of them, counted from 0. longest_answer: tokens that there is room for.

    Raises:
        ToolError: the model takes no prompts that are long enough.
    """
    context = getattr(config, "max_position_embeddings", None) or length + longest_answer
    limits = (length, context - longest_answer, sliding_window(config) or length)
    made = []
    for number in numbers:
        task = TASKS[tasks[number % len(tasks)]]
        prompt = fitted(task, f"calibration {number}", min(limits), tokenizer)
        made.append(Score(task, prompt, tokenizer))
    return made


def own(prompts: Sequence[Sequence[int]]) -> list[Question]:
    """A user's prompts, whose answers are whatever the full model says."""
    return [Question(tuple(prompt), limit=OWN_ANSWER) for prompt in prompts]
