"""RULER's prompts (arXiv 2404.06654) from files that its own scripts made.

A line has `input`, the prompt with or without the beginning of its answer, `outputs`, what a right
answer has, and in newer files `answer_prefix`, that beginning.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks.base import FixedTask, Sample
from vllm_kvx.tools.tasks.jsonl import objects, text_of, texts_of
from vllm_kvx.tools.tasks.scoring import share_found

PREFIX, GROUP = "ruler_", "ruler_files"
# RULER's scripts write `TASK/validation.jsonl`, or the test split.
_SPLITS = ("validation", "test")


class _Kind(NamedTuple):
    """What RULER's constants say of a kind of task.

    max_tokens: the longest answer. begins: the first words of what the answer is made to begin
    with. any: whether one of the outputs is enough; otherwise each counts its share.
    """

    max_tokens: int
    begins: str
    any: bool = False


# By how a task's name begins.
_KINDS = {
    "niah": _Kind(128, "The special magic "),
    "vt": _Kind(30, "Answer:"),
    "cwe": _Kind(120, "Answer:"),
    "fwe": _Kind(50, "Answer:"),
    "qa": _Kind(32, "Answer:", any=True),
}


class RulerFile(FixedTask):
    """The prompts in one of RULER's files, with its longest answer and metric.

    name: of the task: `ruler_` and the file's name, or its folder's.

    Raises:
        ToolError: the name is that of no task of RULER.
    """

    may_be_cut = False

    def __init__(self, name: str, path: Path) -> None:
        task = name.removeprefix(PREFIX)
        kind = next((k for k in _KINDS if re.match(rf"{k}([^a-z]|$)", task)), None)
        if kind is None:
            raise ToolError(
                f"{path}: the tasks of RULER are named {', '.join(f'{k}...' for k in _KINDS)}: "
                "name the file, or its folder, after its task"
            )
        self.name, self.path, self._kind = name, path, _KINDS[kind]
        self.about = f"RULER: {task}, from a file"
        self.max_tokens = self._kind.max_tokens

    def samples(self) -> tuple[Sample, ...]:
        return self._samples

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ToolError(f"cannot read {self.path}: {error.strerror}") from error
        found = []
        for fields, where in objects(data, str(self.path)):
            text, outputs = text_of(fields, "input", where), texts_of(fields, "outputs", where)
            begins = ""
            if "answer_prefix" in fields:
                begins = text_of(fields, "answer_prefix", where).strip()
                text = text.rstrip().removesuffix(begins)
            elif (begin := text.rfind(f" {self._kind.begins}")) >= 0:
                text, begins = text[:begin], text[begin:].strip()
            found.append(Sample(text.rstrip(), outputs, begins=begins))
        if not found:
            raise ToolError(f"{self.path} holds no samples")
        return tuple(found)

    def score(self, answer: str, sample: Sample) -> float:
        """RULER's string_match_all; of questions string_match_part, the best of the outputs."""
        if not self._kind.any:
            return share_found(answer, sample.references)
        return max(share_found(answer, [reference]) for reference in sample.references)


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a folder by their tasks' names: its .jsonl files, and its folders' splits.

    Raises:
        ToolError: there are none.
    """
    if not folder.is_dir():
        raise ToolError(f"{folder}: no such folder; RULER's files are TASK.jsonl in a folder")
    paths = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    for split in _SPLITS:
        for path in sorted(folder.glob(f"*/{split}.jsonl")):
            paths.setdefault(path.parent.name, path)
    if not paths:
        raise ToolError(f"{folder} has neither TASK.jsonl nor TASK/validation.jsonl of RULER")
    return {PREFIX + stem: path for stem, path in paths.items()}


def named(name: str, folder: Path | None) -> list[RulerFile]:
    """The task of this name; of `ruler_files` all that the folder has.

    Raises:
        ToolError: no folder is given, or it has no such file.
    """
    if folder is None:
        raise ToolError(f"{name} is read from a folder of RULER's files: name it with --ruler")
    files = files_in(folder)
    if name == GROUP:
        return [RulerFile(*each) for each in files.items()]
    if name not in files:
        raise ToolError(f"{name}: {folder} has {', '.join(files)}")
    return [RulerFile(name, files[name])]
