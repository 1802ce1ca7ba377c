"""Has an engine answer what is missing of a row, some prompts at a time, and stores the answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_kvx.tools.engine import on_cpu
from vllm_kvx.tools.evaluate.engine import OwnEngine, Prompt
from vllm_kvx.tools.evaluate.progress import AnswersBar
from vllm_kvx.tools.evaluate.questions import PreparedPrompt
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.server import RunningServer
from vllm_kvx.tools.evaluate.store import Answer, QuestionId, Store
from vllm_kvx.tools.tasks.prompts import following

# Prompts, and their tokens on a GPU and on a CPU, that are asked for and stored at a time.
_AT_A_TIME = 128
_TOKENS_AT_A_TIME, _TOKENS_ON_CPU = 1 << 20, 1 << 14


def ask(
    engine: OwnEngine | RunningServer,
    row: Row,
    questions: Sequence[QuestionId],
    prepared: Mapping[QuestionId, PreparedPrompt],
    store: Store,
    bar: AnswersBar,
    load: Callable[[], Any],
) -> None:
    """Has the engine answer, shortest prompts first, and stores some answers at a time.

    A second question comes right after the first ones that were asked together, while the prefix
    cache has their texts. It follows what the row itself answered.

    load: gives the tokenizer, for second turns.
    """
    firsts = [each for each in questions if prepared[each].after is None]
    seconds = {prepared[each].after: each for each in questions if prepared[each].after}
    # Their firsts were answered in an earlier run.
    left = [each for first, each in seconds.items() if first not in set(firsts)]
    ordered = sorted([*left, *firsts], key=lambda question: question.length)
    # A server may have a GPU where this machine has none.
    slow = isinstance(engine, OwnEngine) and on_cpu()
    most = _TOKENS_ON_CPU if slow else _TOKENS_AT_A_TIME

    def asked(some: Sequence[QuestionId]) -> None:
        prompts = [_prompt(row, prepared[each], prepared, store, load) for each in some]
        answers = engine.answers(row, prompts, bar)
        found = []
        for question, prompt, answer in zip(some, prompts, answers, strict=True):
            length = len(prompt.token_ids)
            shares = engine.shares(row, length, answer.tokens)
            score = prepared[question].score(answer.text, answer.nats)
            kept, read = shares.kept, shares.read
            found.append(
                Answer(row, question, score, length, kept, read, answer.text, answer.tokens)
            )
        store.add(found)

    while ordered:
        tokens, count = 0, 0
        while count < min(len(ordered), _AT_A_TIME) and (tokens < most or not count):
            tokens += len(prepared[ordered[count]].prompt.token_ids)
            count += 1
        some, ordered = ordered[:count], ordered[count:]
        asked(some)
        if follow := [seconds[each] for each in some if each in seconds]:
            asked(follow)


def _prompt(
    row: Row,
    wanted: PreparedPrompt,
    prepared: Mapping[QuestionId, PreparedPrompt],
    store: Store,
    load: Callable[[], Any],
) -> Prompt:
    """What the engine is given: a second question after the row's own answer to the first."""
    if wanted.after is None:
        return wanted.prompt
    first = prepared[wanted.after].sample
    assert first is not None, "a question without a sample has no second"
    answer = store[row, wanted.after].text
    return replace(wanted.prompt, token_ids=following(first, answer, load()))
