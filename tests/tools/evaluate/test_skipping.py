"""Answers over an fp8 KV cache that some layers skip have a name of their own."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import cpu_fp8
from support.engine import keep_in_process
from support.models import LOOKUP
from support.nightly import nightly

from vllm_kvx.cli import main
from vllm_kvx.config.policy_layers import slides_by_config
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import evaluation as records
from vllm_kvx.tools.evaluate.groups import grouped, read_policies
from vllm_kvx.tools.evaluate.rows import Row

SMALL = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
OVER_FP8 = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1", "0"]}
SNAPKV = "snapkv:kv_rate=0.1,kv_floor=0"


def evaluate(output: Path, options: dict[str, object], *more: str) -> int:
    fixed = ["evaluate", str(LOOKUP), "--tasks", "notes_3", "--lengths", "320", "--samples", "1"]
    fixed += ["--output", str(output), "--no-plot", "--engine-args", json.dumps(SMALL | options)]
    return main([*fixed, *more])


@pytest.fixture
def over_fp8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep_in_process(monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    cpu_fp8.use(monkeypatch)


@nightly
@pytest.mark.usefixtures("over_fp8")
def test_by_name_and_saved(tmp_path: Path) -> None:
    """Beside `full` over the model's own cache."""
    assert evaluate(tmp_path / "out", {}, "--policies", "full@fp8-skip-0-1", "--save") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    cells = {cell["policy"]: cell for cell in report["cells"] if cell["length"] == 320}
    assert {"full", "full@fp8-skip-0-1"} <= set(cells)
    assert cells["full@fp8-skip-0-1"]["score"][0] == 1.0
    full, key = parse_policy("full"), report["model_key"]
    assert records.load(key, full, "fp8-skip-0-1") is not None
    assert records.load(key, full, "fp8") is None and records.load(key, full) is None


@pytest.mark.usefixtures("over_fp8")
def test_by_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`full` is over that cache, too, and answers over others do not come beside."""
    assert evaluate(tmp_path / "out", OVER_FP8, "--policies", SNAPKV) == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    resolved = {"full": "full@fp8-skip-0-1", SNAPKV: "snapkv:kv_floor=0@fp8-skip-0-1"}
    assert run["resolved"] == resolved
    for options in (OVER_FP8 | {"kv_cache_dtype_skip_layers": ["0"]}, {"kv_cache_dtype": "fp8"}):
        capsys.readouterr()
        assert evaluate(tmp_path / "out", options, "--policies", SNAPKV) == 2
        assert "holds answers with kv_cache_dtype 'fp8-skip-0-1'" in capsys.readouterr().err


def test_rows_of_names() -> None:
    """An engine for each set of layers, in whatever order they are named."""
    names = ["full@fp8_e4m3-skip-10-2", "fier-64@fp8-skip-2-10", "full@fp8", "knorm@fp8-skip-2"]
    rows = read_policies(names, 12)
    over = [[row.cache_dtype for row in group] for group in grouped(rows, 12)]
    assert over == [[None], ["fp8-skip-2-10"] * 2, ["fp8"], ["fp8-skip-2"]]
    assert str(Row.parse("fier-64@fp8-skip-2-10 (original)")) == "fier-64@fp8-skip-2-10 (original)"
    for name, why in {
        "full@bfloat16-skip-0": "layers skip a quantized KV cache alone",
        "full@fp8-skip-x": "write one of",
        "full@fp8-skip-": "write one of",
        "knorm@int8_per_token_head-skip-0": "drops or moves entries, .*: write knorm@fp8",
        "full@fp8-skip-99": r"0 to 11, each once .*: write full@fp8$",
        "full@fp8-skip-01-1": r"without zeros before it: write full@fp8-skip-1$",
        "fier-64@fp8_e5m2-skip-0-12-3-0": r": write fier-64@fp8_e5m2-skip-0-3$",
        "full@fp8-skip-0-sliding_window": r": write full@fp8-skip-0$",
        "speed-4@fp8-skip-0": r"speed-4 cuts layers into stages, .*: write speed-4@fp8$",
        "pyramidkv@fp8-skip-0": "cuts layers into stages",
        "fastkv@fp8-skip-0": "cuts layers into stages",
        "snapkv:lookahead=8@fp8-skip-0": "has lookahead=, which was never tried",
    }.items():
        with pytest.raises(PolicyError, match=why):
            read_policies([name], 12)


def test_rows_of_a_model_with_windows() -> None:
    """vLLM has them skip by a word, without policies."""
    (_, row) = read_policies(["full@fp8-skip-sliding_window-1"], 12, slides=True)
    assert str(row) == "full@fp8-skip-1-sliding_window"
    with pytest.raises(PolicyError, match=r"0 to 11, each once .*: write knorm@fp8-skip-1$"):
        read_policies(["knorm@fp8-skip-1-sliding_window"], 12, slides=True)
    window = {"sliding_window": 64}
    kinds = ["sliding_attention", "full_attention"]
    assert slides_by_config(SimpleNamespace(**window, layer_types=kinds))
    assert slides_by_config(SimpleNamespace(**window))
    assert not slides_by_config(SimpleNamespace(**window, layer_types=kinds[1:]))
    assert not slides_by_config(SimpleNamespace(sliding_window=None))


def test_layers_beside_names_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"kv_cache_dtype_skip_layers": ["2"]}
    assert evaluate(tmp_path / "out", options, "--policies", "full@fp8", "full@fp8-skip-0-1") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm-kvx evaluate: error: full@fp8 says by its name which layers skip")
    assert error.endswith("name them in a policy, full@fp8-skip-2")
