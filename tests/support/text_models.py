"""The language model of a wrapper, as far as a head reads it."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

# A head's own positions have one row, whatever the wrapper's have, and it has its own layers.
_OTHERS = ("rope_parameters", "rope_scaling", "layer_types")


def text_of(wrapper: Path, folder: Path) -> Path:
    """Writes the sizes, embeddings and output layer of a wrapper's language model to `folder`.

    wrapper: a checkpoint of ``reference.wrappers``. The sizes are those of a Llama's configuration.
    """
    folder.mkdir()
    text = json.loads((wrapper / "config.json").read_text())["text_config"]
    config = {name: value for name, value in text.items() if name not in _OTHERS}
    config |= {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(wrapper / "model.safetensors")
    (embeddings,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    kept = {"model.embed_tokens.weight": weights[embeddings]}
    kept["lm_head.weight"] = weights["lm_head.weight"]
    save_file(kept, folder / "model.safetensors")
    return folder
