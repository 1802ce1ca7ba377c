"""A user's dialogues: what a file may hold, its errors, and prompts and answers as token ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, ENDS, PLAIN, TEMPLATES, chat_tokenizer

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.dialogues import Dialogue, Raw, assistant, read, templated, user


@pytest.fixture
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


QUESTION = {"role": "user", "content": "How do tides work?"}
ANSWER = {"role": "assistant", "content": "The Moon pulls."}


def test_files_hold_dialogues(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]},
        "",
        {"prompt": "Hello?", "answer": "Hello."},
        {"text": "Once", "answer": " upon a time"},
        {"prompt_token_ids": [1, 2, 3], "answer_token_ids": [4]},
    )
    learned = read(path, need_answers=True)
    assert [dialogue.has_answer for dialogue in learned] == [True] * 4
    assert {dialogue.kind for dialogue in learned} == {"file"}
    assert learned[0].messages[-1] == ANSWER and learned[1].messages[-1] == assistant("Hello.")
    assert learned[2].raw == Raw("Once", " upon a time") and learned[3].raw == Raw((1, 2, 3), (4,))
    # Where the model gives its own answers, those of the file are left out.
    asked = read(path, need_answers=False)
    assert [dialogue.has_answer for dialogue in asked] == [False] * 4
    assert asked[0].messages[-1] == QUESTION and asked[1].messages == (user("Hello?"),)
    assert asked[2].raw == Raw("Once") and asked[3].raw == Raw((1, 2, 3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ([], "give an object with one of"),
        ({"prompt": "a", "text": "b"}, "give an object with one of"),
        ({"messages": []}, "a list of at least one message"),
        ({"messages": ["a"]}, "message 1 must be an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 'message 1 has the role "tool"'),
        ({"messages": [{"role": "user"}]}, 'message 1: "content" must be a string'),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": " "}]},
            'message 2: "content" is',
        ),
        ({"messages": [{"role": "system", "content": "a"}]}, 'no turn of the role "user"'),
        ({"messages": [ANSWER]}, 'no turn of the role "user"'),
        ({"messages": [QUESTION, ANSWER, ANSWER]}, "the last turn is assistant's, after assist"),
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt": 3}, '"prompt" must be a string'),
        ({"text": "a", "answer": None}, '"answer" must be a string'),
        ({"prompt_token_ids": []}, "a list of at least one integer"),
        ({"prompt_token_ids": [1, True]}, "a list of at least one integer"),
    ],
)
def test_bad_lines_are_named(line: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ToolError) as caught:
        read(path, need_answers=False)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "add"),
    [
        ({"messages": [QUESTION]}, 'end "messages" with a turn of the role "assistant"'),
        ({"prompt": "a"}, 'add "answer"'),
        ({"text": "a"}, 'add "answer"'),
        ({"prompt_token_ids": [1]}, 'add "answer_token_ids"'),
    ],
)
def test_answers_are_needed_to_learn_them(line: Any, add: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line)
    assert len(read(path, need_answers=False)) == 1
    with pytest.raises(ToolError, match=f":1: it has no answer to learn: {add}$"):
        read(path, need_answers=True)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"holds no dialogues"):
        read(write(tmp_path / "a.jsonl", "", " "), need_answers=False)
    with pytest.raises(ToolError, match=r"is named \*\.jsonl"):
        read(write(tmp_path / "a.txt", "x"), need_answers=False)
    with pytest.raises(ToolError, match="No such file"):
        read(tmp_path / "none.jsonl", need_answers=False)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ToolError, match="not UTF-8"):
        read(tmp_path / "b.jsonl", need_answers=False)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_answers_follow_the_prompt_and_end_their_turn(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    turns = (user("Hello?"), assistant("Yes."), user("How do tides work?"))
    asked = templated(Dialogue(turns, "a"), tokenizer)
    assert asked.answer is None
    assert list(asked.prompt) == tokenizer.apply_chat_template(
        list(turns), add_generation_prompt=True, return_dict=False
    )
    learned = templated(Dialogue((*turns, assistant("The Moon pulls.")), "a"), tokenizer)
    assert learned.prompt == asked.prompt and learned.answer is not None
    assert tokenizer.decode(learned.answer) == "The Moon pulls." + ENDS[name]


def test_a_template_without_end_gets_eos(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    learned = templated(Dialogue((user("Hello?"), assistant("Yes.")), "a"), tokenizer)
    assert learned.answer is not None
    assert tokenizer.decode(learned.prompt) == "user: Hello?\nassistant: "
    assert tokenizer.decode(learned.answer) == "Yes.<|end|>"


def test_a_prompt_that_is_no_prefix_is_the_templates_fault(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    dialogue = Dialogue((user("Hello?"), assistant("Yes.")), "a")
    with pytest.raises(ToolError, match="its chat template writes an answer that is given"):
        templated(dialogue, tokenizer)
    tokenizer.chat_template = PLAIN
    system: Any = {"role": "system", "content": "Be brief."}
    with pytest.raises(ToolError, match=r"refuses a dialogue of system, user: no system turns"):
        templated(Dialogue((system, user("Hello?")), "a"), tokenizer)


def test_raw_prompts_need_no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ToolError, match=r'no chat template: give prompts as raw text, {"text"'):
        templated(Dialogue((user("Hello?"),), "a"), tokenizer)
    text = templated(Dialogue((), "file", raw=Raw("Hello", " there")), tokenizer)
    # As the completions route reads it: with BOS, and nothing but EOS behind.
    assert tokenizer.decode(text.prompt) == "<|begin|>Hello"
    assert tokenizer.decode(text.answer) == " there<|end|>"
    ids = templated(Dialogue((), "file", raw=Raw((5, 6), (7,))), tokenizer)
    assert (ids.prompt, ids.answer) == ((5, 6), (7,))
    assert templated(Dialogue((), "file", raw=Raw((5, 6))), tokenizer).answer is None
