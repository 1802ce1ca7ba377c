"""Answers on disk: written one by one, so that a run that ends early is taken up again."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import at_dtype
from vllm_kvx.tools.evaluate.rows import with_dtype

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
class Question:
    """One prompt under one policy: what an answer is stored under.

    policy: the row it stands in, see ``rows``. length: tokens that the prompt was fitted or cut to,
    0 for short questions. index: which sample, from 0.
    """

    policy: str
    task: str
    length: int
    index: int


@dataclass(frozen=True)
class Answer:
    """What came out.

    score: share that is right, 0 to 1; for perplexity the mean negative logprob in nats.
    tokens: of the prompt. kept: share of the prompt's KV entries that the cache holds after it.
    read: share of them that a decode step reads. text: the answer, or what was measured.
    """

    question: Question
    score: float
    tokens: int
    kept: float
    read: float
    text: str


class Store:
    """The answers of one run in a directory.

    Raises:
        ToolError: the directory cannot be used, or holds the answers of another run.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        """facts: what the run is; stored beside the answers."""
        self.directory = directory
        self._answers: dict[Question, Answer] = {}
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
            self._answers[answer.question] = answer
        # What policies resolved to stays known when their answers are not asked for again.
        # Older runs have the KV cache dtype among their facts, and not in what names meant.
        at = at_dtype(before.get("kv_cache_dtype"))
        resolved = {row: with_dtype(name, at) for row, name in before.get(RESOLVED, {}).items()}
        known = {name: facts.get(name) or before.get(name) for name in IF_GIVEN}
        self.facts: dict[str, Any] = {**before, **facts, **known, RESOLVED: resolved}
        self._write_facts()

    def note_resolved(self, policy: str, name: str) -> None:
        """Keeps what the words in a policy's name meant when it answered.

        Raises:
            ToolError: it meant something else for answers that are here, or cannot be written.
        """
        known = self.facts[RESOLVED].setdefault(policy, name)
        if known != name:
            raise ToolError(
                f"{self.directory} holds answers under {known}, and {policy} is now {name}: choose "
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

    def __contains__(self, question: Question) -> bool:
        return question in self._answers

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers.values())

    def add(self, answers: list[Answer]) -> None:
        """Keeps answers, on disk before this returns.

        Raises:
            ToolError: they cannot be written; earlier ones are kept.
        """
        lines = [json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers]
        with self._writing(), (self.directory / ANSWERS_FILE).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        for answer in answers:
            self._answers[answer.question] = answer

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
                fields = json.loads(line)
                yield Answer(**{**fields, "question": Question(**fields["question"])})
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
