"""Which model it is: a key that is the same for the same weights, whatever they are called."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A child of vLLM's logger: within a server it is formatted as the rest of the log.
logger = logging.getLogger("vllm.kvx.calibration")

_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Other weights that transformers or vLLM load, where there are no safetensors.
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")
# Bytes read from each tensor, or from each of so many places of a file without known tensors.
_SAMPLE_BYTES, _SAMPLE_PLACES = 256, 64
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class ModelIdentity:
    """The model that a server or a tool runs, and over which KV cache.

    path: a directory, or a name on the Hugging Face hub; `revision` is the hub's. config:
    config.json as transformers reads it (`PretrainedConfig.to_dict()`). kv_cache_dtype: the
    engine's; None if it is not known.
    """

    path: str
    config: Mapping[str, Any]
    revision: str | None = None
    kv_cache_dtype: str | None = None

    @property
    def directory(self) -> Path | None:
        """The directory with the model's files, None if they are not here; see `model_dir`."""
        return model_dir(self.path, self.revision)

    @property
    def key(self) -> str:
        """What its records are found by; see `model_key`.

        It is read anew each time: a hub's weights may come while a server starts.

        Raises:
            OSError: weights are there and cannot be read.
        """
        return model_key(self.config, self.directory)

    @property
    def key_at_start(self) -> str:
        """The same for a server, where vLLM says later, and better, that weights cannot be read."""
        try:
            return self.key
        except OSError:
            return self.config_key

    @property
    def config_key(self) -> str:
        """The key of its configuration alone, which `key` is where no weights are here."""
        return model_key(self.config, None)


def model_key(config: Mapping[str, Any], model_dir: Path | None) -> str:
    """32 hex digits that tell a model from others: its architecture and its weights.

    Read are some bytes of each tensor, so it takes milliseconds whatever the model's size, and two
    fine-tunes of one model differ. Where no weights lie in `model_dir`, or it is None, the key is
    that of the configuration alone.

    Raises:
        OSError: weights are there and cannot be read.
    """
    digest = hashlib.sha256(json.dumps(_shape(config), sort_keys=True).encode())
    for path in weight_files(model_dir) if model_dir is not None else []:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()[:32]


def model_dir(model: str, revision: str | None = None) -> Path | None:
    """Where a model's files lie: a directory, or a hub name's snapshot in the local cache.

    None if neither is there; nothing is downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):  # ValueError: no name that the hub could have
        return None
    return Path(config).parent if isinstance(config, str) else None


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The model's first architecture, by its name in transformers; None if there is none."""
    # A server that runs the model in segments has renamed it.
    names = config.get("architectures") or [None]
    return names[0].removeprefix("Kvx") if isinstance(names[0], str) else None


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of the configuration makes the architecture, written one way for one architecture."""
    shape = {name: config.get(name) for name in _FIELDS}
    shape["architecture"] = architecture_of(config)
    heads = config.get("num_attention_heads")
    if heads:
        # Old configurations leave out what follows from the rest.
        shape["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        shape["head_dim"] = config.get("head_dim") or config.get("hidden_size", 0) // heads
    # transformers 5 has one field for what were two.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.pop("type", None)
    shape["rope"] = {name: _number(value) for name, value in rope.items() if value is not None}
    return {name: value for name, value in shape.items() if value is not None}


def _number(value: Any) -> Any:
    """10000 and 10000.0 are one base."""
    return float(value) if type(value) is int else value


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, by name.

    An index or the usual name decides: other files may hold the same weights in another form, and
    a hub's snapshot has them or not.
    """
    try:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        listed = [directory / name for name in sorted(set(index["weight_map"].values()))]
        # A hub's snapshot may have the index and not yet the weights.
        return listed if all(path.exists() for path in listed) else []
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError):
        logger.warning("%s is not readable as an index of weights.", directory / _INDEX)
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    files = sorted(path for path in directory.iterdir() if path.is_file())
    tensors = [path for path in files if path.suffix == ".safetensors"]
    return tensors or [path for path in files if path.suffix in _OTHER_SUFFIXES]


def _samples(path: Path) -> Iterator[bytes]:
    """A safetensors file's header and some bytes of each tensor; of another file, bytes of it."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            # Else each sample reads ahead, on a cold disk a thousand times what is wanted.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(file.read(8), "little")
        header = b""
        if path.suffix == ".safetensors" and length <= min(size - 8, _MAX_HEADER_BYTES):
            header = file.read(length)
            yield header
        places = _tensor_middles(header)
        if not places:
            places = [size * place // _SAMPLE_PLACES for place in range(_SAMPLE_PLACES)]
        for place in places:
            file.seek(place)
            yield file.read(_SAMPLE_BYTES)


def _tensor_middles(header: bytes) -> list[int]:
    """Offsets in the file of the middle of each tensor that a safetensors header lists."""
    try:
        tensors = json.loads(header)
        spans = [span["data_offsets"] for name, span in tensors.items() if name != "__metadata__"]
        return [8 + len(header) + (begin + end) // 2 for begin, end in sorted(spans)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def model_name(model: str) -> str:
    """What a record calls a model: its hub name, or its directory in full."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
