"""Biases of keys, read of a checkpoint on disk."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.models import TinyModels

from benchmarks.answers.key_biases import main


def test_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = TinyModels(lambda name: tmp_path / name)
    model = tiny("qwen2", layers=3)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.{}.self_attn.k_proj.bias"
    weights[name.format(2)][5] = -300.0
    weights[name.format(0)][:2] = 40.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    main([str(model), "--out", str(tmp_path / "out.json")])
    assert "300.0 in layer 2, 40.0 in layer 0" in capsys.readouterr().out
    results = json.loads((tmp_path / "out.json").read_text())
    rows = results["models"]["qwen2"]["layers"]
    assert [(row["above_32"], row["above_256"]) for row in rows] == [(2, 0), (0, 0), (1, 1)]
    assert results["models"]["qwen2"]["architecture"] == "Qwen2ForCausalLM"
    with pytest.raises(SystemExit, match="biases of keys"):
        main([str(tiny("llama", layers=2)), "--out", str(tmp_path / "none.json")])
