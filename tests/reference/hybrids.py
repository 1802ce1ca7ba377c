"""Tiny random checkpoints of models in which only some layers have full attention.

The others slide over the last `WINDOW` tokens or are recurrent. Weights are drawn as those of
`zoo.py`; `build` has the same signature. Every model has 8 layers and 2 KV heads.
"""

from pathlib import Path
from typing import Any

from .zoo import LAYERS, Entry, write

WINDOW = 64


def pattern(sliding: int, other: str = "sliding_attention") -> list[str]:
    """Layer types: `sliding` layers of one kind below each full one."""
    each = [*[other] * sliding, "full_attention"]
    return (each * LAYERS)[:LAYERS]


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}

# By transformers' model type.
HYBRIDS: dict[str, Entry] = {
    "gemma3_text": Entry(
        {
            "layer_types": pattern(3),
            "sliding_window": WINDOW,
            # Not the head size: a scale of its own.
            "query_pre_attn_scalar": 24,
            "rope_parameters": _ROPES,
        },
        tied=True,
        is_one_added=True,
        logits_scaling=0.5,
    ),
}


def build(path: str | Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the float32 model of HYBRIDS entry `name` to `path` and return it.

    `overrides` go to the config class as they are. Raises KeyError for an unknown name.
    """
    return write(path, name, HYBRIDS[name], seed=seed, **overrides)
