"""Models and prompts that the papers' criteria are tested on."""

import json
from pathlib import Path
from typing import Any

from reference.models import build_model
from safetensors.torch import load_file, save_file

from support.prompts import VOCAB, prompt_of

# Of the model that FastKV's criterion is tested on.
LAYERS = 6
# Of StructKV's.
WINDOW = 8
WEIGHTS = (0.2, 0.3, 0.5)
# Layers of a model, and the first of them whose attention is focused.
FOCUS = {8: 3, 28: 12, 48: 22}
PROMPTS = [prompt_of(70), prompt_of(90, seed=1)]


def write_prompts(path: Path, *prompts: list[int] | str) -> Path:
    keys = {list: "prompt_token_ids", str: "prompt"}
    path.write_text("".join(json.dumps({keys[type(p)]: p}) + "\n" for p in prompts))
    return path


def build_focused(path: Path, layers: int, focus: int, **options: Any) -> Path:
    """A model whose attention is broad in the layers below `focus` and narrow from there on."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 32, "intermediate": 32}
    build_model(path, **{"arch": "llama", "layers": layers, "vocab": VOCAB, **shape, **options})
    weights = load_file(path / "model.safetensors")
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] *= 0.2 if layer < focus else 5
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
