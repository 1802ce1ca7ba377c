"""Whether training fits into a GPU's memory, found out before anything long starts."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.plan import SHORTEST, TURN
from vllm_kvx.tools.tune_speed.student import Student, job_and_device
from vllm_kvx.tools.tune_speed.visibility import Batch

# What was found out, in a job's directory.
TRIED = "tried.json"
# Tokens of the prompt in a batch of short prompts: of these the upper layers run nearly all rows.
_SHORT = 16


def run(directory: Path) -> None:
    """Tries one step, forward and backward, of each kind of largest batch.

    What that needs is what training needs. Finds out whether activations have to be computed again
    in the backward pass, and writes it to TRIED.

    Raises:
        ToolError: the GPU's memory does not suffice.
    """
    job, device = job_and_device(directory)
    ways = {"auto": (False, True), "on": (True,), "off": (False,)}[job.checkpointing]
    if device.type == "cpu":
        # Memory is not what a CPU lacks.
        ways = ways[:1]
    for checkpointing in ways:
        if _fits(job, device, checkpointing):
            _write(directory, checkpointing)
            return
    total = torch.cuda.mem_get_info(device)[1] / 2**30
    raise ToolError(f"{_too_large(job)}, needs more than this GPU's {total:.0f} GiB: {_REMEDIES}")


_REMEDIES = (
    "use smaller --batch-tokens or --max-length, --method lora, --checkpointing auto, no "
    "--hidden-loss, no --at-full-depth, or a smaller model"
)


def after_out_of_memory(directory: Path) -> str:
    """What to do where training ran out of memory all the same; another try may do it by itself."""
    job = Job.read(directory)
    tried = json.loads((directory / TRIED).read_text()) if (directory / TRIED).exists() else {}
    if job.checkpointing == "auto" and not tried.get("checkpointing", True):
        _write(directory, True)
        return (
            "out of GPU memory: the same command goes on and computes activations again in the "
            "backward pass"
        )
    return f"{_too_large(job)}, does not fit into the GPU's memory: {_REMEDIES}"


def _too_large(job: Job) -> str:
    return f"a batch of {job.batch_tokens} tokens, with prompts of up to {job.max_length}"


def _write(directory: Path, checkpointing: bool) -> None:
    text = json.dumps({"checkpointing": checkpointing}) + "\n"
    (directory / TRIED).write_text(text, encoding="utf-8")


def _fits(job: Job, device: torch.device, checkpointing: bool) -> bool:
    try:
        student = Student(job, device)
        student.trained.train()
        if checkpointing:
            student.trained.gradient_checkpointing_enable({"use_reentrant": False})
        learned = [p for p in student.trained.parameters() if p.requires_grad]
        reserve = None
        if job.gpus > 1:
            # Where processes exchange their gradients.
            reserve = torch.empty(sum(p.numel() for p in learned), device=device)
        optimizer = torch.optim.AdamW(learned, lr=0.0)
        # The short prompts, which need the most, come when there are gradients already, as there
        # are for the later batches of a step.
        for batch in largest(job, device):
            # Long tails may make more rows of many turns than there are at full depth.
            for at_full_depth in (False, True) if job.at_full_depth else (False,):
                with student.computing():
                    teacher = student.teacher_states(batch)
                    loss = student.trained(
                        **vars(batch), teacher=teacher, at_full_depth=at_full_depth
                    )
                loss.backward()
            optimizer.step()
        del reserve
    except torch.cuda.OutOfMemoryError:
        return False
    return True


def largest(job: Job, device: torch.device) -> Iterator[Batch]:
    """Long prompts with long answers, answers with hardly a prompt, and many turns about a short
    text, each with anchors and tail of its own: a batch of each."""
    longest = min(job.answer_tokens, job.max_length // 2)
    # Many short ones fill a batch better than few long ones.
    for prompt, answer in ((job.max_length - longest, longest), (_SHORT, min(longest, _SHORT**2))):
        count = max(job.batch_tokens // (prompt + answer), 1)
        yield Batch.of([([0] * prompt, [0] * answer)] * count).to(device)
    if job.turns > 1:
        answer, ends = TURN // 2, range(SHORTEST, SHORTEST + TURN * job.turns, TURN)
        *earlier, last = [(end - answer, answer) for end in ends]
        count = max(job.batch_tokens // sum(last), 1)
        yield Batch.of([([0] * last[0], [0] * answer)] * count, [earlier] * count).to(device)
