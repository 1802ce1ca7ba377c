"""The training of `vllm-kvx tune-speed`: one process a GPU, started by the command.

python -m vllm_kvx.tools.tune_speed.train DIR          trains DIR's job, from its last checkpoint on
python -m vllm_kvx.tools.tune_speed.train DIR --trial  runs one step of the largest batch
python -m vllm_kvx.tools.tune_speed.train DIR --measure MODEL
                                              agreement of a checkpoint's held-out answers
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed import packs, trial
from vllm_kvx.tools.tune_speed.batches import Batches, agreement_of
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.progress import Progress, sentence
from vllm_kvx.tools.tune_speed.student import Student, job_and_device
from vllm_kvx.tools.tune_speed.visibility import Batch

# Files and folders of a job's directory.
EXAMPLES, CHECKPOINTS, ADAPTER, WEIGHTS = "examples.jsonl", "checkpoints", "adapter", "weights"
BEFORE, LOSSES, MERGED = "before.json", "losses.json", "merged.json"
FULL_DEPTH = "full_depth.json"

# The share of the steps in which the learning rate rises.
WARMUP = 0.03
# The exit code where it cannot be done, for a reason that has been said.
REFUSED = 2

Found = dict[str, dict[str, float | int]]


class SpeedTrainer(Trainer):
    """transformers' trainer, whose evaluation is agreement with the full-depth model."""

    def __init__(
        self, student: Student, learned: Batches, held_out: Batches, **options: Any
    ) -> None:
        super().__init__(model=student.trained, train_dataset=learned, **options)
        self._learnt, self._batches = learned.learnt, len(learned)
        self._student, self._held_out = student, held_out
        self._latest: tuple[int, Found] | None = None
        # The step of the latest batch, and which of the step's batches it was.
        self._batch = (-1, 0)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(Progress())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of a batch: its sum over the tokens that are learnt, in shares of how many those
        of a batch are on average, so that each weighs the same in all batches."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        # Where several batches make a step their gradients are averaged.
        shares = self._learnt * self.current_gradient_accumulation_steps
        with self._student.computing():
            if "targets" not in inputs:
                inputs = {**inputs, "teacher": self._student.teacher_states(Batch(**inputs))}
            full = self._next_is_at_full_depth()
            loss: Tensor = model(**inputs, at_full_depth=full) * (inputs["answers"].sum() / shares)
        self.accelerator.backward(loss)
        return loss.detach()

    def _next_is_at_full_depth(self) -> bool:
        """Whether the next batch is learnt without the cut. Such batches are evenly spread over the
        run, in the share that the job says; a run that is taken up again and all processes choose
        the same ones."""
        job, step = self._student.job, self.state.global_step
        self._batch = (step, self._batch[1] + 1 if self._batch[0] == step else 0)
        # An epoch's last step may have fewer batches.
        batches = math.ceil(self._batches / max(job.gpus, 1))
        epoch, within = divmod(step, math.ceil(batches / job.accumulate))
        number = epoch * batches + within * job.accumulate + self._batch[1]
        share = job.at_full_depth
        return math.floor((number + 1) * share) > math.floor(number * share)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Agreement of held-out answers with the full-depth model's, into the log."""
        known = self._latest
        found = self.agreement()
        metrics = {f"held_out_{name}": value for name, value in found["all"].items()}
        if self._latest is not known:
            # The trainer asks twice where the last step is one that is measured.
            self.log({**metrics, "by": found})  # type: ignore[dict-item]
        return metrics

    def agreement(self) -> Found:
        """The agreement on held-out answers (`agreement_of`), measured once a step."""
        step = self.state.global_step
        if self._latest is None or self._latest[0] != step:
            self._latest = (
                step,
                agreement_of(
                    self._student, self._held_out, self.args.process_index, self.args.world_size
                ),
            )
        return self._latest[1]


