"""Training on the demo checkpoint: what it starts from, and a killed run that goes on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import LOOKUP
from support.nightly import nightly
from transformers import set_seed

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.tune_speed import packs, train
from vllm_kvx.tools.tune_speed.batches import Batches, agreement_of
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.student import Student
from vllm_kvx.tools.tune_speed.visibility import Batch

# Tuning is no part of a server, and takes minutes.
pytestmark = nightly

JOB = Job(
    model=str(LOOKUP),
    revision=None,
    cutoff=3,
    anchors=1,
    tail=1,
    method="lora",
    loss="self-distillation",
    hidden_loss=0.5,
    at_full_depth=0.25,
    rank=4,
    alpha=8,
    dropout=0.1,
    lr=1e-3,
    epochs=1.0,
    batch_tokens=512,
    accumulate=2,
    max_length=256,
    answer_tokens=32,
    held_out=6,
    evaluations=3,
    seed=0,
    checkpointing="on",
    gpus=0,
    device="cpu",
)

EVEN, FEW = 28, 18

# Training that is killed as soon as it has a checkpoint.
KILLED = """
    import os, signal, sys
    from pathlib import Path
    from transformers.trainer_callback import DefaultFlowCallback
    from vllm_kvx.tools.tune_speed import train
    DefaultFlowCallback.on_save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    train.train(Path(sys.argv[1]))
