"""Prompts for the offline tools: read from a file or built in, as token ids, and checked."""

import json
import lzma
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.checkpoint.dense_decoder import sliding_window

SEPARATOR = "---"
BUILTIN = Path(__file__).with_name("data") / "text.txt.xz"
BUILTIN_COUNT, BUILTIN_TOKENS = 4, 4096


def load_prompts(
    source: str | None,
    model: str,
    config: PretrainedConfig,
    window: int,
    longest: int | None = None,
    revision: str | None = None,
) -> list[list[int]]:
    """Token ids of the prompts in file `source`, or of the built-in ones if it is None.

    model: its directory or hub name, for the tokenizer, and its `config`.
    window: last prompt tokens, whose queries score the others.
    longest: tokens that a prompt is cut to.

    Raises:
        ToolError: the file is no good, or the prompts are not for this model.
    """
    if source is None:
        prompts = builtin_prompts(model, config, longest, revision)
    else:
        prompts = tokenize(read_prompts(Path(source)), model, revision)
        check_token_ids(prompts, config.vocab_size)
        prompts = [shorten(prompt, longest) for prompt in prompts]
        check_context(prompts, config)
    check_lengths(prompts, window, sliding_window(config))
    return prompts


def read_prompts(path: Path) -> list[str | list[int]]:
    """The texts, or token ids, in a prompts file.

    `.jsonl`: an object with `prompt` or `prompt_token_ids` per line. `.txt`: texts with a line of
    `---` between two; newlines at a text's ends are not part of it.

    Raises:
        ToolError: the file is unreadable, empty or malformed.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise ToolError(f"{path}: a prompts file is named *.jsonl or *.txt")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ToolError(f"cannot read prompts from {path}: {reason}") from error
    prompts: list[str | list[int]]
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), start=1)
        prompts = [_json_prompt(line, f"{path}:{i}") for i, line in lines if line.strip()]
    else:
        parts = re.split(rf"^{SEPARATOR}[ \t]*$", text, flags=re.MULTILINE)
        prompts = [part.strip("\n") for part in parts if part.strip()]
    if not prompts:
        raise ToolError(f"{path} holds no prompts")
    return prompts


def _json_prompt(line: str, where: str) -> str | list[int]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ToolError(f"{where}: not JSON: {error}") from error
    names = ("prompt", "prompt_token_ids")
    given = [name for name in names if isinstance(fields, dict) and name in fields]
    if len(given) != 1:
        raise ToolError(f'{where}: give an object with either "prompt" or "prompt_token_ids"')
    value = fields[given[0]]
    if given[0] == "prompt":
        if isinstance(value, str):
            return value
        raise ToolError(f"{where}: prompt must be a string")
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ToolError(f"{where}: prompt_token_ids must be a list of integers")


def builtin_prompts(
    model: str, config: PretrainedConfig, longest: int | None = None, revision: str | None = None
) -> list[list[int]]:
    """The beginnings of the quarters of the built-in text, BOS included.

    As many tokens of each as there are, at most BUILTIN_TOKENS, `longest` and what the model takes.

    Raises:
        ToolError: the model has no tokenizer.
    """
    lines = lzma.decompress(BUILTIN.read_bytes()).decode().splitlines(keepends=True)
    quarters: list[str] = [""] * BUILTIN_COUNT
    total, begin = sum(map(len, lines)), 0
    for line in lines:
        quarters[begin * BUILTIN_COUNT // total] += line
        begin += len(line)
    positions = getattr(config, "max_position_embeddings", None)
    limits = (BUILTIN_TOKENS, longest, positions, sliding_window(config))
    most = min(limit for limit in limits if limit is not None)
    return [prompt[:most] for prompt in tokenize(quarters, model, revision)]


def tokenize(
    prompts: Sequence[str | list[int]], model: str, revision: str | None = None
) -> list[list[int]]:
    """Token ids of each prompt; a text's as the completions route makes them, BOS included.

    Raises:
        ToolError: there are texts, and the model has no tokenizer.
    """
    if all(isinstance(prompt, list) for prompt in prompts):
        return [list(prompt) for prompt in prompts if isinstance(prompt, list)]
    missing = ToolError(
        f"{model} has no tokenizer that loads: give prompt_token_ids to --prompts, in a .jsonl file"
    )
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise missing from error
    # Not verbose: a text may be longer than the model takes, before it is cut.
    ids = [
        tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    if any(prompt and not tokens for prompt, tokens in zip(prompts, ids, strict=True)):
        # For some models transformers makes up an empty tokenizer.
        raise missing
    return ids


def check_context(prompts: Sequence[Sequence[int]], config: PretrainedConfig) -> None:
    """Raise ToolError unless every prompt fits into the model's context."""
    context = getattr(config, "max_position_embeddings", None)
    for i, prompt in enumerate(prompts, start=1):
        if context is not None and len(prompt) > context:
            raise ToolError(
                f"prompt {i} has {len(prompt)} tokens, and the model's context {context}: leave it "
                f"out, or cut it by --max-prompt-tokens {context}"
            )


def shorten(prompt: list[int], longest: int | None) -> list[int]:
    """Cuts a prompt to `longest` tokens: one that is longer loses its middle, as in LongBench.

    BOS and the question at the end stay, where there are.
    """
    if longest is None or len(prompt) <= longest:
        return prompt
    end = (longest + 1) // 2
    return prompt[: longest - end] + prompt[len(prompt) - end :]


def check_token_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise ToolError for a token that the model does not have."""
    for number, prompt in enumerate(prompts, start=1):
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ToolError(f"prompt {number}: token {token} is not one of 0..{vocab_size - 1}")


def check_lengths(prompts: Sequence[Sequence[int]], window: int, longest: int | None) -> None:
    """Raise ToolError for a prompt too short to select from, or too long for a sliding window."""
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) < 2 * window:
            raise ToolError(
                f"prompt {number} has {len(prompt)} tokens; twice the window, {2 * window}, are "
                "the least to select from: give prompts as long as those that you serve"
            )
        if longest is not None and len(prompt) > longest:
            raise ToolError(
                f"prompt {number} has {len(prompt)} tokens, more than the model's sliding window: "
                f"set --max-prompt-tokens {longest}"
            )
