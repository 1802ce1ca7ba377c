"""`vllm-kvx tune-speed` from its command line to a checkpoint, on the demo model."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from reference import speed
from support.engine import keep_in_process
from support.models import LOOKUP
from support.nightly import nightly
from support.tuning import (
    MADE,
    SHORT,
    SIZES,
    answered,
    arguments,
    copy,
    last_error,
    lines,
    stored,
    tune,
)
from support.tuning import nothing_starts as nothing_starts
from transformers import AutoTokenizer

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.records.tuned_weights import FILE, TunedRecord, read
from vllm_kvx.tools.tune_speed import command, sources, train
from vllm_kvx.tools.tune_speed.job import Job
from vllm_kvx.tools.tune_speed.plan import Plan

# What a run of the command takes from the source, byte for byte.
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
ENGINE = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
ASKING = (*MADE, "--engine-args", json.dumps(ENGINE))
LEARNING = ("--lr", "1e-3", "--hidden-loss", "0.5")


# Tuning is no part of a server, and takes minutes.
pytestmark = [pytest.mark.usefixtures("one_thread", "one_thread_each"), nightly]


@pytest.fixture(scope="module")
def one_thread_each() -> Iterator[None]:
    """Of processes that train; see `one_thread`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def recorded(out: Path) -> TunedRecord:
    found = read(out)
    assert found is not None
    return found


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without a process of its own, which takes ten seconds to import torch and more."""

    def here(directory: Path, job: Any, *options: str) -> None:
        if code := train.main([str(directory), *options]):
            raise ToolError(f"training ended with {code}")

    monkeypatch.setattr(command, "run_training", here)


def wait_until_free(out: Path) -> None:
    """What is killed takes a moment to be gone."""
    for _ in range(200):
        try:
            with command.alone(out):
                return
        except ToolError:
            time.sleep(0.05)
    raise AssertionError(f"something still works in {out}")


# From a checkpoint to another, by the model's own answers.


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, one_thread_each: None) -> Path:
    """What the command makes by self-distillation; the engine's core is in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    out = tmp_path_factory.mktemp("tuned") / "out"
    with pytest.MonkeyPatch.context() as patch:
        keep_in_process(patch)
        assert tune(out, *SIZES, *ASKING, *LEARNING) == 0
    cleanup_dist_env_and_memory()
    gc.collect()
    return out


def examples(out: Path) -> list[Any]:
    with (out / sources.FOLDER / train.EXAMPLES).open() as found:
        return [json.loads(line) for line in found]


def test_the_folder_is_a_checkpoint_that_says_what_it_is(tuned: Path) -> None:
    names = {path.name for path in tuned.iterdir()}
    assert names == {*KEPT, "model.safetensors", FILE, sources.FOLDER}
    for name in KEPT:
        assert (tuned / name).read_bytes() == (LOOKUP / name).read_bytes(), name
    record = recorded(tuned)
    assert (record.policy, record.original, record.layers) == ("speed-3", "lookup-8l", 8)
    assert (record.method, record.loss) == ("lora", "self-distillation")
    assert record.data["count"] == 40 and record.data["examples"] == 32
    assert record.training["steps"] > 1
    losses = stored(tuned / sources.FOLDER / train.LOSSES)
    assert losses["steps"] == record.training["steps"] and not losses["resumed"]
    # Each step of so few is measured once.
    measured = [entry["step"] for entry in losses["log"] if "held_out_kl" in entry]
    assert measured == sorted(set(measured)) and measured[-1] == losses["steps"]
    assert (tuned / sources.FOLDER / "losses.png").exists()


