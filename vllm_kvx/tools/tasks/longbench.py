"""LongBench v1 (arXiv 2308.14508): real questions over long texts, from files or from the hub."""

import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tasks.base import FixedTask, Sample
from vllm_kvx.tools.tasks.jsonl import objects, text_of, texts_of
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
        needs_classes = self.format.metric is classification
        rows = tuple(_row(fields, line, needs_classes) for fields, line in objects(data, where))
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


def _row(fields: dict[str, Any], where: str, needs_classes: bool) -> Row:
    context, asked = (text_of(fields, name, where) for name in ("context", "input"))
    answers, classes = texts_of(fields, "answers", where), fields.get("all_classes")
    if needs_classes:
        classes = texts_of(fields, "all_classes", where)
    return Row(context, asked, answers, tuple(classes or ()))
