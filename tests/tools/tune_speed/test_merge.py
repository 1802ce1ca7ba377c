"""The tuned checkpoint's files: weights with the adapter in them, and the rest as the source's."""

import json
import stat
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference import speed
from reference.models import add_tokenizer, build_model
from support.engine import keep_in_process, running
from support.expected import Speed
from support.nightly import nightly
from support.parity import assert_parity

from vllm_kvx.errors import ToolError
from vllm_kvx.records.tuned_weights import FILE
from vllm_kvx.tools.tune_speed import merge
from vllm_kvx.tools.tune_speed.student import PROJECTIONS
from vllm_kvx.tools.tune_speed.train import ADAPTER, WEIGHTS

VOCAB = 64
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32, with what else folders of checkpoints hold."""
    path = build_model(tmp_path_factory.mktemp("source"), arch="qwen3", layers=3, vocab=VOCAB)
    add_tokenizer(path, VOCAB)
    (path / "generation_config.json").unlink()
    (path / "LICENSE").write_text("Of the source.\n")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"of_its_own": 1}))
    # Weights in other forms, and of what an earlier run tuned them for.
    for name in ("pytorch_model.bin", "tf_model.h5", "pytorch_model.bin.index.json", FILE):
        (path / name).write_text("{}")
    return path


@pytest.fixture(scope="module")
def job(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's directory with an adapter of random weights."""
    directory = tmp_path_factory.mktemp("job")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(PROJECTIONS))
    adapted = get_peft_model(speed.load(source), config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(str(directory / ADAPTER))
    return directory


def test_merged_weights_answer_as_the_adapter_does(source: Path, job: Path, tmp_path: Path) -> None:
    merge.save(merge.merged(job, str(source), None), source, tmp_path)
    adapter = PeftModel.from_pretrained(speed.load(str(source)), str(job / ADAPTER)).eval()
    for cutoff in (None, 1):
        expected = speed.generate(
            adapter.base_model.model, PROMPT, cutoff=cutoff, max_tokens=8, ignore_eos=True
        )
        found = speed.score(tmp_path, PROMPT, expected.tokens, cutoff=cutoff)
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
        original = speed.score(source, PROMPT, expected.tokens, cutoff=cutoff)
        assert (original.logprobs - expected.logprobs).abs().max() > 0.1


@nightly
def test_the_adapter_serves_unmerged(
    source: Path, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a cut, as vLLM's LoRA, beside requests without it."""
    merge.save(merge.merged(job, str(source), None), source, tmp_path)
    keep_in_process(monkeypatch)
    prompts = [PROMPT * times for times in (3, 5, 1)]
    with running(source, "speed-1", enable_lora=True, max_lora_rank=8) as engine:
        adapter = job / ADAPTER
        answers = engine.generate(prompts, 8, adapters=[adapter, None, adapter])
    assert_parity(tmp_path, answers[::2], Speed(1))
    assert_parity(source, answers[1:2], Speed(1))


def test_what_is_not_weights_is_the_sources(source: Path, job: Path, tmp_path: Path) -> None:
    merge.save(merge.merged(job, str(source), None), source, tmp_path)
    kept = {"config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    templates = {path.name for path in source.glob("*.jinja")}
    assert {path.name for path in tmp_path.iterdir()} == kept | templates | {"model.safetensors"}
    for name in kept | templates:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes(), name
    # Whoever may read one file may read the other.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_all_weights_that_were_tuned_are_the_checkpoints(source: Path, tmp_path: Path) -> None:
    job, out = tmp_path / "job", tmp_path / "out"
    model = speed.load(str(source))
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(str(job / WEIGHTS))
    merge.save(merge.merged(job, str(source), None), source, out)
    expected = speed.generate(model, PROMPT, cutoff=1, max_tokens=4)
    found = speed.score(out, PROMPT, expected.tokens, cutoff=1)
    torch.testing.assert_close(found.logprobs, expected.logprobs)


def test_a_full_disk_says_so(source: Path, job: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ToolError, match=f"cannot write {tmp_path}"):
        merge.save(merge.merged(job, str(source), None), source, tmp_path)
