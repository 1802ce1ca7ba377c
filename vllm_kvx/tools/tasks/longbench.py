"""LongBench v1 (arXiv 2308.14508): real questions over long texts, from files or from the hub."""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks.base import FixedTask, Sample
from vllm_kvx.tools.tasks.longbench_formats import FORMATS
from vllm_kvx.tools.tasks.longbench_metrics import check_installed, classification

PREFIX = "longbench_"
NAMES: tuple[str, ...] = tuple(PREFIX + data_set for data_set in FORMATS)
# Where the hub has the files, in a zip file.
HUB_REPOSITORY, HUB_FILE, HUB_FOLDER = "THUDM/LongBench", "data.zip", "data"


@dataclass(frozen=True)
class Row:
    """A line of a data set's file; classes are empty where an answer is no class."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


class LongBench(FixedTask):
    """One of LongBench's data sets, with its prompts, longest answers and metric.

    data_set: a name of FORMATS. folder: has the file `<data_set>.jsonl`; None for the hub.
    """

    def __init__(self, data_set: str, folder: Path | None) -> None:
        self.data_set, self.folder = data_set, folder
        self.format = FORMATS[data_set]
        self.name = PREFIX + data_set
        self.about = f"LongBench: {data_set}"
        self.max_tokens = self.format.max_tokens
        self.chat = self.format.chat

    def samples(self) -> tuple[Sample, ...]:
        check_installed(self.format.metric)
        return tuple(
            Sample(
                text=self.format.prompt.format(context=row.context, input=row.input),
                references=row.answers,
            )
            for row in self._rows
        )

    def score(self, answer: str, sample: Sample) -> float:
        """The metric's best over the references."""
        if self.format.first_line:
            answer = answer.lstrip("\n").split("\n")[0]
        # All rows of a data set have the same classes.
        classes = self._rows[0].classes
        return max(self.format.metric(answer, text, classes) for text in sample.references)

    @cached_property
    def _rows(self) -> tuple[Row, ...]:
        if self.folder is None:
            data, where = _from_hub(self.data_set), f"{HUB_REPOSITORY}: {self.data_set}.jsonl"
        else:
            path = self.folder / f"{self.data_set}.jsonl"
            data, where = _from_folder(path), str(path)
        # Only \n ends a line: other marks of a line's end may stand in a text.
        lines = enumerate(data.split(b"\n"), start=1)
        rows = tuple(
            _row(line, f"{where}, line {number}", self.format.metric is classification)
            for number, line in lines
            if line.strip()
        )
        if not rows:
            raise ToolError(f"{where} holds no samples")
        return rows


def data_sets_in(folder: Path) -> tuple[str, ...]:
    """The data sets whose files are in the folder, in LongBench's order.

    Raises:
        ToolError: there are none.
    """
    if not folder.is_dir():
        raise ToolError(f"{folder}: no such folder; LongBench is a folder of .jsonl files")
    found = tuple(name for name in FORMATS if (folder / f"{name}.jsonl").is_file())
    if not found:
        raise ToolError(
            f"{folder} has none of LongBench's files: they are named narrativeqa.jsonl, "
            "qasper.jsonl and so on"
        )
    return found


def _from_folder(path: Path) -> bytes:
    if not path.is_file():
        there = ", ".join(data_sets_in(path.parent))
        raise ToolError(f"{path}: no such file; the folder has {there}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from error


def _from_hub(data_set: str) -> bytes:
    instead = "give a folder of LongBench's .jsonl files instead"
    try:
        import huggingface_hub  # it comes with transformers
    except ModuleNotFoundError as error:
        raise ToolError(
            f"huggingface_hub is missing, which fetches {HUB_REPOSITORY}: {instead}"
        ) from error
    try:
        path = huggingface_hub.hf_hub_download(HUB_REPOSITORY, HUB_FILE, repo_type="dataset")
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{HUB_FOLDER}/{data_set}.jsonl")
    except Exception as error:  # the hub's client raises what it likes
        reason = str(error).strip().partition("\n")[0]
        raise ToolError(
            f"cannot fetch {HUB_FILE} of {HUB_REPOSITORY} from the hub ({reason}): {instead}"
        ) from error


def _row(line: bytes, where: str, needs_classes: bool) -> Row:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ToolError(f"{where}: it is not UTF-8 text") from error
    except ValueError as error:
        raise ToolError(f"{where}: it is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ToolError(f"{where}: it is no JSON object")
    for name in ("context", "input"):
        if not isinstance(fields.get(name), str):
            raise ToolError(f"{where}: {_fault(fields, name)}; it must be a string")
    answers, classes = fields.get("answers"), fields.get("all_classes")
    if not answers or not _are_strings(answers):
        raise ToolError(f"{where}: {_fault(fields, 'answers')}; it must be a list of strings")
    if needs_classes and not (classes and _are_strings(classes)):
        raise ToolError(f"{where}: {_fault(fields, 'all_classes')}; it must be a list of strings")
    return Row(fields["context"], fields["input"], tuple(answers), tuple(classes or ()))


def _fault(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        return f'the field "{name}" is missing'
    shown = json.dumps(fields[name], ensure_ascii=False)
    return f'"{name}" is {shown if len(shown) <= 40 else shown[:37] + "..."}'


def _are_strings(values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and all(isinstance(value, str) for value in values)
    )
