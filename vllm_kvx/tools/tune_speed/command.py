"""`vllm-kvx tune-speed`: from a checkpoint to one that keeps its answers under speed-K."""

import argparse
import fcntl
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import vllm_kvx
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.records import tuned_weights as tuned_record
from vllm_kvx.records.folder import check_writable
from vllm_kvx.records.layers import DENSE_MLPS
from vllm_kvx.records.model_key import ModelIdentity, model_dir
from vllm_kvx.records.tuned_weights import TunedRecord
from vllm_kvx.tools.checkpoint.dense_decoder import choose_device
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.tune_speed import figures, merge, sources
from vllm_kvx.tools.tune_speed.job import FILE, Job, check_same
from vllm_kvx.tools.tune_speed.plan import Plan
from vllm_kvx.tools.tune_speed.train import EXAMPLES, FULL_DEPTH, LOSSES, MERGED, REFUSED
from vllm_kvx.tools.tune_speed.trial import TRIED


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in options.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    config = load_config(args.model, args.revision, DENSE_MLPS)
    check_weights(args.model, config)
    policy = Speed(args.cutoff, args.anchors, args.tail)
    policy.check_model(config.num_hidden_layers)
    plan = sources.plan_of(args, config)
    job = job_of(args, plan)
    out = Path(args.out)
    directory = out / sources.FOLDER
    check_writable(out, "choose another --out")
    with alone(out):
        check_out(out, job, plan)
        # It is written last.
        record = tuned_record.read(out)
        if record is None:
            make_examples(args, plan, job, config)
            if args.only_examples:
                print(f"Examples: {directory / EXAMPLES}; use them with --examples {out}")
                return
            if not (directory / LOSSES).exists():
                run_training(directory, job)
            print("merging", file=sys.stderr)
            merge.save(merge.merged(directory, args.model, args.revision), _folder(args), out)
            run_training(directory, job, "--measure", str(out))
        losses = json.loads((directory / LOSSES).read_text(encoding="utf-8"))
        # Adapted weights were rounded when they were merged.
        losses["after"] = json.loads((directory / MERGED).read_text(encoding="utf-8"))
        if (directory / FULL_DEPTH).exists():
            losses["full_depth"] = json.loads((directory / FULL_DEPTH).read_text(encoding="utf-8"))
        if record is None:
            record = record_of(args, str(policy), config.num_hidden_layers, plan, job, losses)
            record.write(out)
    print(summary(record, losses))
    print(figures.draw(directory / "losses.png", losses))
    print(
        f"\nServe it: vllm serve {out} --kv-policy {policy}\nCompare it: vllm-kvx evaluate {out} "
        f"--original {args.model} --policies {policy}"
    )


# What is asked for.


def check_weights(model: str, config: Any) -> None:
    """Raises ToolError for weights that cannot be trained: quantized ones."""
    if getattr(config, "quantization_config", None) is not None:
        raise ToolError(
            f"{model} is quantized: tune the checkpoint that it was made of, and quantize the "
            "tuned one"
        )


