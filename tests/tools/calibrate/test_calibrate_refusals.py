"""`vllm-kvx calibrate --criterion paper`: what it refuses, in one line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.models import build_model
from support.calibrating import LAYERS, write_prompts
from support.prompts import VOCAB

from vllm_kvx.cli import main
from vllm_kvx.tools.checkpoint import loading

BAD_FILES = {
    "missing.jsonl": (None, "No such file"),
    "folder.jsonl": ("directory", "cannot read prompts"),
    "empty.jsonl": ("\n \n", "holds no prompts"),
    "empty.txt": ("---\n\n---\n", "holds no prompts"),
    "binary.txt": (b"\xff\xfe\x00", "not UTF-8"),
    "prompts.csv": ("a", "*.jsonl or *.txt"),
    "broken.jsonl": ('{"prompt": "a"}\n{"prompt"', "broken.jsonl:2: not JSON"),
    "list.jsonl": ("[1, 2]", 'either "prompt" or'),
    "number.jsonl": ("5", 'either "prompt" or'),
    "both.jsonl": ('{"prompt": "a", "prompt_token_ids": [1]}', 'either "prompt" or'),
    "kind.jsonl": ('{"prompt": 5}', "prompt must be a string"),
    "ids.jsonl": ('{"prompt_token_ids": [1, "2"]}', "must be a list of integers"),
    "bool.jsonl": ('{"prompt_token_ids": [true]}', "must be a list of integers"),
    "short.jsonl": (json.dumps({"prompt_token_ids": [5] * 15}), "has 15 tokens; twice the window"),
    "none.jsonl": ('{"prompt_token_ids": []}', "prompt 1 has 0 tokens"),
    "vocab.jsonl": (json.dumps({"prompt_token_ids": [VOCAB] * 20}), f"token {VOCAB} is not one of"),
}


def failure(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failed command leaves."""
    out = capsys.readouterr()
    assert code == 2 and not out.out
    [line] = [line for line in out.err.splitlines() if "error:" in line]
    assert line.startswith("vllm-kvx calibrate: error: ") and "Traceback" not in out.err
    return line


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_prompt_files(
    name: str,
    tmp_path: Path,
    by_paper: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / name
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in failure(by_paper(prompts=path), capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_layer": LAYERS - 1}, f"use --max-layer 0 .. {LAYERS - 2}"),
        ({"max_layer": -1}, f"use --max-layer 0 .. {LAYERS - 2}"),
        ({"tsp_rate": 1}, "less than 1"),
        ({"tsp_rate": 0}, "tsp_rate must be a number in (0, 1]"),
        ({"tsp_rate": "nan"}, "tsp_rate must be a number in (0, 1]"),
        ({"window": 0}, "window must be an integer"),
        ({"kernel": 4}, "kernel must be an odd integer"),
        ({"window": 21}, "prompt 1 has 40 tokens; twice the window, 42"),
        ({"max_prompt_tokens": 15}, "prompt 1 has 15 tokens"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda"),
        ({"device": "cuda:99"}, "use --device cpu"),
        ({"prompts": None}, "give them with --prompts FILE"),
        ({"weights": "0.2,0.3,0.5"}, "--weights has no meaning without --method structkv"),
    ],
)
def test_bad_options(
    options: dict[str, Any],
    message: str,
    by_paper: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failure(by_paper(**options), capsys)


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def cut_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def more_layers_than_weights(model: Path) -> None:
    edit_config(model, num_hidden_layers=LAYERS + 2)


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), "cannot read the configuration"),
    "broken config": (lambda m: (m / "config.json").write_text("{"), "cannot read the config"),
    "unsupported": (
        lambda m: edit_config(m, architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        "GPT2LMHeadModel; supported: LlamaForCausalLM, MistralForCausalLM",
    ),
    "another language model": (
        lambda m: edit_config(
            m,
            architectures=["Mistral3ForConditionalGeneration"],
            model_type="mistral3",
            text_config={"model_type": "ministral3"},
        ),
        "has Mistral3ForConditionalGeneration of a ministral3; supported in it: mistral",
    ),
    "no architecture": (lambda m: edit_config(m, architectures=None), "has no architecture"),
    "no weights": (without_weights, "cannot load the weights"),
    "cut weights": (cut_weights, "cannot load the weights"),
    "missing layers": (more_layers_than_weights, "of its weights: model.layers.6."),
    "a short context": (
        lambda m: edit_config(m, max_position_embeddings=45),
        "prompt 2 has 50 tokens, and the model's context 45: leave it out, or cut it by",
    ),
    "sliding": (
        lambda m: edit_config(
            m, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=45
        ),
        "prompt 2 has 50 tokens, more than the model's sliding window: set --max-prompt-tokens 45",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models(
    name: str,
    six_layers: Path,
    tmp_path: Path,
    by_paper: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it, message = BAD_MODELS[name]
    model = tmp_path / "model"
    model.mkdir()
    for file in six_layers.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    break_it(model)
    assert message in failure(by_paper(model), capsys)


def test_models_that_are_nowhere(
    six_layers: Path,
    tmp_path: Path,
    by_paper: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for model in ("/no/such/model", "./nothing", str(six_layers / "config.json")):
        assert f"no model at {model}" in failure(by_paper(model), capsys)

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no-such is not a model.\nLong advice\nfollows.")

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", offline)
    line = failure(by_paper("nobody/no-such"), capsys)
    assert line.endswith("cannot read the configuration of nobody/no-such: no-such is not a model.")


def test_texts_need_a_tokenizer(
    tmp_path: Path, by_paper: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = build_model(tmp_path / "bare", arch="llama", layers=2)
    prompts = write_prompts(tmp_path / "text.jsonl", "w5 " * 40)
    assert "give prompt_token_ids" in failure(by_paper(bare, prompts=prompts), capsys)


def test_a_cache_that_cannot_be_written(
    tmp_path: Path,
    by_paper: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "file"))
    assert "set KVX_CACHE_ROOT to a directory" in failure(by_paper(), capsys)


def test_without_vllm(
    by_paper: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("calibrate.tsp_layer", "checkpoint.prompts", "checkpoint.dense_decoder"):
        monkeypatch.delitem(sys.modules, f"vllm_kvx.tools.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers is missing: pip install" in failure(by_paper(), capsys)


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["calibrate"], ["calibrate", "m", "--prompts", "p", "--max-prompt-tokens=0"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2 and "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--confirm=some", "--confirm: must be an integer, got 'some'"),
        ("--least=most", "--least: must be above 0 and at most 1, got most"),
    ],
)
def test_what_is_no_number(option: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "m", option])
    assert f"error: argument {says}" in capsys.readouterr().err