def test_answers_are_the_full_depth_models_and_agreement_is_with_it(tuned: Path) -> None:
    original, merged = speed.load(LOOKUP), speed.load(tuned)
    record = recorded(tuned)
    kl, same, tokens = defaultdict(float), defaultdict(int), 0
    for example in examples(tuned)[:8]:
        prompt, answer = example["prompt"], example["answer"]
        assert len(prompt) + len(answer) <= 512 and len(answer) <= 16
        full = speed.score(original, prompt, answer, cutoff=None)
        if example["kind"] != "recital":
            assert full.regret.max() < 1e-2
        models = (("before", original, 3), ("after", merged, 3), ("full_depth", merged, None))
        for when, model, cutoff in models:
            cut = speed.score(model, prompt, answer, cutoff=cutoff)
            kl[when] += (full.logprobs.exp() * (full.logprobs - cut.logprobs)).sum().item()
            same[when] += sum(a == b for a, b in zip(cut.argmax, full.argmax, strict=True))
        tokens += len(answer)
    for when in kl:
        found: Any = record.agreement[when]  # type: ignore[literal-required]
        assert found["tokens"] == tokens and found["answers"] == 8
        assert found["kl"] == pytest.approx(kl[when] / tokens, rel=1e-3, abs=1e-4)
        assert found["greedy"] == pytest.approx(same[when] / tokens, abs=1.5 / tokens)
    assert kl["after"] != pytest.approx(kl["before"], rel=1e-3)