def job_of(args: argparse.Namespace, plan: Plan) -> Job:
    """How to train; raises ToolError where the machine or the options do not allow it."""
    if args.batch_tokens < args.max_length:
        raise ToolError(
            f"--batch-tokens {args.batch_tokens} does not hold a prompt of --max-length "
            f"{args.max_length}: use at least {args.max_length}"
        )
    if not 0 <= args.dropout < 1:
        raise ToolError(f"--dropout must be from 0 to below 1, got {args.dropout}")
    for name in ("lr", "epochs"):
        if not 0 < getattr(args, name) < math.inf:
            raise ToolError(f"--{name} must be above 0, got {getattr(args, name)}")
    if not 0 <= args.hidden_loss < math.inf:
        raise ToolError(f"--hidden-loss must be at least 0, got {args.hidden_loss}")
    if not 0 <= args.at_full_depth < 1:
        raise ToolError(f"--at-full-depth must be from 0 to below 1, got {args.at_full_depth:g}")
    if not 0 <= args.seed < 2**32:
        raise ToolError(f"--seed must be from 0 to below 2**32, got {args.seed}")
    device = choose_device(args.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if (args.gpus or 0) > gpus:
        where = "--device cpu" if args.device == "cpu" else "this machine"
        raise ToolError(f"--gpus {args.gpus}: {where} has {gpus} that torch can use")
    if device.index is not None:
        gpus = _only_gpu(device.index, args.gpus)
    gpus = args.gpus or gpus
    return Job(
        model=str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model,
        revision=args.revision,
        cutoff=args.cutoff,
        anchors=args.anchors,
        tail=args.tail,
        method=args.method,
        loss="sft" if args.sft else "self-distillation",
        hidden_loss=args.hidden_loss,
        at_full_depth=args.at_full_depth,
        rank=args.rank,
        alpha=args.alpha,
        dropout=args.dropout,
        lr=args.lr,
        epochs=args.epochs,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        max_length=args.max_length,
        answer_tokens=plan.max_length if plan.sft else plan.answer_tokens,
        turns=plan.turns,
        held_out=args.held_out,
        evaluations=args.evaluations,
        seed=args.seed,
        checkpointing=args.checkpointing,
        gpus=gpus,
        device=device.type,
        batches="packed",
    )


def _only_gpu(index: int, wanted: int | None) -> int:
    """Hides all GPUs but one from what is started; ToolError if several are wanted."""
    if (wanted or 1) > 1:
        raise ToolError(f"--device cuda:{index} is one GPU: leave out --gpus, or use --device cuda")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    return 1


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Within, no other run works in the directory, nor training that a killed one left behind.

    Raises:
        ToolError: another does.
    """
    lock = os.open(out, os.O_RDONLY)
    try:
        # The processes that train have it too, and it is free when the last one ends.
        os.set_inheritable(lock, True)
        with suppress(OSError):  # Some network file systems lock no directories.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ToolError(
                    f"another run works in {out}: wait for its end, or choose another --out"
                ) from error
        yield
    finally:
        os.close(lock)


def check_out(out: Path, job: Job, plan: Plan) -> None:
    """Raises ToolError where `out` holds something else than a run with the same options."""
    directory = out / sources.FOLDER
    if (directory / EXAMPLES).exists():
        job.check_continues(Job.read(directory), directory)
        facts = sources.facts_of(directory, own=True)
        del facts["model_key"]
        # What an older run did not know of has its default.
        check_same(asdict(plan), asdict(Plan(**facts)), directory)
    # What was begun and has no examples yet may be begun again in another way.
    elif not (directory / FILE).exists() and any(out.iterdir()):
        raise ToolError(f"{out} is not empty: choose another --out")


# What is done.


def make_examples(args: argparse.Namespace, plan: Plan, job: Job, config: Any) -> None:
    """Checks what is to be learnt from, tries whether it fits, and makes it; once.

    Raises:
        ToolError: it cannot be done as asked.
    """
    directory = Path(args.out) / sources.FOLDER
    is_made = (directory / EXAMPLES).exists()
    if not is_made:
        tokenizer = sources.check(args, plan, config)
        job.write(directory)
        # What an earlier try found out was of its own options.
        (directory / TRIED).unlink(missing_ok=True)
    # Where only the examples were made, training is tried now.
    if not args.only_examples and not (directory / TRIED).exists():
        print("one step of the largest batches, to see that they fit", file=sys.stderr)
        run_training(directory, job, "--trial")
    if not is_made:
        key = ModelIdentity(str(_folder(args)), config.to_dict()).key
        sources.answer(args, plan, tokenizer, directory, key)


def run_training(directory: Path, job: Job, *options: str) -> None:
    """Runs the training in a process of its own, or one a GPU.

    Raises:
        ToolError: it fails; it has said why.
    """
    module = ["vllm_kvx.tools.tune_speed.train", str(directory), *options]
    command = [sys.executable, "-m", *module]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if job.gpus > 1 and not options:
        launch = ("--standalone", "--nproc_per_node", str(job.gpus))
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", *module]
    elif job.gpus:
        # A process that sees several would spread its batches over them.
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with subprocess.Popen(command, env=env, close_fds=False) as process:
        # Whoever ends this command ends its training.
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if code == REFUSED:
        raise ToolError("it ends here, for the reason above")
    if code:
        raise ToolError("training ended early, see above; the same command continues it")


def _folder(args: argparse.Namespace) -> Path:
    """Where the checkpoint's files lie."""
    folder = model_dir(args.model, args.revision)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(args.model, revision=args.revision))
    return folder


def record_of(
    args: argparse.Namespace,
    policy: str,
    num_layers: int,
    plan: Plan,
    job: Job,
    losses: Mapping[str, Any],
) -> TunedRecord:
    """What the checkpoint says of itself."""
    return TunedRecord(
        policy=policy,
        original=Path(args.model).resolve().name if Path(args.model).is_dir() else args.model,
        layers=num_layers,
        method=job.method,
        loss="supervised fine-tuning" if plan.sft else "self-distillation",
        data={**asdict(plan), "prompts": plan.prompts and Path(plan.prompts).name}
        | {"examples": losses["examples"], "tokens": losses["tokens_per_epoch"]},
        training={
            name: getattr(job, name)
            for name in (
                *(("rank", "alpha", "dropout") if job.method == "lora" else ()),
                *(
                    "hidden_loss",
                    "at_full_depth",
                    "lr",
                    "epochs",
                    "batch_tokens",
                    "accumulate",
                    "gpus",
                ),
            )
        }
        | {name: losses[name] for name in ("steps", "seconds", "peak_gib")},
        agreement={
            "before": losses["before"]["all"],
            "after": losses["after"]["all"],
            "full_depth": losses["full_depth"]["all"],
        },
        versions={
            "vllm_kvx": vllm_kvx.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        command=shlex.join(["vllm-kvx", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def summary(record: TunedRecord, losses: Mapping[str, Any]) -> str:
    """Held-out agreement with full depth before and after, of all and by kind and length."""
    lines = [
        f"{record.policy} of {record.original}, held-out answers, as at full depth:",
        f"{'':24}{'answers':>8}  {'same answer':>15}  {'same token':>15}  {'KL, nats':>15}",
    ]
    for name, after in losses["after"].items():
        before = losses["before"][name]
        cells = [
            f"{before['same']:6.1%} ->{after['same']:6.1%}",
            f"{before['greedy']:6.1%} ->{after['greedy']:6.1%}",
            f"{before['kl']:6.3f} ->{after['kl']:6.3f}",
        ]
        lines.append(f"{name:24}{after['answers']:>8}  {'  '.join(f'{c:>15}' for c in cells)}")
    if full_depth := losses.get("full_depth"):
        found = full_depth["all"]
        lines.append(
            f"At full depth the tuned weights choose {found['greedy']:.1%} of the tokens as the "
            f"original does, KL {found['kl']:.3f}."
        )
    if losses["after"]["all"]["kl"] >= losses["before"]["all"]["kl"]:
        lines.append(
            "The tuned weights are further from full depth than the original ones: use a smaller "
            "--lr or more prompts, and another --out."
        )
    return "\n".join(lines)
