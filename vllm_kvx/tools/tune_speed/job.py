"""What is to be tuned and how: the settings that a run and its continuation share."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.cut import Cut

FILE = "job.json"


@dataclass(frozen=True)
class Job:
    """The settings of `vllm-kvx tune-speed`, which options.py explains.

    model, revision: the checkpoint that is tuned. cut: what upper layers run; None tunes at full
    depth, to compare with. loss: `self-distillation` or `sft`. hidden_loss: weight of the upper
    layers' states beside it. at_full_depth: the share of the batches that are learnt without the
    cut. accumulate: batches of a step on one GPU. max_length, answer_tokens: of the longest
    example, and of the longest answer. turns: of an example, at most. held_out: examples at the
    file's beginning that only measure. evaluations: how often they do.
    checkpointing: `auto`, `on` or `off`. gpus: processes, 0 for one on the CPU.
    batches: how they are put together; runs that do not say so had examples of one length.
    """

    model: str
    revision: str | None
    cutoff: int | None
    anchors: int
    tail: int
    method: str
    loss: str
    rank: int
    alpha: int
    dropout: float
    lr: float
    epochs: float
    batch_tokens: int
    accumulate: int
    max_length: int
    answer_tokens: int
    held_out: int
    evaluations: int
    seed: int
    checkpointing: str
    gpus: int
    device: str
    hidden_loss: float = 0.0
    at_full_depth: float = 0.0
    turns: int = 1
    batches: str = "of one length"

    @property
    def cut(self) -> Cut | None:
        if self.cutoff is None:
            return None
        return Cut(self.cutoff, self.anchors, self.tail)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1) + "\n"
        (directory / FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Job":
        """What `write` stored.

        Raises:
            ToolError: there is none, or it is another version's.
        """
        path = directory / FILE
        try:
            entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**entry)
        except (OSError, ValueError, TypeError) as error:
            raise ToolError(f"cannot read {path}: {error}; choose another --out") from error

    def check_continues(self, before: "Job", directory: Path) -> None:
        """Raise ToolError if this is not the same job as one that was begun."""
        if before.batches != self.batches:
            raise ToolError(
                f"{directory} holds a run that another version began, with other batches: choose "
                f"another --out, with --examples {directory.parent} for its answered prompts"
            )
        check_same(asdict(self), asdict(before), directory)


def check_same(now: Mapping[str, Any], before: Mapping[str, Any], directory: Path) -> None:
    """Raise ToolError if a run's options, by name, are not those that it was begun with."""
    for name, mine in now.items():
        old = before.get(name)
        if mine != old:
            raise ToolError(
                f"{directory} holds a run with {name} {old}, not {mine}: give the same options to "
                "continue it, or another --out"
            )
