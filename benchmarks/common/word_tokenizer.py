"""A tokenizer for shapes of random weights, whose text says nothing."""

import json
from pathlib import Path


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of `vocab` words, `w0` on, apart by spaces; decoding and encoding are inverse."""
    words = {f"w{token}": token for token in range(vocab)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **nothing}))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
