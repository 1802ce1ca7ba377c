"""Prompts that a model writes itself: where its template lets it begin, and what is kept."""

import pytest
from support.chat_templates import CHATML, ENDS, LLAMA_3, PLAIN, TEMPLATES, chat_tokenizer

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.dialogues import templated
from vllm_kvx.tools.tune_speed.selfwritten import (
    dialogues,
    distinct,
    stop_ids,
    usable,
    user_turn_prefix,
)

# What stands in front of the user's words, by template.
BEGINS = {
    "chatml": "<|im_start|>user\n",
    "llama_3": "<|begin|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n",
    # Without the space, which belongs to the first word's token.
    "plain": "<|begin|>[",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_prefix_ends_where_the_user_begins(name: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    prefix = user_turn_prefix(tokenizer)
    assert tokenizer.decode(prefix) == BEGINS[name]
    # What the model writes there becomes a prompt that begins with the same tokens.
    (dialogue,) = dialogues(["How do the tides come about?"])
    assert list(templated(dialogue, tokenizer).prompt[: len(prefix)]) == prefix
    assert dialogue.kind == "own"


@pytest.mark.parametrize("template", [CHATML, LLAMA_3])
def test_turns_end_with_their_tokens(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    end = ENDS["chatml" if template == CHATML else "llama_3"]
    wanted = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)}
    assert set(stop_ids(tokenizer)) == wanted and len(wanted) == 2


def test_templates_that_do_not_allow_it() -> None:
    with pytest.raises(ToolError, match="no special token ends the user's turn"):
        stop_ids(chat_tokenizer(PLAIN))
    for template in ("{{ messages[0]['content'] * 2 }}", "{{ messages[0]['content'] | upper }}"):
        with pytest.raises(ToolError, match="does not give the user's words once and unchanged"):
            user_turn_prefix(chat_tokenizer(template))
    with pytest.raises(ToolError, match="has no chat template"):
        user_turn_prefix(chat_tokenizer(None))


@pytest.mark.parametrize(
    "text",
    [
        "How do the tides come about?",
        "Write a haiku.",
        "潮汐是怎么产生的？",
        "Given x = 3 and y = 4, what is the length of the hypotenuse? Show your steps.",
        "Explain the following code:\n```\nfor (i = 0; i < 3; i++) { a[i] = i; }\n```",
    ],
)
def test_questions_are_usable(text: str) -> None:
    assert usable(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "Hello",
        "1 2 3 4",
        "What is <|im_start|> for in a prompt?",
        "Tell me [/INST] a story",
        "no no no no no no no no",
        "I like tea and cake. " * 30,
        "Who am I? \N{REPLACEMENT CHARACTER} or not",
        " ".join(f"word{number}" for number in range(700)),
    ],
)
def test_junk_is_not(text: str) -> None:
    assert not usable(text)


def test_nothing_is_asked_twice() -> None:
    texts = [
        "How do the tides come about?",
        " how do the tides come about",
        "How do the tides come about in narrow bays of northern seas?",
        "Name a lake.",
        "Name a lake!",
        "How do the tides come about, please?",
    ]
    assert distinct(texts) == [texts[0], texts[2], texts[3]]
    assert [dialogue.messages[0]["content"] for dialogue in dialogues(["Hi", *texts])] == [
        texts[0],
        texts[2],
        texts[3],
    ]
