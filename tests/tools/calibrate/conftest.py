"""What every tool's tests need, and models that the papers' criteria are tested on."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.models import add_tokenizer, build_model
from support.calibrating import LAYERS, PROMPTS, build_focused, write_prompts
from support.configs import vllm_config
from support.prompts import VOCAB, prompt_of

from vllm_kvx.cli import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are stored; nobody else's."""
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def in_one_thread(one_thread: None) -> None:
    """All tests of this folder run so."""


@pytest.fixture
def make_config() -> Callable[..., Any]:
    """Creates a VllmConfig as a server would: make_config(policy, **engine arguments)."""

    def make(policy: Any = None, *, model: str, **kwargs: Any) -> Any:
        return vllm_config(model, policy, **kwargs)

    return make


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What `vllm.kvx` and its children log; vLLM's logger hands nothing on to pytest's."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.kvx"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer: the text `w5 w6` is the tokens 5 and 6."""
    path = build_model(tmp_path_factory.mktemp("tiny"), arch="llama", layers=LAYERS)
    add_tokenizer(path, VOCAB)
    return path


@pytest.fixture
def by_paper(six_layers: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs calibrate by the paper's criterion; options as keywords, None leaves one out."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", prompt_of(40), prompt_of(50, seed=1))

    def run(model: Path | str = six_layers, *flags: str, **options: Any) -> int:
        given = {"criterion": "paper", "prompts": prompts, "device": "cpu", **options}
        argv = ["calibrate", str(model), *flags]
        for name, value in given.items():
            if value is not None:
                argv += [f"--{name.replace('_', '-')}", str(value)]
        return main(argv)

    return run


@pytest.fixture(scope="module")
def focused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_focused(tmp_path_factory.mktemp("small"), 5, 2)


@pytest.fixture
def run_tool(tmp_path: Path) -> Callable[..., int]:
    """Runs a command on a model with PROMPTS; options as keywords, None leaves one out."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS))

    def run(name: str, model: Path | str, *flags: str, **options: Any) -> int:
        given: dict[str, Any] = {"prompts": prompts, "device": "cpu"}
        if name == "calibrate":
            given |= {"method": "structkv", "criterion": "paper"}
        else:
            given["output"] = tmp_path / "out"
        argv = [name, str(model), *flags]
        for option, value in {**given, **options}.items():
            if value is not None:
                argv += [f"--{option.replace('_', '-')}", str(value)]
        return main(argv)

    return run
