"""A second question over the same text: its prompt, whose answer it follows, and what is asked."""

import gc
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engine import keep_in_process
from support.models import LOOKUP
from support.nightly import nightly

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate import engine as engines
from vllm_kvx.tools.evaluate.asking import ask
from vllm_kvx.tools.evaluate.engine import Answered, Prompt
from vllm_kvx.tools.evaluate.progress import AnswersBar
from vllm_kvx.tools.evaluate.questions import Suite, load_tokenizer
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.shares import Shares
from vllm_kvx.tools.evaluate.store import QuestionId, Store
from vllm_kvx.tools.tasks.prompts import following
from vllm_kvx.tools.tasks.table import TASKS, group_of

LOAD = partial(load_tokenizer, str(LOOKUP), None)
SNAPKV = Row("snapkv")


def suite(*names: str, turns: int = 2, length: int = 512) -> Suite:
    return Suite.of(names, None, lengths=(length,), samples=2, turns=turns)


@pytest.mark.parametrize("name", TASKS)
def test_the_second_answer_stands_in_the_text(name: str) -> None:
    """And it is another than the first; who is asked for all there is has none."""
    task = TASKS[name]
    sample = task.make(random.Random("s"), 20)
    then = sample.then
    alone = "single" in name or name in ("niah_multivalue", "niah_multiquery", "one_number")
    assert (then is None) == (alone or name in ("many_values", "vt", "cwe", "fwe"))
    if then is not None:
        assert then.text not in sample.text and then.references[0] in sample.text
        assert task.score(f" {then.references[0]}.", then) == 1
        assert task.score(f" {then.references[0]}.", sample) < 0.5


def test_the_chat_template_has_both_turns() -> None:
    class Tokenizer:
        name_or_path, chat_template = "chats", "any"

        def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
            return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

        def __call__(self, text: str, **options: bool) -> dict[str, list[str]]:
            assert not options["add_special_tokens"]
            return {"input_ids": [text]}

    sample = TASKS["niah_multikey_1"].make(random.Random("s"), 3)
    assert sample.then is not None
    (text,) = following(sample, " 123.", Tokenizer())
    assert text == (
        f"<user>{sample.text}<assistant>{sample.begins} 123.<user>{sample.then.text}<assistant> "
        f"{sample.then.begins}"
    )


class Echo:
    """An engine that answers with the row's name and the number of the prompt."""

    def __init__(self) -> None:
        self.asked: list[list[Prompt]] = []

    def answers(self, row: Row, prompts: Sequence[Prompt], bar: AnswersBar) -> list[Answered]:
        self.asked.append(list(prompts))
        return [Answered(f" {row} {index}", 0.0, 4) for index in range(len(prompts))]

    def shares(self, row: Row, prompt_len: int, generated: int) -> Shares:
        return Shares(1.0, 1.0, 1.0)


def test_a_second_question_follows_the_rows_own_answer(tmp_path: Path) -> None:
    prepared = suite("notes", "perplexity").prepare(LOAD, lambda *a: None)
    names = ("notes", "notes/turn2", "perplexity")
    assert set(prepared) == {QuestionId(name, 512, index) for name in names for index in (0, 1)}
    assert group_of("notes/turn2") == "demo"
    scored = [question for question in prepared if question.task != "perplexity"]
    store = Store(tmp_path, {})
    echo, bar = Echo(), AnswersBar({row: [] for row in (FULL_ROW, SNAPKV)})
    for row in (FULL_ROW, SNAPKV):
        ask(echo, row, scored, prepared, store, bar, LOAD)  # type: ignore[arg-type]
    read = LOAD().decode
    for row, first, second in (("full", *echo.asked[:2]), ("snapkv", *echo.asked[2:])):
        for index, (before, after) in enumerate(zip(first, second, strict=True)):
            most = len(prepared[QuestionId("notes/turn2", 512, index)].prompt.token_ids)
            assert len(before.token_ids) < len(after.token_ids) <= most
            then = prepared[QuestionId("notes/turn2", 512, index)].sample
            said = read(after.token_ids[len(before.token_ids) - 2 :])
            # This tokenizer knows no line's end.
            assert f"{row} {index}{then.text}" in said.replace("\n", "")
            # The prefix cache finds all of the text but for its last block.
            shared = len(before.token_ids) - 2
            assert list(after.token_ids[:shared]) == list(before.token_ids[:shared])
    # Whoever has a first answer from an earlier run asks the second alone.
    again = Store(tmp_path / "again", {})
    again.add([store[FULL_ROW, QuestionId("notes", 512, index)] for index in (0, 1)])
    echo.asked.clear()
    left = [each for each in scored if (FULL_ROW, each) not in again]
    ask(echo, FULL_ROW, left, prepared, again, bar, LOAD)  # type: ignore[arg-type]
    bar.close()
    assert len(left) == 2 and len(echo.asked) == 1
    for index, prompt in enumerate(echo.asked[0]):
        assert f"full {index}Question" in read(prompt.token_ids).replace("\n", "")


def test_one_turn_asks_what_it_did() -> None:
    one, two = (suite("notes", turns=turns).prepare(LOAD, lambda *a: None) for turns in (1, 2))
    assert all(two[question].prompt == each.prompt for question, each in one.items())


def test_what_has_no_second_turn() -> None:
    with pytest.raises(ToolError, match="--turns 2: no text of these --tasks has a second"):
        suite("niah_single_1").prepare(LOAD, lambda *a: None)
    with pytest.raises(ToolError, match="use --lengths up to 7920"):
        suite("notes", length=8000).check(8192)


@nightly
def test_on_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second turn reads the first one's text from the prefix cache."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    keep_in_process(monkeypatch)
    cached: list[list[int]] = []
    answered = engines.OwnEngine.answers

    def answers(self: engines.OwnEngine, *args: Any) -> list[Answered]:
        engine, now = self.llm.llm_engine, list[int]()
        step = engine.step

        def counted() -> Any:
            outputs = step()
            now.extend(output.num_cached_tokens for output in outputs if output.finished)
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step", counted)
            found = answered(self, *args)
        cached.append(now)
        return found

    monkeypatch.setattr(engines.OwnEngine, "answers", answers)
    command = ["evaluate", str(LOOKUP), "--tasks", "notes", "--lengths", "320", "--samples", "2"]
    command += ["--turns", "2", "--policies", "snapkv:kv_rate=0.2,kv_floor=0", "--no-plot"]
    small = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
    command += ["--output", str(tmp_path / "out"), "--engine-args", json.dumps(small)]
    assert main([*command, "--keep-going"]) == 0
    cleanup_dist_env_and_memory()
    gc.collect()
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["turns"] == 2
    # Under full, then SnapKV: both prompts, and the two after them.
    assert [min(now) > 250 for now in cached] == [False, True, True, True], cached
    cells = {(c["policy"], c["task"]): c["n"] for c in written["cells"] if c["length"] == 320}
    assert cells["full", "notes/turn2"] == cells["full", "notes"] == 2
    assert "notes/turn2" in capsys.readouterr().out
