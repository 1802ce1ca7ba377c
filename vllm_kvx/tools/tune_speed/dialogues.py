"""What `tune-speed` trains on: dialogues, read from a user's file, and their token ids."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from vllm_kvx.errors import ToolError

ROLES = ("system", "user", "assistant")
_FORMS = '{"messages": [...]}, {"prompt": "..."}, {"text": "..."} or {"prompt_token_ids": [...]}'
# Stands for a message's content where only what the template puts around it is asked for.
SENTINEL = "kvxsentinelkvx"
# Questions in turns of their own, each with its answer, or "" where that is not known.
Further = tuple[tuple[str, str], ...]


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it: who says it, and what."""

    role: str
    content: str


@dataclass(frozen=True)
class Raw:
    """A prompt that no chat template is applied to.

    prompt, answer: a text, or token ids. The answer is None where the model is to give it.
    """

    prompt: str | tuple[int, ...]
    answer: str | tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dialogue:
    """A prompt to train on, with or without its answer.

    messages: the turns. The last is the user's where the model is to answer, and the assistant's
        where that answer is to be learned. Empty where there is `raw`.
    kind: where it came from: the generator's name, "own" or "file".
    reference: lines that a right answer contains, as far as they are known; no training needs them
        of a question that the model answers itself.
    raw: what stands for the messages where the prompt has no template.
    further: what the user asks after the answer.
    """

    messages: tuple[Message, ...]
    kind: str
    reference: str = ""
    raw: Raw | None = None
    further: Further = ()

    @property
    def has_answer(self) -> bool:
        if self.raw is not None:
            return self.raw.answer is not None
        return self.messages[-1]["role"] == "assistant"


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def read(path: Path, need_answers: bool) -> list[Dialogue]:
    """The dialogues of a `.jsonl` file, one a line; empty lines mean nothing.

    A line is {"messages": [...]} with OpenAI's roles and contents of text, {"prompt": "..."} for
    one turn of the user, or, without chat template, {"text": "..."} or {"prompt_token_ids": [...]}.
    Answers are the last message, "answer" beside "prompt" and "text", and "answer_token_ids" beside
    "prompt_token_ids".

    need_answers: whether answers are learned from the file. Where they are not, the model gives its
        own, and those of the file are left out.

    Raises:
        ToolError: the file cannot be read or is empty, or a line is none of these.
    """
    if path.suffix != ".jsonl":
        raise ToolError(f"{path}: a file of dialogues is named *.jsonl, with {_FORMS} in each line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ToolError(f"cannot read dialogues from {path}: {reason}") from error
    dialogues = [
        _dialogue(line, f"{path}:{number}", need_answers)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not dialogues:
        raise ToolError(f"{path} holds no dialogues")
    return dialogues


def _dialogue(line: str, where: str, need_answers: bool) -> Dialogue:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ToolError(f"{where}: not JSON: {error}") from error
    names = ("messages", "prompt", "text", "prompt_token_ids")
    given = [name for name in names if isinstance(fields, dict) and name in fields]
    if len(given) != 1:
        raise ToolError(f"{where}: give an object with one of {_FORMS}")
    if given[0] == "messages":
        dialogue = Dialogue(_messages(fields["messages"], where), "file")
    elif given[0] == "prompt":
        turns = [user(_string(fields, "prompt", where))]
        if "answer" in fields:
            turns.append(assistant(_string(fields, "answer", where)))
        dialogue = Dialogue(tuple(turns), "file")
    elif given[0] == "text":
        answer = _string(fields, "answer", where) if "answer" in fields else None
        dialogue = Dialogue((), "file", raw=Raw(_string(fields, "text", where), answer))
    else:
        ids = _token_ids(fields, "prompt_token_ids", where)
        name = "answer_token_ids"
        answer_ids = _token_ids(fields, name, where) if name in fields else None
        dialogue = Dialogue((), "file", raw=Raw(ids, answer_ids))
    if need_answers and not dialogue.has_answer:
        missing = {
            "messages": 'end "messages" with a turn of the role "assistant"',
            "prompt_token_ids": 'add "answer_token_ids"',
        }
        add = missing.get(given[0], 'add "answer"')
        raise ToolError(f"{where}: it has no answer to learn: {add}")
    return dialogue if need_answers else without_answer(dialogue)


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ToolError(f'{where}: "messages" must be a list of at least one message')
    messages: list[Message] = []
    for number, message in enumerate(value, start=1):
        at = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise ToolError(f'{at} must be an object with "role" and "content"')
        role = message.get("role")
        if role not in ROLES:
            shown = json.dumps(role, ensure_ascii=False)
            raise ToolError(f"{at} has the role {shown}; known are {', '.join(ROLES)}")
        messages.append({"role": role, "content": _string(message, "content", at)})
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not any(message["role"] == "user" for message in asked):
        raise ToolError(f'{where}: no turn of the role "user" to answer')
    if asked[-1]["role"] != "user":
        raise ToolError(
            f"{where}: the last turn is {messages[-1]['role']}'s, after {asked[-1]['role']}'s: "
            'end with a turn of "user", or with one and the "assistant"\'s answer to it'
        )
    return tuple(messages)


def _string(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ToolError(f'{where}: "{name}" must be a string')
    if not value.strip():
        raise ToolError(f'{where}: "{name}" is empty')
    return value


def _token_ids(fields: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    value = fields[name]
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise ToolError(f'{where}: "{name}" must be a list of at least one integer')
    return tuple(value)


def without_answer(dialogue: Dialogue) -> Dialogue:
    """The dialogue up to the turn that the model is to answer."""
    if not dialogue.has_answer:
        return dialogue
    raw = None if dialogue.raw is None else Raw(dialogue.raw.prompt)
    return replace(dialogue, messages=dialogue.messages[:-1], raw=raw)


@dataclass(frozen=True)
class Templated:
    """Token ids of a dialogue: `prompt`, generation prompt included, and `answer`, if there is one.

    The answer's last token ends the turn: the one that the template puts, or else EOS. What the
    template puts after that token is not part of it.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None


def templated(dialogue: Dialogue, tokenizer: Any) -> Templated:
    """The dialogue as the model sees it, under its chat template where it has messages.

    tokenizer: of transformers.

    Raises:
        ToolError: there are messages and no chat template; the template refuses them; or what it
            makes of prompt and answer does not begin with what it makes of the prompt.
    """
    if dialogue.raw is not None:
        return _templated_raw(dialogue.raw, tokenizer)
    prompt = rendered(without_answer(dialogue).messages, tokenizer, generate=True)
    prompt_ids = encoded(prompt, tokenizer)
    if not dialogue.has_answer:
        return Templated(prompt_ids, None)
    whole = rendered(dialogue.messages, tokenizer)
    if not whole.startswith(prompt):
        raise ToolError(
            f"{tokenizer.name_or_path}: its chat template writes an answer that is given otherwise "
            "than one that is generated, so no answers can be learned: use self-distillation, or "
            "a template whose generation prompt is how an assistant's turn begins"
        )
    ids = encoded(whole, tokenizer)
    if ids[: len(prompt_ids)] == prompt_ids:
        answer = ids[len(prompt_ids) :]
    else:
        # A token spans the end of the prompt: in serving, the prompt's tokens are fixed first.
        answer = encoded(whole[len(prompt) :], tokenizer)
    return Templated(prompt_ids, _ended(answer, tokenizer))


def _templated_raw(raw: Raw, tokenizer: Any) -> Templated:
    def ids(text: str | Sequence[int], special: bool) -> tuple[int, ...]:
        if not isinstance(text, str):
            return tuple(text)
        return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    if raw.answer is None:
        return Templated(ids(raw.prompt, True), None)
    answer = ids(raw.answer, False)
    if isinstance(raw.answer, str) and tokenizer.eos_token_id is not None:
        answer += (tokenizer.eos_token_id,)
    return Templated(ids(raw.prompt, True), answer)


def _ended(answer: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """The answer's tokens up to the one that ends the turn."""
    messages = (user("x"), assistant(SENTINEL))
    after = encoded(rendered(messages, tokenizer).rpartition(SENTINEL)[2], tokenizer)
    ends = special_ids(tokenizer)
    first = next((index for index, token in enumerate(after) if token in ends), None)
    if first is not None:
        return answer[: len(answer) - (len(after) - first - 1)]
    answer = answer[: len(answer) - len(after)]
    return answer if tokenizer.eos_token_id is None else (*answer, tokenizer.eos_token_id)


def rendered(messages: Sequence[Message], tokenizer: Any, generate: bool = False) -> str:
    """The messages under the chat template, with the generation prompt if the model is to answer.

    Raises:
        ToolError: there is no chat template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ToolError(
            f"{tokenizer.name_or_path} has no chat template: give prompts as raw text, "
            '{"text": "..."}, or as token ids, {"prompt_token_ids": [...]}, in a .jsonl file'
        )
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generate
        )
    except Exception as error:  # Templates raise what they like.
        raise ToolError(
            f"{tokenizer.name_or_path}: its chat template refuses a dialogue of "
            f"{', '.join(message['role'] for message in messages)}: {error}"
        ) from error
    return text


def encoded(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a rendered text, which has its special tokens already."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that no user's text is made of."""
    added = {token for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    return frozenset(added | set(tokenizer.all_special_ids))
