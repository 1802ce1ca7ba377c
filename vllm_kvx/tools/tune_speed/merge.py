"""From what was trained to a checkpoint that vLLM loads."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from vllm_kvx.errors import ToolError
from vllm_kvx.records.tuned_weights import FILE as RECORD
from vllm_kvx.tools.tune_speed.student import load
from vllm_kvx.tools.tune_speed.train import ADAPTER, WEIGHTS

# Files of weights, or about them: those of the tuned ones take their place.
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json"),
    # It says what other weights were tuned for.
    RECORD,
)


def merged(directory: Path, model: str, revision: str | None) -> Any:
    """The tuned model in float32 on the CPU: the checkpoint with the adapter of a job's directory
    in its weights, or the job's own weights."""
    if (directory / WEIGHTS).is_dir():
        return load(str(directory / WEIGHTS), None, torch.float32)
    from peft import PeftModel

    # Sums are made in float32 and rounded once.
    base = load(model, revision, torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, str(directory / ADAPTER))
    return adapted.merge_and_unload()


def save(model: Any, source: Path, out: Path) -> None:
    """Writes a checkpoint: the model's weights in the source's type, and the source's other files.

    Configuration, tokenizer and chat template stay as they are, byte for byte.

    Raises:
        ToolError: it cannot be written.
    """
    config = AutoConfig.from_pretrained(source)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    try:
        model.to(dtype).save_pretrained(str(out))
        # It is made up where the source has none, and servers sample as it says.
        (out / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
        for path in out.glob("*.safetensors"):
            # safetensors writes for this user alone; servers may run as another.
            path.chmod((out / CONFIG_NAME).stat().st_mode)
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(path, out / path.name)
    except OSError as error:
        raise ToolError(f"cannot write {out}: {error.strerror}") from error
