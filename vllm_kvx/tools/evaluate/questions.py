"""The questions of a run: every task's samples as prompts, at every length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.engine import Prompt
from vllm_kvx.tools.evaluate.perplexity import passages
from vllm_kvx.tools.evaluate.store import QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY
from vllm_kvx.tools.tasks.base import SECOND_TURN, FixedTask, Sample, Task
from vllm_kvx.tools.tasks.prompts import EncodedSample, encode, fitted, following, shortened
from vllm_kvx.tools.tasks.table import TASKS, tasks_named

DEFAULT_SAMPLES = 8
# Prompts for which another process is worth its start.
_FEW = 16
# Tokens that a second question has at most, with what a chat template puts around it; and by how
# many an answer may grow that is read again as a text.
_SECOND, _SPARE = 256, 16


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt and how its answer is judged.

    sample: None for perplexity, whose answer is forced.
    after: the question whose answer this one follows, in the next turn over the same text; the
    prompt is then as long as the real one may become, which `following` makes. None for a first.
    """

    prompt: Prompt
    task: Task | FixedTask | None = None
    sample: Sample | None = None
    after: QuestionId | None = None

    def second(self, question: QuestionId, tokenizer: Any) -> "PreparedPrompt | None":
        """The second question over the same text; None if the text has none."""
        if self.task is None or self.sample is None or self.sample.then is None:
            return None
        most = self.task.max_tokens
        longest = (*following(self.sample, "", tokenizer), *[0] * (most + _SPARE))
        return PreparedPrompt(Prompt(longest, most), self.task, self.sample.then, question)

    def score(self, text: str, nats: float) -> float:
        """An answer's score: the share in [0, 1] that is right; of perplexity its nats a token."""
        if self.task is None or self.sample is None:
            return nats
        return self.task.score(text, self.sample)


