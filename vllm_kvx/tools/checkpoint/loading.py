"""The configuration and the weights of what reads text in a checkpoint.

That is the whole model, or the language model in one that also reads images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from vllm_kvx.errors import ToolError
from vllm_kvx.records.layers import CALIBRATED, WRAPPERS


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of what reads text, as servers have it.

    It names the whole model's architecture where it names none.
    """
    found: PretrainedConfig = config.get_text_config()
    found.architectures = found.architectures or config.architectures
    return found


def load_config(
    name: str,
    revision: str | None = None,
    supported: Sequence[str] | None = (*CALIBRATED, *WRAPPERS),
) -> PretrainedConfig:
    """The configuration of what reads text in a model; see `text_config_of`.

    name: a directory, or a name on the Hugging Face hub. supported: the architectures that will do;
        None for all.

    Raises:
        ToolError: there is none, or its architecture is none of the `supported` ones, or wraps
            another language model.
    """
    path = Path(name)
    if not path.is_dir() and (path.exists() or name[0] in "./~" or name.count("/") > 1):
        raise ToolError(f"no model at {name}: give a directory with config.json, or a hub name")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise ToolError(f"cannot read the configuration of {name}: {_line(error)}") from error
    found = (getattr(config, "architectures", None) or ["no architecture"])[0]
    if supported is not None and found not in supported:
        raise ToolError(f"{name} has {found}; supported: {', '.join(supported)}")
    config = text_config_of(config)
    wanted = WRAPPERS.get(found)
    if supported is not None and wanted not in (None, config.model_type):
        raise ToolError(f"{name} has {found} of a {config.model_type}; supported in it: {wanted}")
    return config


class LanguageModel(nn.Module):
    """The language model of one that also reads images, by the names of a model of text alone."""

    def __init__(self, wrapper: Any) -> None:
        """wrapper: transformers' own; what reads images in it is not kept."""
        super().__init__()
        self.model = wrapper.model.language_model
        self.lm_head = wrapper.lm_head
        self.config = text_config_of(wrapper.config)
        self.generation_config = wrapper.generation_config

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        found: torch.device = self.lm_head.weight.device
        return found


def load_weights(name: str, revision: str | None, dtype: torch.dtype | str, **options: Any) -> Any:
    """The model of a directory or hub name, on the CPU; `options` are transformers' own.

    Of one that also reads images it is the `LanguageModel`.

    Raises:
        ToolError: the weights cannot be loaded or are not all there.
    """
    loader: Any = AutoModelForCausalLM  # its type knows nothing of the report
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        if is_wrapped := config.get_text_config() is not config:
            loader = AutoModelForImageTextToText
        model, report = loader.from_pretrained(
            name, revision=revision, dtype=dtype, output_loading_info=True, **options
        )
    except Exception as error:  # transformers and the hub raise what they like
        raise ToolError(f"cannot load the weights of {name}: {_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers draws these at random and goes on.
        raise ToolError(f"{name} lacks {len(missing)} of its weights: {missing[0]}, ...")
    return LanguageModel(model) if is_wrapped else model


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return next((line for line in str(error).splitlines() if line), type(error).__name__)
