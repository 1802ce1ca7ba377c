"""Tiny random checkpoints of models that wrap a language model and read images too.

Their language models have weights as those of the zoo. Tokens that stand for images are within the
vocabulary, as in released checkpoints: a text may hold them, and they are tokens like others there.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

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
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
}
_TOKENS = {
    "image_token_id": VOCAB - 4,
    "video_token_id": VOCAB - 3,
    "vision_start_token_id": VOCAB - 2,
    "vision_end_token_id": VOCAB - 1,
}


def _rotary(head_dim: int, *sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of which three rows take turns; sections are in 16ths of the dimensions."""
    assert sum(sections) == 16
    taken = [section * head_dim // 32 for section in sections]
    fields = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": taken}
    return {"rope_parameters": fields | more}


def _mistral3(head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    text = {"model_type": "mistral", "hidden_size": 64, "sliding_window": None}
    vision = {
        "model_type": "pixtral",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 56,
        "patch_size": 14,
    }
    others = {"image_token_index": VOCAB - 4, "vision_config": vision}
    return text | {"head_dim": head_dim}, others


def _qwen2_5_vl(head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    # The head size is not a field of its own.
    hidden = HEADS * head_dim
    vision = _VISION | {"out_hidden_size": hidden, "fullatt_block_indexes": [1]}
    return {"hidden_size": hidden} | _rotary(head_dim, 4, 6, 6), {"vision_config": vision}


def _qwen3_vl(head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = _VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}
    rotary = _rotary(head_dim, 6, 5, 5, mrope_interleaved=True)
    return {"hidden_size": 64, "head_dim": head_dim} | rotary, {"vision_config": vision}


# By transformers' model type: the language model's fields beside the common ones, and others.
WRAPPERS: dict[str, Callable[[int], tuple[dict[str, Any], dict[str, Any]]]] = {
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}


def build(
    path: str | Path, name: str, *, head_dim: int = HEAD_DIM, layers: int = LAYERS, seed: int = 0
) -> Path:
    """Write the float32 model of WRAPPERS entry `name` to `path` and return it.

    It has no image processor. Raises KeyError for a name that is not in WRAPPERS.
    """
    text, others = WRAPPERS[name](head_dim)
    tokens = _TOKENS if name.startswith("qwen") else {}
    config = AutoConfig.for_model(
        name,
        text_config=_TEXT | text | {"num_hidden_layers": layers},
        tie_word_embeddings=False,
        dtype="float32",
        **tokens,
        **others,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw(model, Entry(), seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(path)
    return Path(path)


# By model type: the last words of the vocabulary.
_WORDS = {"mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]")}
_QWEN_WORDS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
# Pixels of a part of an image that the encoder returns, in each direction.
PART = 28
# Words of a text: those of images come behind, the first of which stands for a part of one.
TEXT_VOCAB = IMAGE = VOCAB - 4


def image_tokens(name: str) -> list[int]:
    """What stands for an image in a prompt to model `name`, before its processor has seen it."""
    return [IMAGE] if name in _WORDS else [VOCAB - 2, IMAGE, VOCAB - 1]


def add_processor(path: Path, name: str) -> Path:
    """Writes a tokenizer as `models.add_tokenizer` does, and a processor, to what `build` made."""
    # They import torchvision.
    from transformers import (
        PixtralImageProcessor,
        PixtralProcessor,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
    )

    special = _WORDS.get(name, _QWEN_WORDS)
    words = ["<unk>", "<s>", "</s>", *(f"w{token}" for token in range(3, TEXT_VOCAB)), *special]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    processor: Any
    if name == "mistral3":
        images = PixtralImageProcessor(patch_size=PART // 2, size={"longest_edge": 10 * PART})
        processor = PixtralProcessor(
            images,
            tokenizer,
            patch_size=PART // 2,
            spatial_merge_size=2,
            image_token=special[0],
            image_break_token=special[1],
            image_end_token=special[2],
        )
    else:
        sizes: Any = {"patch_size": PART // 2, "merge_size": 2}
        sizes |= {"min_pixels": PART**2, "max_pixels": 256 * PART**2}
        make: Any = Qwen2_5_VLProcessor if name == "qwen2_5_vl" else Qwen3VLProcessor
        processor = make(
            image_processor=Qwen2VLImageProcessor(**sizes),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(**sizes),
        )
    processor.save_pretrained(path)
    return path


def wrap(path: Path, model: Path) -> Path:
    """Write `model`, of Llama's or Mistral's kind, as the language model of a Mistral 3 to `path`.

    It has the tokenizer of `model`, and no image processor.
    """
    inner: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    text = {**inner.config.to_dict(), "model_type": "mistral", "sliding_window": None}
    text["architectures"] = ["MistralForCausalLM"]
    tied = inner.config.tie_word_embeddings
    _, others = _mistral3(inner.config.head_dim)
    config = AutoConfig.for_model("mistral3", text_config=text, tie_word_embeddings=tied, **others)
    made: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    made.model.language_model.load_state_dict(inner.model.state_dict())
    made.lm_head.load_state_dict(inner.lm_head.state_dict())
    made.generation_config = inner.generation_config
    made.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, path)
    return path
