"""Answers on disk: written one by one, so that a run that ends early is taken up again."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.tasks.base import SECOND_TURN

RUN_FILE, ANSWERS_FILE = "run.json", "answers.jsonl"
RESOLVED = "resolved"
# Answers under other values of these are not of the same run.
SAME = ("model", "model_key", "seed", "dtype", "text", "kv_cache_dtype", "quantization")
# These too, where a run has them: one without asks for fewer rows.
IF_GIVEN = ("original", "original_key")
# A hub's weights may have come only with the first run: until then a model's key is that of the
# configuration alone.
_UNTIL_THEN = {"model_key": "config_key", "original_key": "original_config_key"}


@dataclass(frozen=True)
class QuestionId:
    """Names one question of a run, whoever answers it.

    length: tokens that the prompt was fitted or cut to, 0 for short questions. index: which sample,
    from 0.
    """

    task: str
    length: int
    index: int

    @property
    def text(self) -> tuple[str, int, int]:
        """Names the text that is asked about, which questions of two turns share."""
        return self.task.removesuffix(SECOND_TURN), self.length, self.index


@dataclass(frozen=True)
class Answer:
    """What came out of a question under a row.

    score: share that is right, 0 to 1; for perplexity the mean negative logprob in nats.
    tokens: of the prompt. kept: share of the prompt's KV entries that the cache holds after it, or
    at the answer's end where retention waits for generated tokens.
    read: share of them that a decode step reads. text: the answer, or what was measured.
    generated: tokens of the answer; None where an older version wrote it down, which did not keep
    that.
    """

    row: Row
    question: QuestionId
    score: float
    tokens: int
    kept: float
    read: float
    text: str
    generated: int | None = None

    @property
    def key(self) -> tuple[Row, QuestionId]:
        """What the answer is stored under."""
        return self.row, self.question

    def as_json(self) -> dict[str, Any]:
        """The answer as a line of the file has it."""
        return {
            "question": {"policy": str(self.row), **asdict(self.question)},
            "score": self.score,
            "tokens": self.tokens,
            "kept": self.kept,
            "read": self.read,
            "text": self.text,
            "generated": self.generated,
        }

    @classmethod
    def of_json(cls, line: Any) -> "Answer":
        """The answer in a line of the file.

        Raises:
            TypeError, KeyError: it is no answer.
        """
        fields = {**line}
        question = {**fields.pop("question")}
        row = question.pop("policy")
        if not isinstance(row, str):
            raise TypeError(f"its policy is {row!r}")
        return cls(Row.parse(row), QuestionId(**question), **fields)


def resolved_of(facts: Mapping[str, Any]) -> dict[Row, Row]:
    """What each row's policy and KV cache dtype meant to its engine, from a run's facts."""
    return {Row.parse(row): Row.parse(name) for row, name in facts[RESOLVED].items()}


class Store:
    """The answers of one run in a directory.

    Raises:
        ToolError: the directory cannot be used, or holds the answers of another run.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        """facts: what the run is; stored beside the answers."""
        self.directory = directory
        self._answers: dict[tuple[Row, QuestionId], Answer] = {}
        path = directory / RUN_FILE
        with self._writing():
            directory.mkdir(parents=True, exist_ok=True)
        before, answers = self._read_run(path), list(self._load())
        if not answers:
            before = {}  # A run that was refused, or failed, before its first answer is none.
        given = [name for name in IF_GIVEN if before.get(name) and facts.get(name)]
        for name in (*SAME, *given) if before else ():
            alike = [facts.get(name)]
            if name in _UNTIL_THEN:
                alike.append(facts.get(_UNTIL_THEN[name]))
            if before.get(name) not in alike:
                raise ToolError(
                    f"{directory} holds answers with {name} {before.get(name)!r}, this run has "
                    f"{facts.get(name)!r}: choose another --output"
                )
        for answer in answers:
            self._answers[answer.key] = answer
        # What policies resolved to stays known when their answers are not asked for again.
        # Older runs have the KV cache dtype among their facts, and not in what names meant.
        dtype = before.get("kv_cache_dtype")
        resolved = {
            row: str(Row.parse(name).over(dtype)) for row, name in before.get(RESOLVED, {}).items()
        }
        known = {name: facts.get(name) or before.get(name) for name in IF_GIVEN}
        self.facts: dict[str, Any] = {**before, **facts, **known, RESOLVED: resolved}
        self._write_facts()

    @property
    def resolved(self) -> dict[Row, Row]:
        """What each row meant when it answered: its policy with layers, and its KV cache dtype."""
        return resolved_of(self.facts)

    def note_resolved(self, row: Row, meant: Row) -> None:
        """Keeps what the words in a row's name meant when it answered.

        Raises:
            ToolError: it meant something else for answers that are here, or cannot be written.
        """
        known = self.facts[RESOLVED].setdefault(str(row), str(meant))
        if known != str(meant):
            raise ToolError(
                f"{self.directory} holds answers under {known}, and {row} is now {meant}: choose "
                "another --output"
            )
        self._write_facts()

    def _write_facts(self) -> None:
        text = json.dumps(self.facts, indent=1) + "\n"
        path = self.directory / RUN_FILE
        partial = path.with_suffix(".partial")
        with self._writing():
            # Renamed when complete: a full disk must not cost what was there.
            try:
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def __getitem__(self, key: tuple[Row, QuestionId]) -> Answer:
        return self._answers[key]

    def __contains__(self, key: tuple[Row, QuestionId]) -> bool:
        return key in self._answers

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers.values())

    def add(self, answers: list[Answer]) -> None:
        """Keeps answers, on disk before this returns.

        Raises:
            ToolError: they cannot be written; earlier ones are kept.
        """
        lines = [json.dumps(answer.as_json(), ensure_ascii=False) + "\n" for answer in answers]
        with self._writing(), (self.directory / ANSWERS_FILE).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        for answer in answers:
            self._answers[answer.key] = answer

    def _load(self) -> Iterator[Answer]:
        path = self.directory / ANSWERS_FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ToolError(f"cannot read {path}: {error.strerror}") from error
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            # A run was killed while it wrote: that answer is asked for again.
            with self._writing(), path.open("r+b") as file:
                file.truncate(whole)
        # Only \n ends a line: an answer may hold other marks of a line's end.
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
            try:
                yield Answer.of_json(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ToolError(
                    f"{path}:{number} is no answer of this tool ({error}): delete the line, or "
                    "choose another --output"
                ) from error

    def _read_run(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ToolError(f"{path} is not readable ({error}): choose another --output") from error
        return found if isinstance(found, dict) else {}

    def _writing(self) -> "_Writing":
        return _Writing(self.directory)


class _Writing:
    """Within, a failed write is a ToolError that says what to change."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise ToolError(
                f"cannot write results to {self.directory}: {error.strerror or error}. What is "
                "done is kept: make room or choose another --output, and run the command again"
            ) from error
