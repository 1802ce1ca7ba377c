"""Tiny random checkpoints of models that wrap a language model and read images too.

Their language models have weights as those of the zoo. Tokens that stand for images are within the
vocabulary, as in released checkpoints: a text may hold them, and they are tokens like others there.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from .models import BOS, EOS
from .zoo import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, Entry, draw

_TEXT = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "dtype": "float32",
}
_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
_TOKENS = {
    "image_token_id": VOCAB - 4,
    "video_token_id": VOCAB - 3,
    "vision_start_token_id": VOCAB - 2,
    "vision_end_token_id": VOCAB - 1,
}


def _rotary(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of which three rows take turns, so many dimensions each."""
    fields = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}
    return {"rope_parameters": fields | more}


# By transformers' model type: the language model's fields beside the common ones, and others.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        {"model_type": "mistral", "hidden_size": 64, "head_dim": HEAD_DIM, "sliding_window": None},
        {
            "image_token_index": VOCAB - 4,
            "vision_config": {
                "model_type": "pixtral",
                "num_hidden_layers": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "head_dim": 16,
                "image_size": 56,
                "patch_size": 14,
            },
        },
    ),
    "qwen2_5_vl": (
        {"hidden_size": HEADS * HEAD_DIM} | _rotary(4, 6, 6),
        {
            **_TOKENS,
            "vision_config": _VISION
            | {"out_hidden_size": HEADS * HEAD_DIM, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3_vl": (
        {"hidden_size": 64, "head_dim": HEAD_DIM} | _rotary(6, 5, 5, mrope_interleaved=True),
        {
            **_TOKENS,
            "vision_config": _VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
        },
    ),
}


def build(path: str | Path, name: str, *, seed: int = 0) -> Path:
    """Write the float32 model of WRAPPERS entry `name` to `path` and return it.

    It has no image processor. Raises KeyError for a name that is not in WRAPPERS.
    """
    text, others = WRAPPERS[name]
    config = AutoConfig.for_model(
        name, text_config=_TEXT | text, tie_word_embeddings=False, dtype="float32", **others
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw(model, Entry(), seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(path)
    return Path(path)