def arguments(job: Job, directory: Path, steps: int, checkpointing: bool) -> TrainingArguments:
    """What transformers' trainer is told."""
    every = max(math.ceil(steps / job.evaluations), 1)
    return TrainingArguments(
        output_dir=str(directory / CHECKPOINTS),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=job.accumulate,
        num_train_epochs=job.epochs,
        learning_rate=job.lr,
        lr_scheduler_type="linear",
        # As a share of the steps it is rounded up, and the first step of a warm-up learns nothing.
        warmup_steps=round(WARMUP * steps),
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=job.seed,
        # `Student.computing` narrows what can be narrow.
        bf16=False,
        use_cpu=job.gpus == 0,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=1,
        logging_steps=max(steps // 200, 1),
        logging_nan_inf_filter=False,
        report_to="none",
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )


def train(directory: Path) -> None:
    """Trains the job of a directory and leaves there its adapter or weights, and its losses.

    Raises:
        ToolError: it cannot be done as asked.
    """
    job, device = job_and_device(directory)
    examples = packs.read(directory / EXAMPLES)
    held_out, learned = examples[: job.held_out], examples[job.held_out :]
    batches, measured = Batches(learned, job), Batches(held_out, job)
    steps = math.ceil(math.ceil(len(batches) / max(job.gpus, 1) / job.accumulate) * job.epochs)
    # LoRA's first weights are drawn.
    set_seed(job.seed)
    student = Student(job, device)
    trainer = SpeedTrainer(
        student,
        batches,
        measured,
        args=arguments(job, directory, steps, _checkpointing(directory, job)),
        eval_dataset=measured,
        data_collator=_only,
    )
    main = trainer.is_world_process_zero()
    last = _last_checkpoint(directory / CHECKPOINTS, main)
    if last is None:
        before = trainer.agreement()
        if not math.isfinite(before["all"]["kl"]):
            raise ToolError(f"{job.model} predicts no finite logits: its weights are damaged")
        if main:
            write(directory / BEFORE, before)
            print(f"held out, before tuning: {sentence(before['all'])}", file=sys.stderr)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=last)
    seconds = time.perf_counter() - began
    # Into the log, whether or not the last step was one that is measured.
    trainer.evaluate()
    after = trainer.agreement()
    if not main:
        return
    if job.method == "lora":
        student.trained.save_pretrained(str(directory / ADAPTER))
    else:
        student.trained.save_pretrained(str(directory / WEIGHTS))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    write(
        directory / LOSSES,
        {
            "before": json.loads((directory / BEFORE).read_text(encoding="utf-8")),
            "after": after,
            "steps": trainer.state.global_step,
            "seconds": round(seconds, 2),
            "resumed": last is not None,
            "examples": len(learned),
            "tokens_per_epoch": sum(map(len, learned)),
            "peak_gib": peak and round(peak, 3),
            "log": trainer.state.log_history,
        },
    )


def measure(directory: Path, checkpoint: str) -> None:
    """Writes the agreement of a checkpoint that was made of a job, of its weights as they are:
    under the cut, and at full depth."""
    job, device = job_and_device(directory)
    held_out = packs.read(directory / EXAMPLES)[: job.held_out]
    student = Student(job, device, checkpoint)
    measured = Batches(held_out, job)
    write(directory / FULL_DEPTH, agreement_of(student, measured, at_full_depth=True))
    # It is written last.
    write(directory / MERGED, agreement_of(student, measured))


def _last_checkpoint(checkpoints: Path, main: bool) -> str | None:
    """The newest checkpoint that is whole; those that a kill left unfinished are deleted."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    # It is written last.
    whole = [path for path in found if (path / TRAINER_STATE_NAME).exists()]
    if main:
        for path in set(found) - set(whole):
            shutil.rmtree(path)
    return str(whole[-1]) if whole else None


def _checkpointing(directory: Path, job: Job) -> bool:
    """Whether activations are computed again."""
    if job.checkpointing != "auto" or not (directory / trial.TRIED).exists():
        return job.checkpointing != "off"
    tried = json.loads((directory / trial.TRIED).read_text(encoding="utf-8"))
    return bool(tried["checkpointing"])


def _only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The one batch of a loader's step."""
    (item,) = items
    return item


def _leave_together() -> None:
    """Ends the group of processes, if there is one, when all of them have ended their work.

    A group that is left to the end of the interpreter has threads then, and at times one of them
    aborts its process ("terminate called without an active exception").
    """
    if torch.distributed.is_initialized():
        state = PartialState()
        state.wait_for_everyone()
        state.destroy_process_group()


def write(path: Path, what: Any) -> None:
    """Stores JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code REFUSED and one line on stderr if it cannot be done."""
    parser = argparse.ArgumentParser(prog="vllm_kvx.tools.tune_speed.train")
    parser.add_argument("directory", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--trial", action="store_true")
    what.add_argument("--measure", metavar="MODEL")
    args = parser.parse_args(argv)
    try:
        if args.trial:
            trial.run(args.directory)
        elif args.measure:
            measure(args.directory, args.measure)
        else:
            train(args.directory)
    except torch.cuda.OutOfMemoryError:
        error: Exception = ToolError(trial.after_out_of_memory(args.directory))
    except ToolError as refusal:
        error = refusal
    else:
        _leave_together()
        return 0
    print(f"vllm-kvx tune-speed: error: {error}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