@dataclass(frozen=True)
class Suite:
    """What a run asks.

    generated: tasks whose prompts are made to each of `lengths`. fixed: data sets, whose texts are
    cut to the longest of them, or must fit, but for short ones: their questions have the length 0.
    begin: the first sample of each that is asked, counted from 0.
    samples: of each; None for all of a data set. turns: with 2, a second question is asked over
    every text that has one. text: the file of `perplexity`, if that is asked for; None for the
    built-in one.
    """

    generated: tuple[Task, ...]
    fixed: tuple[FixedTask, ...]
    perplexity: bool
    lengths: tuple[int, ...]
    samples: int | None
    seed: int = 0
    text: str | None = None
    turns: int = 1
    begin: int = 0

    @classmethod
    def of(
        cls, names: Sequence[str], longbench: str | None, ruler: str | None = None, **others: Any
    ) -> "Suite":
        """The tasks of these names and groups.

        longbench, ruler: folders of files, see ``tasks_named``.

        Raises:
            ToolError: a name is neither, or a folder does not have its file.
        """
        if not names:
            raise ToolError("no task is named: leave --tasks out, or see --tasks list")
        named = [name for name in names if name != PERPLEXITY]
        tasks = tasks_named(
            named, Path(longbench) if longbench else None, Path(ruler) if ruler else None
        )
        return cls(
            tuple(task for task in tasks if isinstance(task, Task)),
            tuple(task for task in tasks if isinstance(task, FixedTask)),
            PERPLEXITY in names,
            **others,
        )

    @property
    def tasks(self) -> tuple[Task | FixedTask, ...]:
        """Every task whose answers are scored: all but perplexity."""
        return (*self.generated, *self.fixed)

    @property
    def names(self) -> list[str]:
        """The names of the tasks; perplexity, if it is asked, is the last."""
        tasks = [task.name for task in self.tasks]
        return tasks + [PERPLEXITY] * self.perplexity

    @property
    def longest_answer(self) -> int:
        """Tokens that an answer has at most."""
        return max((task.max_tokens for task in self.tasks), default=1)

    @property
    def _count(self) -> int:
        return self.samples or DEFAULT_SAMPLES

    @property
    def _long(self) -> list[Task | FixedTask]:
        """The tasks that `lengths` concern."""
        return [task for task in self.tasks if isinstance(task, Task) or not task.is_short]

    def context(self, prepared: Mapping[QuestionId, PreparedPrompt], ahead: int = 0) -> int:
        """Tokens that an engine has to take: the longest prompt with its answer.

        ahead: tokens that a policy drafts behind a prompt, and for which there has to be room, too.
        """
        prompts = [each.prompt for each in prepared.values()]
        found = max(
            (len(p.token_ids) + max(p.max_tokens, len(p.forced), ahead) for p in prompts), default=1
        )
        if self._long or self.perplexity:
            return max(found, max(self.lengths) + max(self.longest_answer, ahead))
        return found

    def longest_prompt(self, prepared: Mapping[QuestionId, PreparedPrompt]) -> int:
        """Tokens of the longest prompt."""
        lengths = [len(each.prompt.token_ids) for each in prepared.values()]
        return max([*lengths, *(self.lengths if self._long else ())], default=1)

    def check(self, context: int) -> None:
        """Raise ToolError for a length at which a prompt with its answer outruns the context."""
        for task in self._long:
            second = task.max_tokens + _SECOND if self.turns > 1 else 0
            for length in self.lengths:
                if length + task.max_tokens + second > context:
                    raise ToolError(
                        f"length {length}: with {task.max_tokens + second} tokens of an answer to "
                        f"{task.name} that is more than the model's context of {context}: use "
                        f"--lengths up to {context - task.max_tokens - second}"
                    )
        if self.perplexity and max(self.lengths) > context:
            raise ToolError(
                f"length {max(self.lengths)} is more than the model's context of {context}: use "
                f"--lengths up to {context}"
            )

    def prepare(
        self, tokenizer_of: Callable[[], Any], progress: Callable[[int, int], None]
    ) -> dict[QuestionId, PreparedPrompt]:
        """The prompts, by the questions that they ask.

        tokenizer_of: loads the tokenizer, in each process that makes prompts; it can be pickled.
        progress: called with how many prompts are made, of how many.

        Raises:
            ToolError: a task's shortest prompt is longer, or a data set cannot be read.
        """
        wanted = [
            QuestionId(task.name, length, index)
            for length in self.lengths
            for task in self.generated
            for index in range(self.begin, self.begin + self._count)
        ]
        tokenizer = tokenizer_of()
        end = None if self.samples is None else self.begin + self.samples
        data = {task: task.samples()[self.begin : end] for task in self.fixed}
        total = len(wanted) + sum(map(len, data.values()))
        prepared: dict[QuestionId, PreparedPrompt] = {}
        for question, made in zip(wanted, self._made(wanted, tokenizer_of), strict=True):
            prepared[question] = made
            progress(len(prepared), total)
        for task, samples in data.items():
            longest = 0 if task.is_short else max(self.lengths)
            for index, sample in enumerate(samples, self.begin):
                encoded = _fixed(task, sample, longest, tokenizer)
                prompt = Prompt(encoded.token_ids, task.max_tokens)
                question = QuestionId(task.name, longest, index)
                prepared[question] = PreparedPrompt(prompt, task, sample)
                progress(len(prepared), total)
        if self.turns > 1:
            seconds = {
                QuestionId(question.task + SECOND_TURN, question.length, question.index): second
                for question, first in prepared.items()
                if (second := first.second(question, tokenizer)) is not None
            }
            if not seconds:
                raise ToolError(
                    "--turns 2: no text of these --tasks has a second question: name others, such "
                    "as niah_multikey_1, several_words, code_lookup or question_first"
                )
            prepared |= seconds
        for length in self.lengths if self.perplexity else ():
            for index, passage in enumerate(passages(self.text, tokenizer, length, self._count)):
                prompt = Prompt(passage.token_ids, 0, passage.continuation)
                prepared[QuestionId(PERPLEXITY, length, index)] = PreparedPrompt(prompt)
        return prepared

    def _made(
        self, wanted: Sequence[QuestionId], tokenizer_of: Callable[[], Any]
    ) -> Iterator[PreparedPrompt]:
        workers = min(cpu_count() or 1, len(wanted) // _FEW)
        if workers < 2:
            _load(tokenizer_of, self.seed)
            yield from map(_prepare, wanted)
            return
        start = get_context("spawn")
        with ProcessPoolExecutor(workers, start, _load, (tokenizer_of, self.seed)) as pool:
            yield from pool.map(_prepare, wanted, chunksize=4)


def _fixed(task: FixedTask, sample: Sample, longest: int, tokenizer: Any) -> EncodedSample:
    if task.is_short:
        return encode(sample, tokenizer, task.chat)
    if task.may_be_cut:
        return shortened(sample, longest, tokenizer, task.chat)
    encoded = encode(sample, tokenizer, task.chat)
    if (tokens := len(encoded.token_ids)) > longest:
        raise ToolError(
            f"{task.name}: a prompt has {tokens} tokens, and what it asks for could be in what is "
            f"cut: use --lengths {tokens} or more, or leave the task out"
        )
    return encoded


_LOADED: dict[str, Any] = {}


def _load(tokenizer_of: Callable[[], Any], seed: int) -> None:
    _LOADED.update(tokenizer=tokenizer_of(), seed=seed)


def _prepare(question: QuestionId) -> PreparedPrompt:
    task = TASKS[question.task]
    # Without the length: a longer prompt asks the same.
    seed = f"{_LOADED['seed']}-{question.task}-{question.index}"
    encoded = fitted(task, seed, question.length, _LOADED["tokenizer"])
    return PreparedPrompt(Prompt(encoded.token_ids, task.max_tokens), task, encoded.sample)


@lru_cache(maxsize=4)
def load_tokenizer(model: str, revision: str | None) -> Any:
    """A model's tokenizer, a fast one.

    Raises:
        ToolError: there is none that loads.
    """
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise ToolError(f"{model} has no tokenizer that loads: {error}") from error
    if not tokenizer.is_fast:
        raise ToolError(f"{model} has no fast tokenizer, by which evidence is located")
    return tokenizer
