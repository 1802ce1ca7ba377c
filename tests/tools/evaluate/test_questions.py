"""What a run asks, and what it refuses to ask."""

from functools import partial
from pathlib import Path

import pytest
from support.models import LOOKUP

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.perplexity import CONTINUATION_TOKENS, passages
from vllm_kvx.tools.evaluate.questions import Suite, load_tokenizer
from vllm_kvx.tools.evaluate.store import QuestionId

LOAD = partial(load_tokenizer, str(LOOKUP), None)


def suite(*names: str, lengths: tuple[int, ...] = (512,), samples: int = 2) -> Suite:
    return Suite.of(names, None, lengths=lengths, samples=samples)


def test_prompts_of_every_task_length_and_index() -> None:
    seen: list[tuple[int, int]] = []
    both = suite("notes", "perplexity", lengths=(512, 1024))
    prepared = both.prepare(LOAD, lambda *a: seen.append(a))
    assert set(prepared) == {
        QuestionId(t, n, i) for t in ("notes", "perplexity") for n in (512, 1024) for i in (0, 1)
    }
    assert seen[-1] == (4, 4)
    for question, each in prepared.items():
        tokens = len(each.prompt.token_ids) + len(each.prompt.forced)
        assert 0.85 * question.length < tokens <= question.length
        assert bool(each.prompt.forced) == (question.task == "perplexity")
    # A longer prompt asks the same, and more samples leave the first as they were.
    first, longer = (prepared[QuestionId("notes", length, 1)] for length in (512, 1024))
    assert first.sample.references == longer.sample.references
    more = suite("notes", "perplexity", samples=5).prepare(LOAD, lambda *a: None)
    for question in (QuestionId("notes", 512, 1), QuestionId("perplexity", 512, 1)):
        assert more[question].prompt == prepared[question].prompt


def test_answers_are_judged_by_their_task() -> None:
    (each,) = suite("notes_3", samples=1).prepare(LOAD, lambda *a: None).values()
    assert each.score(f" {each.sample.references[0]}.", 9.0) == 1.0 and each.score("no", 9.0) == 0.0
    (each,) = suite("perplexity", samples=1).prepare(LOAD, lambda *a: None).values()
    assert each.score("", 1.25) == 1.25


@pytest.mark.parametrize(
    ("names", "lengths", "message"),
    [
        (("notes",), (8190,), "length 8190: with 8 tokens of an answer to notes.*up to 8184"),
        (("perplexity",), (9000,), "more than the model's context of 8192"),
        (("nites",), (512,), "unknown task 'nites'"),
        ((), (512,), "no task is named"),
    ],
)
def test_what_cannot_be_asked(
    names: tuple[str, ...], lengths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        suite(*names, lengths=lengths).check(8192)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The Hatter was the first to break the silence. " * 60)
    found = passages(str(text), LOAD(), 256, 2)
    assert all(len(p.token_ids) + len(p.continuation) == 256 for p in found)
    assert len(found[0].continuation) == CONTINUATION_TOKENS
    for source, length in ((str(text), 4096), (str(tmp_path / "none.txt"), 256), (str(text), 64)):
        with pytest.raises(ToolError, match=r"--text|cannot read"):
            passages(source, LOAD(), length, 1)
