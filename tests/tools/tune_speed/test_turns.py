"""Further turns about a text are what the chat template makes of them; each is learnt from."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import models, speed
from support.models import LOOKUP
from support.nightly import nightly
from transformers import AutoTokenizer, PretrainedConfig

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed import packs, teacher, turns
from vllm_kvx.tools.tune_speed.cut import Cut
from vllm_kvx.tools.tune_speed.dialogues import (
    Dialogue,
    assistant,
    rendered,
    templated,
    user,
)
from vllm_kvx.tools.tune_speed.fitting import Wanted, fitted
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.plan import RECITALS, TURNS, Plan
from vllm_kvx.tools.tune_speed.sources import plan_of
from vllm_kvx.tools.tune_speed.student import load
from vllm_kvx.tools.tune_speed.visibility import Batch, answer_states

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found: Any = AutoTokenizer.from_pretrained(LOOKUP)
    found.chat_template = TEMPLATE
    return found


def plan(**changes: Any) -> Plan:
    settings = dict(prompts=None, sft=False, count=1, lookups=1.0, max_length=600)
    return Plan(**settings | dict(answer_tokens=40, held_out=0, seed=0) | changes)  # type: ignore[arg-type]


class Echo:
    """Answers every prompt by two tokens and what ends a turn, but for some; remembers them."""

    def __init__(self, end: int, endless: int | None = None) -> None:
        self.end, self.endless, self.prompts = end, endless, list[tuple[int, ...]]()

    def answers(self, prompts: Any, limits: Any, *_: Any, **__: Any) -> list[tuple[int, ...]]:
        self.prompts += prompts
        ends = [() if n == self.endless else (self.end,) for n in range(len(prompts))]
        return [(7, 8 + number, *end) for number, end in enumerate(ends)]


def started(tokenizer: Any, *messages: Any, kind: str = "table") -> Example:
    ids = templated(Dialogue(messages, kind), tokenizer)
    assert ids.answer is not None
    return Example(ids.prompt, ids.answer, kind)


def test_turns_are_what_the_template_makes(tokenizer: Any) -> None:
    turns.check(tokenizer)
    first = (user("Lake one"), assistant("blue"))
    further = (("And two?", "red ones"), ("And three?", "green"))
    (found,) = turns.continued([(started(tokenizer, *first), further)], plan(), None, tokenizer)
    whole = [*first, user("And two?"), assistant("red ones"), user("And three?")]
    assert tokenizer.decode(found.prompt) == rendered(whole, tokenizer, generate=True)
    tokens = (*found.prompt, *found.answer)
    learnt = [tokenizer.decode(tokens[at : at + count]) for at, count in found.spans()]
    assert [text.replace("<|end|>", "").strip() for text in learnt] == ["blue", "red ones", "green"]
    assert found.learnt() == [t for at, count in found.spans() for t in tokens[at : at + count]]
    end = turns.between("x", tokenizer).end
    assert all(tokens[at + count - 1] == end for at, count in found.spans())


def test_questions_without_an_answer_are_asked_in_the_second_turn(tokenizer: Any) -> None:
    first = started(tokenizer, user("Lake one"), assistant("blue"))
    teacher = Echo(turns.between("x", tokenizer).end)
    further = (("And two?", ""), ("And three?", "green"), ("And four?", ""))
    (found,) = turns.continued([(first, further)], plan(), teacher, tokenizer)
    assert [tokenizer.decode(prompt) for prompt in teacher.prompts] == [
        tokenizer.decode((*first.prompt, *first.answer, *turns.between(q, tokenizer).ids))
        for q in ("And two?", "And four?")
    ]
    tokens = (*found.prompt, *found.answer)
    spans = [tokens[at : at + count] for at, count in found.spans()]
    assert spans[0] == first.answer and spans[1] == (7, 8, teacher.end)
    assert spans[3] == (7, 9, teacher.end) and len(spans) == 4


def test_an_answer_that_does_not_end_is_the_last(tokenizer: Any) -> None:
    first = started(tokenizer, user("Lake one"), assistant("blue"))
    teacher = Echo(turns.between("x", tokenizer).end, endless=0)
    long = "a b c d e f g h i j k l m n o p q r s t"
    further = (("And two?", ""), ("And three?", long), ("And four?", "green"))
    cut = plan(answer_tokens=10)
    (found,) = turns.continued([(first, further)], cut, teacher, tokenizer)
    tokens = (*found.prompt, *found.answer)
    spans = [tokens[at : at + count] for at, count in found.spans()]
    assert len(spans) == 3 and "green" in tokenizer.decode(spans[1])
    assert spans[2] == (7, 8)


def test_turns_that_do_not_fit_are_left_out(
    tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = started(tokenizer, user("Lake one"), assistant("blue"))
    further = (("And two?", "red and yellow and blue and grey"), ("And three?", "green"))
    both = turns.continued([(first, further)], plan(), None, tokenizer)[0]
    short = plan(max_length=len(both) - 1)
    (found,) = turns.continued([(first, further)], short, None, tokenizer)
    assert len(found.spans()) == 2 and len(found) < len(both)
    message = "no text has room for further turns, or no answer ends"
    begun = Example(first.prompt, first.answer[:-1], "table")
    for example, tight in ((first, plan(max_length=len(first) + 5)), (begun, plan())):
        # What was answered is not lost.
        assert turns.continued([(example, further)], tight, None, tokenizer) == [example]
        assert message in capsys.readouterr().err


def test_templates_without_turns_are_refused(tokenizer: Any) -> None:
    plain: Any = AutoTokenizer.from_pretrained(LOOKUP)
    with pytest.raises(ToolError, match="no special token ends an answer"):
        turns.check(plain)
    plain.chat_template = TEMPLATE.replace("m.content", "m.content if loop.last else 'gone'")
    with pytest.raises(ToolError, match="earlier turns otherwise"):
        turns.check(plain)
    thinking = "(m.content if loop.last else m.content.split('</think>')[-1])"
    plain.chat_template = TEMPLATE.replace("m.content", thinking)
    with pytest.raises(ToolError, match="earlier turns otherwise"):
        turns.check(plain)
    empty = "('<think></think>' if loop.last and m.role == 'assistant' else '') ~ m.content"
    plain.chat_template = TEMPLATE.replace("m.content", empty)
    with pytest.raises(ToolError, match="given answer otherwise"):
        turns.check(plain)


def asking(model: Path, **changes: Any) -> Plan:
    """The plan of a command without --recitals and --turns, but for `changes`."""
    options = {
        "sft": None, "examples": None, "prompts": None, "count": 10, "lookups": 0.5,
        "recitals": None, "turns": None, "max_length": 4096, "answer_tokens": 256,
        "held_out": 2, "seed": 0, "model": str(model), "revision": None,
    }  # fmt: skip
    return plan_of(Namespace(**options | changes), PretrainedConfig(max_position_embeddings=8192))


def test_turns_and_recitals_are_asked_for_where_they_can_be(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save_pretrained(tmp_path)
    found = asking(tmp_path)
    assert (found.turns, found.recitals) == (TURNS, RECITALS)
    assert not capsys.readouterr().err
    # What is given stays.
    given = asking(tmp_path, turns=2, recitals=0.1)
    assert (given.turns, given.recitals) == (2, 0.1)
    for length, most in ((4096, 8), (2048, 4), (1024, 2), (768, 2), (512, 1)):
        found = asking(tmp_path, max_length=length)
        assert found.turns == most
    assert asking(tmp_path, lookups=0.0).turns == 1
    assert asking(tmp_path, sft="answers.jsonl", count=None).turns == 1

    found = asking(LOOKUP, max_length=1024)
    assert (found.turns, found.recitals) == (1, RECITALS)
    assert "one question to a text: the chat template of" in capsys.readouterr().err
    other: Any = AutoTokenizer.from_pretrained(LOOKUP)
    other.chat_template = TEMPLATE.replace("[assistant] ", "[assistant] <think></think>")
    other.save_pretrained(tmp_path / "other")
    found = asking(tmp_path / "other")
    assert (found.turns, found.recitals) == (1, 0.0)
    assert "no recitals: the chat template of" in capsys.readouterr().err
    # What is wrong with a model without one is said later.
    other.chat_template = None
    other.save_pretrained(tmp_path / "none")
    (tmp_path / "none" / "chat_template.jinja").unlink(missing_ok=True)
    found = asking(tmp_path / "none")
    assert (found.turns, found.recitals) == (1, 0.0)
    assert not capsys.readouterr().err


def test_the_longest_texts_have_all_the_room(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "fitted", lambda wanted, _: wanted)
    wanted: Any = teacher.asked(plan(count=2000, lookups=1.0, turns=8), Any, tokenizer)
    longest = max(each.longest for each in wanted)
    room = plan().max_length - plan().answer_tokens
    assert 0.99 * room <= longest <= room and {each.turns for each in wanted} == {8}


def test_lookups_have_questions_that_differ(tokenizer: Any) -> None:
    wanted = [Wanted(str(n), 500, None, n % 2 == 0, 4) for n in range(6)]
    alone = [each._replace(turns=1) for each in wanted]
    pairs = zip(fitted(wanted, tokenizer), fitted(alone, tokenizer), strict=True)
    for (found, ids), (single, _) in pairs:
        assert ids == templated(found, tokenizer)
        # What else is drawn is the same.
        assert found.messages == single.messages and not single.further
        questions = [question for question, _ in found.further]
        assert 1 <= len(set(questions)) == len(questions) <= 3
        assert all(answer for _, answer in found.further) or not found.has_answer


def test_files_keep_them(tmp_path: Path) -> None:
    examples = [Example((1, 2, 3, 4), (5,), "own", ((1, 2), (3, 1))), Example((1,), (2,), "own")]
    packs.write(tmp_path / "examples.jsonl", examples)
    assert packs.read(tmp_path / "examples.jsonl") == examples
    text = (tmp_path / "examples.jsonl").read_text().replace(', "earlier": []', "")
    (tmp_path / "older.jsonl").write_text(text)
    assert packs.read(tmp_path / "older.jsonl") == examples


@pytest.mark.parametrize("cut", [None, Cut(3, 0, 1), Cut(2, 4, 3)])
def test_each_turn_is_as_if_it_were_asked_alone(tmp_path: Path, cut: Cut | None) -> None:
    """In the upper layers later turns see nothing of earlier ones, answers included."""
    model = load(str(models.build_model(tmp_path, arch=models.ARCHS[0], layers=4)), None, "auto")
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(3, 500, (count,), generator=draw).tolist()

    first, long = (some(30), some(5)), some(60)
    second = [*first[0], *first[1], *some(7)]
    third = [*second, *long, *some(9)]
    pairs = [(third, some(3)), (some(50), some(4))]
    earlier = [[(30, 5), (len(second), 60)], []]
    expected = [
        speed.score(
            model,
            prompt,
            answer,
            cutoff=cut and cut.cutoff,
            anchors=cut.anchors if cut else 0,
            tail=cut.tail if cut else 1,
        ).logprobs
        for prompt, answer in (first, (second, long), *pairs)
    ]
    with torch.no_grad():
        batch = Batch.of(pairs, earlier)
        states = answer_states(model, batch, cut, watched=3)
        alone = Batch.of([first, (second, long), *pairs])
        torch.testing.assert_close(answer_states(model, alone, cut, watched=3), states)
    found = model.lm_head(states[-1]).log_softmax(dim=-1)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)
    assert batch.answers.tolist() == [5, 60, 3, 4]


@nightly
def test_many_are_made_by_several_processes(tokenizer: Any) -> None:
    many = [Wanted(str(n), 300) for n in range(208)]
    assert fitted(many, tokenizer)[::40] == fitted(many[::40], tokenizer)
