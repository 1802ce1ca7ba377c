"""Steps of tuning for SPEED, timed against full depth: tokens per second and memory, by cutoff.

    python -m benchmarks.tuning.step_times MODEL --cutoffs 12 16 18 21 --out NAME.json

A step is a forward and a backward pass over a batch of random prompts with random answers. Each
case is run once to warm up and timed three times. `sft` has the loss alone; `self-distillation`
the teacher's pass beside it. With --mixed a batch has prompts of any length, as `tune-speed` makes
them, and there are batches of several sizes. Needs a GPU; on a CPU the times mean nothing.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.about import about, command_line
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.plan import SHORTEST, length_between
from vllm_kvx.tools.tune_speed.student import Student
from vllm_kvx.tools.tune_speed.visibility import Batch

REPEATS = 3


def job(model: str, device: str, **changes: Any) -> Job:
    """The paper's LoRA, but for `changes`."""
    settings: dict[str, Any] = {
        "model": model, "revision": None, "cutoff": None, "anchors": 1, "tail": 1,
        "method": "lora", "loss": "self-distillation", "hidden_loss": 0.0,
        "rank": 32, "alpha": 64, "dropout": 0.0,
        "lr": 1e-4, "epochs": 1.0, "batch_tokens": 0, "accumulate": 1,
        "max_length": 0, "answer_tokens": 0, "held_out": 0, "evaluations": 1,
        "seed": 0, "checkpointing": "on",
        "gpus": int(device == "cuda"), "device": device,
    }  # fmt: skip
    return Job(**settings | changes)


def drawn(tokens: int, length: int, answer: int, device: str) -> Batch:
    """A batch of `tokens`, sequences of `length` that end in an answer of `answer` tokens."""
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(400) for _ in range(count)]

    pairs = [(some(length - answer), some(answer)) for _ in range(max(tokens // length, 1))]
    return Batch.of(pairs).to(device)


def mixed(tokens: int, longest: int, answer: int, device: str) -> Batch:
    """A batch of at most `tokens`, sequences from SHORTEST to `longest` tokens evenly spread in the
    logarithm, each with an answer of `answer` tokens."""
    rng = random.Random(0)
    pairs: list[tuple[list[int], list[int]]] = []
    while True:
        length = length_between(rng, longest)
        if pairs and sum(len(p) + len(a) for p, a in pairs) + length > tokens:
            return Batch.of(pairs).to(device)
        tokens_of = [rng.randrange(400) for _ in range(length)]
        pairs.append((tokens_of[:-answer], tokens_of[-answer:]))


def measured(student: Student, batch: Batch, loss: str) -> dict[str, Any]:
    """Seconds of each step, tokens per second by their median, and the most memory."""
    cuda = student.trained.device.type == "cuda"
    inputs: dict[str, Any] = vars(batch).copy()
    if loss == "sft":
        inputs["targets"] = torch.zeros(
            int(batch.answers.sum()), dtype=torch.long, device=batch.tokens.device
        )
    seconds = []
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        with student.computing():
            given = dict(inputs)
            if loss != "sft":
                given["teacher"] = student.teacher_states(batch)
            value = student.trained(**given)
        value.backward()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        student.trained.zero_grad()
    middle = sorted(seconds[1:])[REPEATS // 2]
    return {
        "seconds": [round(each, 4) for each in seconds[1:]],
        "tokens_per_second": round(batch.tokens.numel() / middle),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }


def cases(args: argparse.Namespace) -> list[tuple[str, dict[str, Any], int]]:
    """Loss, what changes of the job, and tokens of the batch."""
    large, small = args.batch_tokens, args.batch_tokens // 4
    if args.mixed:
        changes = {"cutoff": args.cutoffs[-1], "checkpointing": "off", "hidden_loss": 1.0}
        return [("self-distillation", changes, tokens) for tokens in (small, large // 2, large)]
    found: list[tuple[str, dict[str, Any], int]] = [
        ("sft", {"cutoff": cutoff, "dropout": 0.05}, large) for cutoff in (None, *args.cutoffs)
    ]
    cutoff = args.cutoffs[-1]
    for checkpointing in ("on", "off"):
        for tokens in (small, large):
            changes = {"cutoff": cutoff, "checkpointing": checkpointing}
            found.append(("self-distillation", changes, tokens))
    found.append(("self-distillation", {"cutoff": cutoff, "method": "full"}, large))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--cutoffs", type=int, nargs="+", required=True)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--mixed", action="store_true", help="sequences of up to --length tokens")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.mixed and args.answer >= SHORTEST:
        parser.error(f"--mixed has prompts from {SHORTEST} tokens on: use a smaller --answer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "about": about(
            "What one step of tuning takes, by loss, batch and what the backward pass keeps.",
            command_line("benchmarks.tuning.step_times", sys.argv[1:]),
            packages=("transformers", "peft"),
        ),
        "model": Path(args.model).name,
        "cases": [],
    }
    for loss, changes, tokens in cases(args):
        case: dict[str, Any] = {"loss": loss, **changes, "batch_tokens": tokens}
        student = Student(job(args.model, device, loss=loss, **changes), torch.device(device))
        student.trained.train()
        if changes.get("checkpointing", "on") == "on":
            student.trained.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            make = mixed if args.mixed else drawn
            case |= measured(student, make(tokens, args.length, args.answer, device), loss)
        except torch.cuda.OutOfMemoryError:
            case["out_of_memory"] = True
        del student
        print(json.dumps(case), flush=True)
        result["cases"].append(case)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
