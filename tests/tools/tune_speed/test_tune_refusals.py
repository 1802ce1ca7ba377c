"""`vllm-kvx tune-speed`: what cannot be done is said in one message, before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LOOKUP
from support.tuning import MADE, SHORT, SIZES, answered, copy, dialogues, last_error, lines, tune
from support.tuning import nothing_starts as nothing_starts

# Answers are generated behind a mark that those of earlier turns do not have.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--cutoff", "0"), "K must be an integer of at least 1, got 0"),
        (("--cutoff", "8"), "this model has 8 layers; use speed-1 .. speed-7"),
        (("--cutoff", "99"), "use speed-1 .. speed-7"),
        (("--anchors", "-1"), "anchors must be an integer of at least 0"),
        (("--max-length", "8193"), "more than the model's 8192 tokens: use at most 8192"),
        (("--max-length", "300"), "--max-length 300 is too short: use at least 512"),
        (("--batch-tokens", "511"), "--batch-tokens 511 does not hold"),
        (("--dropout", "1"), "--dropout must be from 0 to below 1, got 1.0"),
        (("--dropout", "-0.1"), "--dropout must be from 0"),
        (("--hidden-loss", "-1"), "--hidden-loss must be at least 0, got -1.0"),
        (("--hidden-loss", "inf"), "--hidden-loss must be at least 0, got inf"),
        (("--sft", "a.jsonl", "--hidden-loss", "1"), "--hidden-loss has no meaning with --sft"),
        (("--at-full-depth", "1"), "--at-full-depth must be from 0 to below 1, got 1"),
        (("--sft", "a.jsonl", "--at-full-depth", "0.1"), "--at-full-depth has no meaning with"),
        (("--examples", "a", "--recitals", "1"), "--recitals has no meaning with --examples"),
        (("--examples", "a", "--turns", "2"), "--turns has no meaning with --examples"),
        (("--turns", "2", "--lookups", "0"), "--turns has no meaning without lookups"),
        (("--turns", "2", "--count", "0", "--prompts", "a"), "--turns has no meaning without"),
        (("--turns", "40"), "may take more than half of --max-length 512 from a text: use at most"),
        (("--turns", "3"), "--max-length 512 is too short: use at least 768"),
        (("--lr", "0"), "--lr must be above 0, got 0.0"),
        (("--lr", "nan"), "--lr must be above 0, got nan"),
        (("--lr", "inf"), "--lr must be above 0, got inf"),
        (("--epochs", "-1"), "--epochs must be above 0, got -1.0"),
        (("--seed", "-1"), "--seed must be from 0"),
        (("--gpus", "2", "--device", "cpu"), "--gpus 2: --device cpu has 0 that torch can use"),
        (("--device", "tpu"), "device must be auto, cpu, cuda"),
        (("--count", "0"), "nothing to learn from: give --count above 0, --prompts or --sft"),
        (("--count", "-3", "--sft", ""), "nothing to learn from"),
        (("--count", "8", "--lookups", "1"), "8 examples, of which 8 are held out"),
        (("--lookups", "0.5"), "cannot write prompts itself: use --lookups 1, or --prompts with"),
        (("--rank", "4", "--method", "full"), "--rank has no meaning with --method full"),
        (("--sft", "a.jsonl", "--prompts", "b.jsonl"), "--sft brings its own prompts"),
        (("--sft", "a.jsonl", "--count", "9"), "--count has no meaning with --sft"),
        (("--sft", "nowhere.jsonl"), "cannot read dialogues from"),
        (("--prompts", "prompts.txt", "--count", "0"), "a file of dialogues is named *.jsonl"),
        (("--examples", "nowhere"), "holds no answered prompts"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_bad_options_are_one_message(
    more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path / "out", *SIZES, *more) == 2
    assert message in last_error(capsys)
    # And the next try finds nothing that is in its way.
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("entries", "option", "message"),
    [
        ([*answered(2), "no object"], "--sft", "given.jsonl:3: give an object"),
        ([*answered(2), *dialogues(1)], "--sft", "given.jsonl:3: it has no answer to learn"),
        ([], "--sft", "holds no dialogues"),
        (answered(4), "--sft", "4 examples, of which 4 are held out"),
        ([{"text": "a lake " * 99}] * 9, "--prompts", "0 examples, of which 4 are held out"),
        ([{"prompt_token_ids": [5, 2048]}] * 9, "--prompts", "tokens from 5 to 2048: the model's"),
        ([{"prompt_token_ids": [-1]}] * 9, "--prompts", "are from 0 to 2047"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_bad_files_are_one_message(
    entries: list[Any],
    option: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = lines(tmp_path / "given.jsonl", entries)
    more = ("--count", "0", "--answer-tokens", "16") if option == "--prompts" else ()
    assert tune(tmp_path / "out", *SHORT, option, str(file), *more) == 2
    assert message in last_error(capsys)


@pytest.mark.parametrize(
    ("config", "tokenizer", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, {}, "has GPT2LMHeadModel; supported: Llama"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            {},
            "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "is quantized: tune the checkpoint"),
        ({"sliding_window": 256}, {}, "more than the model's 256 tokens"),
        ({}, {"chat_template": None}, "has no chat template, so no prompts can be made"),
        ({}, {"chat_template": THINKING}, "so there can be no recitals: leave out --recitals"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_models_that_cannot_be_tuned_so(
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = copy(LOOKUP, tmp_path / "model", config, tokenizer)
    assert tune(tmp_path / "out", *SIZES, *MADE, model=model) == 2
    assert message in last_error(capsys)


@pytest.mark.usefixtures("nothing_starts")
def test_without_a_template_texts_can_be_learnt_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy(LOOKUP, tmp_path / "model", {}, {"chat_template": None})
    texts = lines(tmp_path / "texts.jsonl", [{"text": f"Lake {n}"} for n in range(9)])
    turns = lines(tmp_path / "turns.jsonl", dialogues())
    given = ("--count", "0", *SIZES, "--answer-tokens", "16")
    assert tune(tmp_path / "out", *given, "--prompts", str(turns), model=model) == 2
    assert 'give prompts as raw text, {"text": "..."}' in last_error(capsys)
    with pytest.raises(AssertionError, match="it started"):
        tune(tmp_path / "out", *given, "--prompts", str(texts), model=model)
    # Nothing was made yet, so that other options may begin anew in the same place.
    with pytest.raises(AssertionError, match="it started"):
        tune(tmp_path / "out", *given, "--prompts", str(texts), model=model, cutoff=4)


@pytest.mark.usefixtures("nothing_starts")
def test_where_and_with_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert tune(tmp_path, *SIZES, *MADE) == 2
    assert "is not empty: choose another --out" in last_error(capsys)
    assert tune(tmp_path / "file", *SIZES, *MADE) == 2
    assert "cannot write to" in last_error(capsys)
    assert tune(tmp_path / "out", *SIZES, *MADE, model=tmp_path / "nowhere") == 2
    assert "no model at" in last_error(capsys)
    if not torch.cuda.is_available():
        assert tune(tmp_path / "out", *SIZES, *MADE, "--gpus", "2") == 2
        assert "--gpus 2: this machine has 0 that torch can use" in last_error(capsys)
    monkeypatch.setattr("vllm_kvx.tools.tune_speed.options.find_spec", lambda name: None)
    assert tune(tmp_path / "out", *SIZES, *MADE) == 2
    assert last_error(capsys) == "peft is missing: pip install 'vllm-kvx[tune]'"
