"""What `diagnose --method speed` asks: prompts, and which of their tokens the user wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.tools.checkpoint.dense_decoder import sliding_window
from vllm_kvx.tools.checkpoint.prompts import load_prompts
from vllm_kvx.tools.checkpoint.questions import FAMILIES, Score, load_tokenizer, scores
from vllm_kvx.tools.tasks.base import Sample, Span
from vllm_kvx.tools.tasks.prompts import encode

# Categories of prompts, whose peaks are shown apart: the layers differ from one to another.
LOOKUPS, CHAT, OWN = "lookups", "chat", "own"

# Two each of the paper's categories: mathematics, coding, reasoning, knowledge, instructions.
CHAT_QUESTIONS = (
    "A train leaves at 9:40 and arrives at 13:05. It stops twice on the way, for ten minutes each "
    "time. For how long does it move? Explain your steps.",
    "A shop sells pencils at 3 for 2 euros and notebooks at 4 euros each. Anna buys 9 pencils and "
    "2 notebooks and pays with a 20 euro note. How much change does she get?",
    "Write a Python function that takes a list of words and returns a dictionary from each first "
    "letter to the words that begin with it, in the order of the list.",
    "What does this Python code print, and why?\n\nvalues = [1, 2, 3]\ncopy = values\n"
    "copy.append(4)\nprint(len(values), values is copy)",
    "All of the red boxes are heavy. Some of the boxes in the cellar are red, and no heavy box is "
    "made of paper. Can every box in the cellar be made of paper? Say how you know.",
    "Tom is older than Mia, Mia is older than Ben, and Lea is younger than Ben. Who is the second "
    "oldest of the four? Explain your answer.",
    "Why is the sky blue during the day and red at sunset?",
    "What was the printing press, who is said to have brought it to Europe, and what did it "
    "change?",
    "Write three sentences about a lighthouse. Use no word twice in a sentence, and end each "
    "sentence with a question mark.",
    "Rewrite this message politely, in at most forty words: I waited for an hour and nobody came. "
    "Send somebody tomorrow morning or give me my money back.",
)


@dataclass(frozen=True)
class Probe:
    """A prompt to look at.

    user: ascending indices of the user's tokens, U of Eq. 6: what the messages of role user say,
        without the first token, template and system text.
    score: how right an answer is, where somebody knows.
    """

    token_ids: tuple[int, ...]
    user: tuple[int, ...]
    category: str
    score: Score | None = None


def lookup_probes(
    family: str,
    count: int,
    length: int,
    answer_tokens: int,
    tokenizer: Any,
    config: PretrainedConfig,
) -> list[Probe]:
    """`count` generated lookups of a family of questions.py, of at most `length` tokens.

    With room for `answer_tokens` after them.

    Raises:
        ToolError: the model takes no prompts that are long enough.
    """
    window = sliding_window(config)
    length = length if window is None else min(length, window - answer_tokens)
    tasks = FAMILIES[family]
    return [
        Probe(score.prompt.token_ids, _users(score.prompt.sample, tokenizer)[1], LOOKUPS, score)
        for score in scores(tasks, range(count), length, answer_tokens, tokenizer, config)
    ]


def chat_probes(tokenizer: Any) -> list[Probe]:
    """The built-in questions, through the model's chat template if it has one."""
    samples = [Sample(question, ()) for question in CHAT_QUESTIONS]
    return [Probe(*_users(sample, tokenizer), CHAT) for sample in samples]


def own_probes(
    source: str, model: str, config: PretrainedConfig, longest: int | None, revision: str | None
) -> list[Probe]:
    """A user's prompts, of which nobody says where the template ends and the user begins.

    All tokens but the first and the tokenizer's special ones count as the user's. A prompts file of
    token ids needs no tokenizer; without one only the first does not count.

    Raises:
        ToolError: the file is no good, or the prompts are not for this model.
    """
    prompts = load_prompts(source, model, config, 0, longest, revision)
    try:
        special = set(load_tokenizer(model, revision).all_special_ids)
    except ToolError:
        special = set()
    return [
        Probe(
            tuple(prompt),
            tuple(i for i, token in enumerate(prompt) if i and token not in special),
            OWN,
        )
        for prompt in prompts
    ]


def check_probes(
    probes: Sequence[Probe], policy: Speed, answer_tokens: int, config: PretrainedConfig
) -> None:
    """Raise ToolError for a prompt too short to cut or too long for the model with its answer."""
    positions = getattr(config, "max_position_embeddings", None)
    limits = [limit for limit in (positions, sliding_window(config)) if limit is not None]
    for number, probe in enumerate(probes, start=1):
        count = len(probe.token_ids)
        if not policy.gap(count, policy.cutoff).size:
            raise ToolError(
                f"prompt {number} has {count} tokens, all of them anchors or tail: give longer "
                "prompts"
            )
        if len(probe.user) < 2:
            raise ToolError(
                f"prompt {number} has {len(probe.user)} tokens beside the first and special ones; "
                "2 are the least to see which of them are attended to: give longer prompts"
            )
        if limits and count + answer_tokens > min(limits):
            raise ToolError(
                f"prompt {number} has {count} tokens, which leave no room for {answer_tokens} more "
                f"among the {min(limits)} that every layer of the model sees: use fewer "
                "--answer-tokens or shorter prompts (--length, --max-prompt-tokens)"
            )


def _users(sample: Sample, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A sample's token ids, and the indices of those that overlap its text but the first."""
    text = sample.text
    # A template may strip what surrounds a message.
    span = Span(len(text) - len(text.lstrip()), len(text.rstrip()))
    prompt = encode(replace(sample, evidence=(span,)), tokenizer)
    return prompt.token_ids, tuple(index for index in prompt.evidence if index)
