"""`vllm-kvx calibrate --method structkv` and `diagnose`: what they refuse, in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.models import build_model

from vllm_kvx.cli import main


def failure(code: int, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failed command leaves."""
    out = capsys.readouterr()
    assert code == 2 and not out.out
    [line] = [line for line in out.err.splitlines() if "error:" in line]
    assert line.startswith(f"vllm-kvx {name}: error: ") and "Traceback" not in out.err
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 7}, "--kernel has no meaning without --method fastkv"),
        ({"tsp_rate": 0.2}, "--tsp-rate has no meaning without --method fastkv"),
        ({"max_layer": 5}, "set --min-layer and --max-layer"),
        ({"min_layer": 4, "max_layer": 3}, "in this order"),
        ({"decay": 0.8}, "--decay has no meaning without --criterion answers"),
        ({"count": 8}, "--count has no meaning without --criterion answers"),
        ({"window": 0}, "window must be an integer from 1 to 64"),
        ({"window": 36}, "prompt 1 has 70 tokens; twice the window, 72"),
        ({"weights": "0,0,0"}, "must be above 0"),
        ({"weights": "0.2,0.3,1.5"}, "variance_weight must be a number in [0, 1]"),
        ({"weights": "nan,0.3,0.5"}, "entropy_weight must be a number in [0, 1]"),
        ({"max_prompt_tokens": 15}, "prompt 1 has 15 tokens"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda"),
    ],
)
def test_bad_options_of_calibrate(
    options: dict[str, Any],
    message: str,
    focused: Path,
    run_tool: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failure(run_tool("calibrate", focused, **options), "calibrate", capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"struct_rate": 0}, "struct_rate must be a number in (0, 1]"),
        ({"kv_rate": 1.5}, "kv_rate must be a number in (0, 1]"),
        ({"decay": 0}, "decay must be a number in (0, 1]"),
        ({"kernel": 4}, "kernel must be an odd integer"),
        ({"weights": "0,0,0"}, "must be above 0"),
        ({"pivot": 5}, "use pivot=0 .. pivot=4"),
        ({"pivot": -1}, "pivot must be an integer"),
        ({"prompts": "nothing.jsonl"}, "cannot read prompts"),
        ({"window": 36}, "prompt 1 has 70 tokens; twice the window, 72"),
    ],
)
def test_bad_options_of_diagnose(
    options: dict[str, Any],
    message: str,
    focused: Path,
    run_tool: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in failure(run_tool("diagnose", focused, **options), "diagnose", capsys)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["calibrate", "diagnose"])
def test_built_in_prompts_need_a_tokenizer(
    arch: str,
    name: str,
    tmp_path: Path,
    run_tool: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = build_model(tmp_path / "bare", arch=arch, layers=2)
    capsys.readouterr()
    line = failure(run_tool(name, bare, prompts=None), name, capsys)
    assert "no tokenizer that loads: give prompt_token_ids to --prompts" in line


@pytest.mark.parametrize("name", ["calibrate", "diagnose"])
def test_where_nothing_can_be_written(
    name: str,
    focused: Path,
    tmp_path: Path,
    run_tool: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "file"))
    options = {"output": tmp_path / "file"} if name == "diagnose" else {}
    hint = "give --output a directory" if name == "diagnose" else "set KVX_CACHE_ROOT to a dir"
    assert hint in failure(run_tool(name, focused, **options), name, capsys)


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["diagnose"],
        ["calibrate", "m", "--method", "snapkv"],
        ["calibrate", "m", "--weights", "0.2,0.3"],
        ["calibrate", "m", "--target", "1.5"],
        ["calibrate", "m", "--criterion", "guess"],
        ["diagnose", "m", "--weights", "0.2,0.3,much"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2 and "error:" in capsys.readouterr().err
