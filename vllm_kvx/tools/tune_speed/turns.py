"""Further turns of a dialogue about one text: each answer is a lesson, and the text is run once."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.dialogues import (
    SENTINEL,
    Dialogue,
    Further,
    assistant,
    encoded,
    rendered,
    special_ids,
    templated,
    user,
)
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.plan import Plan


class Between(NamedTuple):
    """What a chat template has after an answer: `end`, the token that ends its turn, and `ids`, all
    from there to the next answer, the question in it."""

    end: int
    ids: tuple[int, ...]


def between(question: str, tokenizer: Any) -> Between:
    """What the chat template puts between an answer and the one to the next question.

    Raises:
        ToolError: there is no chat template, or no special token ends an answer.
    """
    ids, special = encoded(_after(question, tokenizer), tokenizer), special_ids(tokenizer)
    first = next((place for place, token in enumerate(ids) if token in special), None)
    if first is None:
        raise ToolError(f"{tokenizer.name_or_path}: no special token ends an answer")
    return Between(ids[first], ids[first + 1 :])


def _after(question: str, tokenizer: Any) -> str:
    messages = (user("x"), assistant(SENTINEL), user(question))
    return rendered(messages, tokenizer, generate=True).rpartition(SENTINEL)[2]


def check(tokenizer: Any) -> None:
    """Raises ToolError if turns that are put together are not what the chat template makes."""
    between("x", tokenizer)
    first = rendered((user("one"),), tokenizer, generate=True)
    for answer in ("two", "<think>\ntwo\n</think>\n\ntwo"):
        whole = (user("one"), assistant(answer), user("three"))
        expected = f"{first}{answer}{_after('three', tokenizer)}"
        if rendered(whole, tokenizer, generate=True) != expected:
            raise ToolError("it writes earlier turns otherwise than the last one")
    if not rendered((user("one"), assistant("two")), tokenizer).startswith(f"{first}two"):
        raise ToolError("it writes a given answer otherwise than a generated one")


def continued(
    examples: Sequence[tuple[Example, Further]], plan: Plan, teacher: Any, tokenizer: Any
) -> list[Example]:
    """The examples with as many further turns as fit into the plan's lengths.

    Answers that are not known are the teacher's, to each question as if it were the second one, so
    that an example's are given at once.
    """
    later = [
        [_turn(*turn, plan, tokenizer) for turn in further] if example.answer else []
        for example, further in examples
    ]
    asked = [
        (turn, (*example.prompt, *example.answer, *turn.between.ids))
        for (example, _), turns in zip(examples, later, strict=True)
        for turn in turns
        if turn.answer is None and example.answer[-1] == turn.between.end
    ]
    asked = [each for each in asked if len(each[1]) + plan.answer_tokens <= plan.max_length]
    prompts = [prompt for _, prompt in asked]
    limits, greedy = [plan.answer_tokens] * len(asked), [0.0] * len(asked)
    answers = teacher.answers(prompts, limits, greedy, seed=plan.seed) if asked else []
    given = {id(turn): answer for (turn, _), answer in zip(asked, answers, strict=True)}
    found = [
        _joined(
            example,
            [(turn.between, turn.answer or given.get(id(turn), ())) for turn in turns],
            plan.max_length,
        )
        for (example, _), turns in zip(examples, later, strict=True)
    ]
    wanted, had = (sum(map(bool, each)) for each in (later, [each.earlier for each in found]))
    if wanted:
        count = sum(len(each.earlier) for each in found)
        print(f"{count} further turns, in {had} of {wanted} texts")
    if wanted and not had:
        # The answers are there, and are worth more than the turns.
        print(
            "no text has room for further turns, or no answer ends as the chat template ends a "
            "turn: for several questions to a text use a greater --answer-tokens or --max-length",
            file=sys.stderr,
        )
    return found


class _Turn(NamedTuple):
    between: Between
    answer: tuple[int, ...] | None


def _turn(question: str, reference: str, plan: Plan, tokenizer: Any) -> _Turn:
    if not reference:
        return _Turn(between(question, tokenizer), None)
    known = templated(Dialogue((user("x"), assistant(reference)), "known"), tokenizer).answer
    assert known is not None
    return _Turn(between(question, tokenizer), known[: plan.answer_tokens])


def _joined(
    example: Example, turns: Sequence[tuple[Between, tuple[int, ...]]], longest: int
) -> Example:
    """The example with these turns behind it, but for those that would make it longer than
    `longest` tokens. Nothing follows an answer that does not end, so one such is the last."""
    prompt, answer, earlier = example.prompt, example.answer, list(example.earlier)
    answered = [(between, new) for between, new in turns if new]
    for (end, ids), new in sorted(answered, key=lambda turn: turn[1][-1] != turn[0].end):
        fits = len(prompt) + len(answer) + len(ids) + len(new) <= longest
        if answer[-1] != end or not fits:
            continue
        earlier.append((len(prompt), len(answer)))
        prompt, answer = (*prompt, *answer, *ids), new
    return Example(prompt, answer, example.kind, tuple(earlier))