"""


def examples(count=50):
    rng = random.Random(0)
    return [
        Example(
            tuple(rng.randrange(2, 2000) for _ in range(rng.randrange(20, 200))),
            tuple(rng.randrange(2, 2000) for _ in range(rng.randrange(1, 12))),
            rng.choice(["own", "table"]),
            # Some are of several turns.
            ((4, 3), (12, 5)) if number % 3 == 0 else (),
        )
        for number in range(count)
    ]


def begin(directory: Path, job: Job = JOB, count: int = 50) -> Path:
    job.write(directory)
    packs.write(directory / train.EXAMPLES, examples(count))
    return directory


def losses(directory: Path):
    return json.loads((directory / train.LOSSES).read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    directory = begin(tmp_path_factory.mktemp("whole"))
    train.train(directory)
    return directory


def test_a_killed_run_goes_on_to_the_same_losses(whole, tmp_path):
    directory = begin(tmp_path / "killed")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(directory)]
    killed = subprocess.run(command, stderr=subprocess.PIPE, env=os.environ, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    checkpoints = directory / train.CHECKPOINTS
    assert list(checkpoints.glob("checkpoint-*/trainer_state.json"))
    assert not (directory / train.LOSSES).exists()
    train.train(directory)
    mine, theirs = losses(directory), losses(whole)
    assert mine["resumed"] and not theirs["resumed"]
    assert mine["before"] == theirs["before"]
    assert mine["after"].keys() == theirs["after"].keys()
    for kind, found in mine["after"].items():
        # Two processes may add in another order: the last of five digits differs at times.
        assert found == pytest.approx(theirs["after"][kind], abs=1e-4)
    assert [e["loss"] for e in mine["log"] if "loss" in e] == pytest.approx(
        [e["loss"] for e in theirs["log"] if "loss" in e], rel=1e-4
    )


def test_a_checkpoint_that_is_not_whole_is_not_gone_on_from(whole, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(whole, directory)
    (last,) = (directory / train.CHECKPOINTS).iterdir()
    broken = last.with_name("checkpoint-99999")
    shutil.copytree(last, broken)
    (broken / "trainer_state.json").unlink()
    train.train(directory)
    assert losses(directory)["after"] == losses(whole)["after"]
    assert not broken.exists()


def test_two_processes_learn_what_one_does_in_larger_steps(tmp_path):
    """Batches of a step lie on two processes or follow each other on one: the gradient is one."""
    job = Job(**{**vars(JOB), "dropout": 0.0, "at_full_depth": 0.0})
    # Of an odd number of batches the last step would have one twice.
    assert len(Batches(examples(EVEN)[job.held_out :], job)) % 2 == 0
    alone, together = begin(tmp_path / "alone", job, EVEN), tmp_path / "together"
    begin(together, Job(**{**vars(job), "accumulate": 1}), EVEN)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with (
        open(tmp_path / "stderr", "w") as stderr,
        subprocess.Popen(
            [*run, "-m", "vllm_kvx.tools.tune_speed.train", str(together)], stderr=stderr
        ) as process,
    ):
        train.train(alone)
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    mine, theirs = losses(together), losses(alone)
    assert mine["before"] == theirs["before"]
    assert mine["steps"] == theirs["steps"]
    adapters = [
        load_file(d / train.ADAPTER / "adapter_model.safetensors") for d in (together, alone)
    ]
    assert adapters[0].keys() == adapters[1].keys()
    for name, weight in adapters[0].items():
        # As a whole: where a gradient is next to nothing Adam makes a step of its sign.
        assert (weight - adapters[1][name]).norm() < 0.05 * weight.norm(), name
    norms = [[e["grad_norm"] for e in d["log"] if "grad_norm" in e] for d in (mine, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_every_token_weighs_the_same_in_all_batches(tmp_path):
    """Gradients of batches add up to that of all examples at once, however many tokens each has."""
    found = []
    for tokens in (300, 10**6):
        more = {"dropout": 0.0, "at_full_depth": 0.0, "batch_tokens": tokens, "accumulate": 1}
        job = Job(**{**vars(JOB), **more})
        set_seed(0)
        student = Student(job, torch.device("cpu"))
        with torch.no_grad():
            for name, weight in student.trained.named_parameters():
                # An adapter's second factor begins with zeros, for which the first has no gradient.
                if "lora_B" in name:
                    weight.fill_(0.01)
        batches = Batches(examples(FEW), job)
        settings = train.arguments(job, tmp_path, 1, False)
        trainer = train.SpeedTrainer(student, batches, batches, args=settings, eval_dataset=batches)
        trainer.current_gradient_accumulation_steps = 1
        for batch in batches:
            trainer.training_step(student.trained, batch)
        found.append((len(batches), student.trained))
    (several, mine), (one, whole) = found
    assert several > 5 and one == 1
    for (name, some), (_, every) in zip(
        mine.named_parameters(), whole.named_parameters(), strict=True
    ):
        if some.grad is not None:
            expected = every.grad * several
            assert (some.grad - expected).norm() < 1e-3 * expected.norm(), name


def test_batches_at_full_depth_keep_the_weights_what_they_were(tmp_path, monkeypatch):
    """They are as many as the job says, and one such loses nothing before anything is learnt."""
    seen, students = [], []

    class Watched(Student):
        def __init__(self, *args):
            super().__init__(*args)
            students.append(self)

        def _loss(self, *args, at_full_depth=False, **inputs):
            loss = super()._loss(*args, at_full_depth=at_full_depth, **inputs)
            if torch.is_grad_enabled():
                seen.append((at_full_depth, loss.item()))
            return loss

    monkeypatch.setattr(train, "Student", Watched)
    found = []
    for share in (0.0, 0.5):
        more = {"at_full_depth": share, "dropout": 0.0, "epochs": 3.0, "checkpointing": "off"}
        job = Job(**{**vars(JOB), **more, "batch_tokens": 600})
        directory = begin(tmp_path / str(share), job, FEW)
        train.train(directory)
        held_out = Batches(examples(FEW)[: job.held_out], job)
        # The last step of an epoch has one batch.
        assert len(Batches(examples(FEW)[job.held_out :], job)) % job.accumulate == 1
        at_depth = [agreement_of(students[-1], held_out, at_full_depth=full) for full in (0, 1)]
        found.append([each["all"]["kl"] for each in at_depth])
        assert found[-1][0] == losses(directory)["after"]["all"]["kl"]
    learnt = seen[len(seen) // 2 :]
    assert not any(full for full, _ in seen[: len(seen) // 2])
    assert [full for full, _ in learnt] == [number % 2 == 1 for number in range(len(learnt))]
    # The second batch of the first step.
    assert learnt[1][1] < 1e-4 < learnt[0][1]
    assert found[1][1] < 0.7 * found[0][1]


def test_agreement_is_told_by_kind_and_length(whole):
    found = losses(whole)["before"]
    held_out = examples()[: JOB.held_out]
    assert found["all"]["answers"] == sum(len(example.spans()) for example in held_out)
    assert found["all"]["answers"] > JOB.held_out
    assert found["all"]["tokens"] == sum(len(example.learnt()) for example in held_out)
    for kind in {example.kind for example in held_out}:
        of_kind = [len(example.spans()) for example in held_out if example.kind == kind]
        assert found[kind]["answers"] == sum(of_kind)
    assert found["<= 512 tokens"] == found["all"]
    assert found["all"]["greedy"] < 1, "the cut changes nothing"


def test_at_full_depth_a_model_agrees_with_itself(tmp_path):
    student = Student(Job(**{**vars(JOB), "cutoff": None}), torch.device("cpu"))
    batch = Batch.of([(example.prompt, example.answer) for example in examples(4)])
    for one in student.agreements(batch):
        assert one.kl == pytest.approx(0, abs=1e-4)
        assert one.greedy == one.tokens


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_teacher_is_the_checkpoint_however_far_the_student_is(method):
    student = Student(Job(**{**vars(JOB), "method": method, "dropout": 0.5}), torch.device("cpu"))
    batch = Batch.of([(example.prompt, example.answer) for example in examples(2)])
    before = student.teacher_states(batch)
    student.trained.train()
    optimizer = torch.optim.SGD(
        [parameter for parameter in student.trained.parameters() if parameter.requires_grad], lr=1.0
    )
    for _ in range(2):
        optimizer.zero_grad()
        student.trained(**vars(batch), teacher=student.teacher_states(batch)).backward()
        optimizer.step()
    torch.testing.assert_close(student.teacher_states(batch), before)
    assert student.trained.training


def test_supervised_training_learns_the_given_answers(tmp_path):
    job = Job(**{**vars(JOB), "loss": "sft", "method": "full", "lr": 1e-3, "epochs": 3.0})
    directory = begin(tmp_path, job)
    train.train(directory)
    logged = [entry["loss"] for entry in losses(directory)["log"] if "loss" in entry]
    # Random answers: the loss falls from that of a model that expects others.
    assert sum(logged[-3:]) < sum(logged[:3])
    assert (directory / train.WEIGHTS / "model.safetensors").exists()


def test_another_job_does_not_continue_this_one(tmp_path):
    JOB.write(tmp_path)
    with pytest.raises(ToolError, match=r"cutoff 3, not 5.*another --out"):
        Job(**{**vars(JOB), "cutoff": 5}).check_continues(Job.read(tmp_path), tmp_path)
