"""Examples by batch, and the agreement of a student over them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vllm_kvx.tools.tune_speed import packs
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.loss import Agreement
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.student import Student
from vllm_kvx.tools.tune_speed.visibility import Batch

# Tokens of the prompts whose agreement is told apart.
LENGTHS = (512, 2048, 8192, 32768)


def tensors(examples: Sequence[Example], job: Job) -> dict[str, Tensor]:
    """What `Student.trained` takes of examples that run at once."""
    batch = Batch.of(
        [(example.prompt, example.answer) for example in examples],
        [example.earlier for example in examples],
    )
    inputs = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if job.loss == "sft":
        inputs["targets"] = torch.tensor([t for example in examples for t in example.learnt()])
    return inputs


class Batches(Dataset[dict[str, Tensor]]):
    """Examples by batch.

    Attributes:
        learnt: tokens of answers in a batch, on average.
    """

    def __init__(self, examples: Sequence[Example], job: Job) -> None:
        self._examples, self._job = examples, job
        self._batches = packs.packs(examples, job.batch_tokens, job.seed)
        self.learnt = sum(len(e.learnt()) for e in examples) / max(len(self._batches), 1)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return tensors(self.members(index), self._job)

    def members(self, index: int) -> list[Example]:
        """The examples of a batch, in its order."""
        return [self._examples[i] for i in self._batches[index]]


def agreement_of(
    student: Student,
    held_out: Batches,
    rank: int = 0,
    world: int = 1,
    at_full_depth: bool = False,
) -> dict[str, dict[str, float | int]]:
    """The student's agreement with the full-depth model on held-out answers.

    Returns: `Agreement.as_json` of `all` answers, of each kind and of each range of lengths.

    rank, world: this process among those that measure together; each gets the whole.
    at_full_depth: without the cut, where the model is to have stayed what it was.
    """
    found: dict[str, Agreement] = {}
    device = student.trained.device
    for index in range(rank, len(held_out), world):
        inputs = held_out[index]
        inputs.pop("targets", None)
        with student.computing():
            each = student.agreements(Batch(**inputs).to(device), at_full_depth)
        turns = [(e.kind, prompt) for e in held_out.members(index) for prompt, _ in e.spans()]
        for (kind, prompt), one in zip(turns, each, strict=True):
            for name in ("all", kind, _length_name(prompt)):
                found[name] = found.get(name, Agreement()) + one
    if world > 1:
        gathered: list[Any] = [None] * world
        torch.distributed.all_gather_object(gathered, found)
        found = {}
        for part in gathered:
            for name, one in part.items():
                found[name] = found.get(name, Agreement()) + one
    return {name: found[name].as_json() for name in sorted(found)}


def _length_name(tokens: int) -> str:
    """`<= 2048 tokens`, the bucket of a prompt's length."""
    longest = next((length for length in LENGTHS if tokens <= length), None)
    return f"<= {longest} tokens" if longest else f"> {LENGTHS[-1]} tokens"
