"""Samples as token ids: lengths, evidence, templates, with the demo checkpoint's tokenizer."""

import random
from typing import Any

import pytest
from support.models import LOOKUP
from support.tokenizers import Counting
from transformers import AutoTokenizer

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks import prompts
from vllm_kvx.tools.tasks.base import Sample, Span, Task
from vllm_kvx.tools.tasks.prompts import EncodedSample, encode, fitted, shortened
from vllm_kvx.tools.tasks.table import TASKS

CHAT = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "\n{% endfor %}{{ 'assistant\n' }}"
)


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(LOOKUP)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_prompts_fill_their_length(name: str, tokenizer: Any) -> None:
    for longest in (1024, 4096):
        for seed in ("a", "b"):
            counting = Counting(tokenizer)
            prompt = fitted(TASKS[name], seed, longest, counting)
            used = len(prompt.token_ids)
            assert used <= longest and counting.calls <= 10
            # One more line with two UUIDs has 90 tokens of this tokenizer, some sentences 70.
            # Notes alone end with the nouns that they are about.
            assert used >= 0.96 * longest or used > longest - 100 or name == "notes_alone"


def test_long_prompts_need_few_encodings(tokenizer: Any) -> None:
    for name in ("niah_single_2", "cwe", "code_lookup"):
        counting = Counting(tokenizer)
        prompt = fitted(TASKS[name], "a", 30_000, counting)
        assert 0.995 * 30_000 <= len(prompt.token_ids) <= 30_000
        assert counting.calls <= 9


@pytest.mark.parametrize("template", ["of the checkpoint", "none", "of roles"])
def test_evidence_decodes_to_the_references(template: str, tokenizer: Any) -> None:
    if template != "of the checkpoint":
        tokenizer.chat_template = CHAT if template == "of roles" else None
    for name, task in TASKS.items():
        prompt = fitted(task, "a", 1000, tokenizer)
        assert list(prompt.evidence) == sorted(set(prompt.evidence))
        decoded = tokenizer.decode([prompt.token_ids[i] for i in prompt.evidence])
        assert all(reference in decoded for reference in prompt.sample.references) or (
            name in ("cwe", "fwe") and not decoded
        )
        # Not a token more: what is decoded is the evidence, but for the spaces between tokens.
        wanted = "".join(prompt.sample.text[s.begin : s.end] for s in prompt.sample.evidence)
        assert decoded.replace(" ", "") == wanted.replace(" ", "")


def test_answers_begin_after_the_template(tokenizer: Any) -> None:
    sample = Sample("What is it?", ("x",), begins="It is")
    texts = {}
    for template in (CHAT, None, tokenizer.chat_template):
        tokenizer.chat_template = template
        texts[template] = tokenizer.decode(encode(sample, tokenizer).token_ids)
    assert texts.pop(CHAT).endswith("What is it?\nassistant\nIt is")
    for text in texts.values():
        assert text == "<|begin|>What is it? It is"


def test_a_template_may_strip_the_text(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    prompt = encode(Sample("\n  zebra coffee \n", ("coffee",), (Span(9, 15),)), tokenizer)
    assert tokenizer.decode([prompt.token_ids[i] for i in prompt.evidence]).strip() == "coffee"
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ToolError, match="its chat template changes the text"):
        encode(Sample("zebra", ("zebra",)), tokenizer)


def test_too_short_a_length_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ToolError, match=r"cwe: its shortest prompt has \d+ tokens, more than 100"):
        fitted(TASKS["cwe"], "a", 100, tokenizer)


class Growing(Task):
    """Texts of any growth: `tokens(size)` words."""

    name, about, max_tokens = "growing", "", 1

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def make(self, rng: random.Random, size: int) -> Sample:
        return Sample("zebra " * self.sizes(size) + "zebra", ("",))

    def score(self, answer: str, sample: Sample) -> float:
        return 0.0


@pytest.mark.parametrize(
    "sizes",
    [
        lambda size: size,
        lambda size: size * size,
        lambda size: int(size**0.5 * 9),
        lambda size: size if size < 100 else 100 + 50 * (size - 100),
    ],
)
def test_any_growth_ends(sizes: Any, tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    prompt = fitted(Growing(sizes), "a", 2000, counting)
    assert counting.calls <= 20
    # Two more tokens: BOS and the word at the end.
    longest = max(sizes(size) + 2 for size in range(60_000) if sizes(size) + 2 <= 2000)
    assert min(longest, 2000 * (1 - prompts.UNUSED)) <= len(prompt.token_ids) <= 2000


def test_a_task_that_ends_gives_its_longest(tokenizer: Any) -> None:
    prompt = fitted(Growing(lambda size: min(size, 90)), "a", 2000, tokenizer)
    assert 60 < len(prompt.token_ids) <= 93


def kept(prompt: EncodedSample, text: str) -> tuple[str, str]:
    """The beginning and the end of `text` that are left."""
    short = prompt.sample.text
    begin = next(i for i in range(len(short) + 1) if not text.startswith(short[: i + 1]))
    return short[:begin], short[begin:]


@pytest.mark.parametrize("chat", [True, False])
def test_shortened_texts_lose_their_middle(chat: bool, tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    text = "\n".join(f"{number} is a number." for number in range(500)) + "\nQuestion: zebra"
    sample = Sample(text, ("x",))
    whole = encode(sample, tokenizer, chat)
    assert shortened(sample, len(whole.token_ids), tokenizer, chat) == whole
    for longest in (40, 100, 101, 1000):
        prompt = shortened(sample, longest, tokenizer, chat)
        assert longest - 3 <= len(prompt.token_ids) <= longest
        begin, end = kept(prompt, text)
        assert begin.startswith("0 is a number.") and text.endswith(end)
        tokens = [len(tokenizer(part, add_special_tokens=False).input_ids) for part in (begin, end)]
        # The two may share a few characters more than those that were kept.
        assert abs(tokens[0] - tokens[1]) <= 15
    with pytest.raises(ToolError, match="no text fits into 2 tokens"):
        shortened(sample, 2, tokenizer, chat)


def test_evidence_is_not_shortened_away(tokenizer: Any) -> None:
    with pytest.raises(ToolError, match="not shortened"):
        shortened(Sample("zebra", ("zebra",), (Span(0, 5),)), 3, tokenizer)


def test_slow_tokenizers_are_refused(tokenizer: Any) -> None:
    class Slow(Counting):
        is_fast, name_or_path = False, "some/model"

    with pytest.raises(ToolError, match="some/model: its tokenizer does not say where"):
        encode(Sample("zebra", ("zebra",)), Slow(tokenizer))