def test_recitals_have_the_texts_own_words(tuned: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    recitals = [example for example in examples(tuned) if example["kind"] == "recital"]
    assert len(recitals) == 10
    for example in recitals:
        prompt, answer = (tokenizer.decode(example[name]) for name in ("prompt", "answer"))
        assert 1 <= len(example["answer"]) <= 16
        # The last token may end the turn, or be a part of a word.
        assert tokenizer.decode(example["answer"][:-1]).strip() in prompt, (prompt, answer)


def test_merged_weights_answer_as_the_adapter_does(tuned: Path) -> None:
    path = str(tuned / sources.FOLDER / train.ADAPTER)
    adapted = PeftModel.from_pretrained(speed.load(str(LOOKUP)), path).eval().base_model.model
    merged, original = speed.load(tuned), speed.load(LOOKUP)
    for example in examples(tuned)[8:12]:
        expected = speed.generate(adapted, example["prompt"], cutoff=3, max_tokens=12)
        found = speed.score(merged, example["prompt"], expected.tokens, cutoff=3)
        # The merged weights are rounded to the source's bfloat16, which moves logprobs by a tenth.
        assert (found.chosen_logprob - expected.chosen_logprob).abs().max() < 0.4
        assert found.regret.max() < 0.4
        before = speed.score(original, example["prompt"], expected.tokens, cutoff=3)
        assert (before.chosen_logprob - expected.chosen_logprob).abs().max() > 1


def test_the_same_command_is_done_at_once(
    tuned: Path, nothing_starts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path: path.read_bytes() for path in tuned.iterdir() if path.is_file()}
    assert tune(tuned, *SIZES, *ASKING, *LEARNING) == 0
    assert {path: path.read_bytes() for path in tuned.iterdir() if path.is_file()} == files
    shown = capsys.readouterr().out
    assert "speed-3 of lookup-8l" in shown and f"vllm serve {tuned}" in shown
    agreement = recorded(tuned).agreement
    kept = agreement["full_depth"]
    assert 0 < kept["kl"] < agreement["before"]["kl"]
    assert f"choose {kept['greedy']:.1%} of the tokens as the original does" in shown
    is_worse = agreement["after"]["kl"] >= agreement["before"]["kl"]
    assert is_worse == ("further from full depth than the original" in shown)


@pytest.mark.parametrize(
    ("cutoff", "more", "message"),
    [
        (5, ASKING, "holds a run with cutoff 3, not 5"),
        (3, (*ASKING, "--rank", "8"), "holds a run with rank 32, not 8"),
        (3, (*ASKING, "--count", "50"), "holds a run with count 40, not 50"),
    ],
)
def test_another_run_goes_elsewhere(
    cutoff: int,
    more: tuple[str, ...],
    message: str,
    tuned: Path,
    nothing_starts: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune(tuned, *SIZES, *LEARNING, *more, cutoff=cutoff) == 2
    error = last_error(capsys)
    assert message in error and "or another --out" in error


def test_runs_of_before_an_option_go_on(tuned: Path, tmp_path: Path) -> None:
    """What their settings do not name has its default, and nothing else will do."""
    out = tmp_path / "out"
    shutil.copytree(tuned / sources.FOLDER, out / sources.FOLDER)
    for name, option in (("job.json", "hidden_loss"), (sources.PLAN, "recitals")):
        entry = stored(out / sources.FOLDER / name)
        del entry[option], entry["turns"]
        (out / sources.FOLDER / name).write_text(json.dumps(entry))
    job = Job.read(out / sources.FOLDER)
    facts = stored(tuned / sources.FOLDER / sources.PLAN)
    del facts["model_key"]
    plan = Plan(**facts | {"recitals": 0.0})
    assert job.hidden_loss == 0
    command.check_out(out, job, plan)
    with pytest.raises(ToolError, match=r"holds a run with recitals 0\.0, not 0\.25"):
        command.check_out(out, job, Plan(**facts))
    with pytest.raises(ToolError, match=r"holds a run with hidden_loss 0\.0, not 0\.5"):
        command.check_out(out, replace(job, hidden_loss=0.5), plan)
    # A run whose steps were of other batches cannot go on.
    assert job.batches == "packed"
    entry = stored(out / sources.FOLDER / "job.json")
    del entry["batches"]
    (out / sources.FOLDER / "job.json").write_text(json.dumps(entry))
    with pytest.raises(
        ToolError, match=r"another version began, with other batches: .* --examples"
    ):
        command.check_out(out, job, plan)


def test_another_cutoff_learns_from_the_same_answers(
    tuned: Path, in_this_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "Teacher", None)
    out, given = tmp_path / "out", ("--examples", str(tuned))
    assert tune(out, *SIZES, *given, "--evaluations", "1", cutoff=5) == 0
    assert examples(out) == examples(tuned)
    record = recorded(out)
    assert record.policy == "speed-5"
    # Of the prompts, it says what they are.
    assert record.data == recorded(tuned).data
    assert record.agreement["before"] != recorded(tuned).agreement["before"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--max-length", "256"), "holds prompts with answers of up to"),
        (("--held-out", "40"), "40 examples, of which 40 are held out"),
        (("--count", "10"), "--count has no meaning with --examples"),
        (("--prompts", "x.jsonl"), "--examples brings its own prompts: leave out --prompts"),
    ],
)
def test_what_another_runs_answers_are_not_good_for(
    more: tuple[str, ...],
    message: str,
    tuned: Path,
    nothing_starts: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tune(tmp_path / "out", *SIZES, "--examples", str(tuned), *more) == 2
    assert message in last_error(capsys)


def test_answers_of_another_model_are_not_this_ones(
    tuned: Path, nothing_starts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--examples", str(tuned))
    assert tune(tmp_path / "out", *SIZES, *given, model=tuned) == 2
    assert "holds answers of another model" in last_error(capsys)
    assert tune(tmp_path / "out", *SIZES, "--examples", str(tmp_path)) == 2
    assert "holds no answered prompts: there is no examples.jsonl" in last_error(capsys)


# By given answers.


@pytest.mark.usefixtures("in_this_process")
def test_all_weights_learn_given_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "Teacher", None)
    given = [
        *answered(),
        {"prompt": "word " * 100, "answer": "too long"},
        {"text": "How deep is the lake?", "answer": " It is deep."},
        {"prompt_token_ids": [5, 6, 7], "answer_token_ids": [8, 1]},
    ]
    file, out = lines(tmp_path / "given.jsonl", given), tmp_path / "out"
    more = ("--sft", str(file), "--method", "full", "--epochs", "6", "--evaluations", "1")
    assert tune(out, *SHORT, *more) == 0
    assert "1 of 27 dialogues are left out" in capsys.readouterr().err
    record = recorded(out)
    assert (record.method, record.loss) == ("full", "supervised fine-tuning")
    assert record.data["prompts"] == "given.jsonl" and record.data["examples"] == 22
    prompt, answer = next((e["prompt"], e["answer"]) for e in examples(out) if len(e["answer"]) > 3)
    # An answer ends with EOS, and is likelier than it was.
    assert answer[-1] == 1
    nats = [
        -speed.score(model, prompt, answer, cutoff=3).chosen_logprob.mean()
        for model in (LOOKUP, out)
    ]
    assert nats[1] < 0.7 * nats[0]


def test_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = lines(tmp_path / "given.jsonl", answered()), tmp_path / "out"
    more = ("--sft", str(file), "--lr", "1e30", "--epochs", "4", "--evaluations", "1")
    assert tune(out, *SHORT, *more) == 2
    error = capfd.readouterr().err
    assert "is nan at step" in error and "use a smaller --lr, and another --out" in error
    assert "Traceback" not in error and "continues" not in error
    assert read(out) is None and not (out / "model.safetensors").exists()


def test_a_killed_command_goes_on(
    tmp_path: Path, in_this_process: None, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = lines(tmp_path / "given.jsonl", answered(40)), tmp_path / "out"
    more = ("--sft", str(file), "--epochs", "4", "--evaluations", "4")
    line = arguments(out, *SHORT, *more)
    # In a session of its own, so that its training dies with it.
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_kvx.cli", *line], start_new_session=True, env=os.environ
    ) as process:
        checkpoints = out / sources.FOLDER / train.CHECKPOINTS
        while process.poll() is None and not list(
            checkpoints.glob("checkpoint-*/trainer_state.json")
        ):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGSTOP)  # It does not go on to its end meanwhile.
        assert main(line) == 2
        assert f"another run works in {out}" in capfd.readouterr().err
        os.killpg(process.pid, signal.SIGKILL)
    wait_until_free(out)
    assert not (out / sources.FOLDER / train.LOSSES).exists(), "it ended before it could be killed"
    examples_before = examples(out)
    code, said = main(line), capfd.readouterr().err
    while "another run works" in said:  # Its processes take a moment to end.
        time.sleep(0.1)
        code, said = main(line), capfd.readouterr().err
    assert code == 0
    assert "one step of the largest batches" not in said
    assert examples(out) == examples_before
    assert stored(out / sources.FOLDER / train.LOSSES)["resumed"]
    assert recorded(out).policy == "speed-3"


@pytest.mark.usefixtures("in_this_process")
def test_examples_alone_and_then_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = lines(tmp_path / "given.jsonl", answered()), tmp_path / "out"
    more = (*SHORT, "--sft", str(file), "--evaluations", "1")
    assert tune(out, *more, "--only-examples") == 0
    assert {path.name for path in (out / sources.FOLDER).iterdir()} == {
        *("job.json", "plan.json", train.EXAMPLES)
    }
    assert "to see that they fit" not in capsys.readouterr().err
    assert tune(out, *more) == 0
    # Training is tried where it was not yet.
    assert "to see that they fit" in capsys.readouterr().err
    assert recorded(out).data["examples"] == 20


def test_texts_are_asked_several_questions(tmp_path: Path) -> None:
    """By the model too, where no answer is known; and what they are is part of the record."""
    turned = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    model = copy(LOOKUP, tmp_path / "model", {}, {"chat_template": turned})
    out, sizes = tmp_path / "out", ("--max-length", "700", "--batch-tokens", "1400")
    made = ("--recitals", "0.5", "--count", "12", "--turns", "3", "--answer-tokens", "100")
    more = ("--lookups", "1", "--held-out", "4", "--engine-args", json.dumps(ENGINE))
    assert tune(out, *sizes, *made, *more, "--only-examples", model=model) == 0
    found = examples(out)
    end = AutoTokenizer.from_pretrained(LOOKUP).convert_tokens_to_ids("<|end|>")
    earlier = [(each["prompt"], span) for each in found for span in each["earlier"]]
    assert earlier and max(len(each["earlier"]) for each in found) == 2
    assert all(tokens[first + count - 1] == end for tokens, (first, count) in earlier)
    assert stored(out / sources.FOLDER / sources.PLAN)["turns"] == 3
    assert Job.read(out / sources.FOLDER).turns == 3
