"""The model that is tuned, and the full-depth model that it is to agree with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.tools.checkpoint.dense_decoder import choose_device
from vllm_kvx.tools.checkpoint.loading import load_weights
from vllm_kvx.tools.tune_speed import packed_attention
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.loss import (
    Agreement,
    agreements,
    distillation_loss,
    hidden_loss,
    supervised_loss,
)
from vllm_kvx.tools.tune_speed.visibility import Batch, answer_states

# What LoRA adapts: every projection of attention and MLP, by the names that the four supported
# architectures share.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def job_and_device(directory: Path) -> tuple[Job, torch.device]:
    """The job of a directory, and this process's device: each of several has a GPU."""
    job = Job.read(directory)
    device = choose_device(job.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    return job, device


def load(model: str, revision: str | None, dtype: torch.dtype | str) -> Any:
    """A checkpoint's model on the CPU, whose layers run sequences behind each other.

    Raises:
        ToolError: the weights cannot be loaded or are not all there.
    """
    loaded = load_weights(model, revision, dtype, attn_implementation=packed_attention.NAME)
    loaded.config.use_cache = False
    return loaded


class Student:
    """A model that is tuned under a cut, by LoRA or in full.

    Attributes:
        trained: what an optimizer takes: peft's model, or the model itself. Calling it with a
            batch's tensors and what it is to learn gives the loss.
    """

    def __init__(self, job: Job, device: torch.device, tuned: str | None = None) -> None:
        """Loads the checkpoint, in bfloat16 under LoRA on a GPU, otherwise in float32.

        tuned: the checkpoint that was made of it, to be measured in the place of one that is tuned.

        Raises:
            ToolError: the weights cannot be loaded.
        """
        self.job = job
        self._narrow = device.type == "cuda"
        narrow = torch.bfloat16 if self._narrow else torch.float32
        lora = job.method == "lora" and tuned is None
        dtype = narrow if lora or tuned else torch.float32
        model = load(tuned or job.model, None if tuned else job.revision, dtype).to(device)
        self._model, self._teacher = model, None
        if not lora:
            # It learns nothing, so half of the bytes do.
            teacher = load(job.model, job.revision, narrow).to(device)
            self._teacher = teacher.eval().requires_grad_(False)
        self._teacher_head = (self._teacher or model).lm_head
        # The layers whose states are compared, where they are.
        self._watched = job.cutoff if job.hidden_loss else None

        def loss(*args: Any, **inputs: Any) -> Tensor:
            return self._loss(*args, **inputs)

        # A function, not a bound method: accelerate would bind that to the model.
        model.forward = loss
        self.trained = self._with_adapter() if lora else model

    def _with_adapter(self) -> Any:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        config = LoraConfig(
            r=self.job.rank,
            lora_alpha=self.job.alpha,
            lora_dropout=self.job.dropout,
            target_modules=list(PROJECTIONS),
        )
        adapted: Any = get_peft_model(self._model, config)
        layers: list[Any] = [m for m in adapted.modules() if isinstance(m, BaseTunerLayer)]
        for layer in layers if self._narrow else ():
            # It would widen each input to the adapter's float32, for autocast to narrow it.
            layer.cast_input_dtype_enabled = False
        return adapted

    def computing(self) -> torch.autocast:
        """Around a forward pass: the model computes in bfloat16 on a GPU, whatever its weights.

        Around a single one, since weights that it narrowed are kept until its end.
        """
        return torch.autocast("cuda", torch.bfloat16, enabled=self._narrow)

    def _loss(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompts: Tensor,
        answers: Tensor,
        sequences: Tensor,
        teacher: Tensor | None = None,
        targets: Tensor | None = None,
        at_full_depth: bool = False,
    ) -> Tensor:
        """The loss of a batch (`Batch`'s tensors), under the cut or at full depth.

        teacher: (states, n, hidden), the full-depth model's (`teacher_states`); or targets: (n,)
            int64, the answers.
        """
        batch = Batch(tokens, lengths, prompts, answers, sequences)
        head, cut = self._model.lm_head, None if at_full_depth else self.job.cut
        if teacher is None:
            assert targets is not None
            states = answer_states(self._model, batch, cut)
            return supervised_loss(states[-1], head, targets)
        states = answer_states(self._model, batch, cut, self._watched)
        loss = distillation_loss(states[-1], head, teacher[-1], self._teacher_head)
        if self._watched is not None:
            loss = loss + self.job.hidden_loss * hidden_loss(states[:-1], teacher[:-1])
        return loss

    @contextmanager
    def _full_depth_model(self) -> Iterator[Any]:
        """The model before tuning."""
        if self._teacher is not None:
            yield self._teacher
            return
        training = self._model.training
        self._model.eval()
        try:
            with self.trained.disable_adapter():
                yield self._model
        finally:
            self._model.train(training)

    @torch.no_grad()
    def teacher_states(self, batch: Batch) -> Tensor:
        """The full-depth model's states of the n tokens that predict the answers'.

        Returns: (states, n, hidden), the model's dtype: after each upper layer, if their distance
            is part of the loss, and last the final ones.
        """
        return self._teacher_states(batch, self._watched)

    def _teacher_states(self, batch: Batch, watched: int | None) -> Tensor:
        with self._full_depth_model() as model:
            return answer_states(model, batch, watched=watched)

    @torch.no_grad()
    def agreements(self, batch: Batch, at_full_depth: bool = False) -> list[Agreement]:
        """The agreement with the full-depth model on each answer of a batch.

        at_full_depth: the student runs every token through every layer; else it runs under the cut.
        """
        teacher = self._teacher_states(batch, None)[-1]
        training = self._model.training
        self._model.eval()
        try:
            cut = None if at_full_depth else self.job.cut
            states = answer_states(self._model, batch, cut)[-1]
        finally:
            self._model.train(training)
        return agreements(
            states, self._model.lm_head, teacher, self._teacher_head, batch.answers.tolist()
        )
