"""What was measured about a model, and where it is kept: FastKV's TSP layer, StructKV's pivot.

`vllm-kvx calibrate` stores a record for a model's configuration and weights; a server finds it by
the same key, whatever the model is called there. Models that the paper names need no record.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# A child of vLLM's logger: within a server it is formatted as the rest of the log.
logger = logging.getLogger("vllm.kvx.calibration")

CACHE_VARIABLE = "KVX_CACHE_ROOT"
# Method -> the layer that its calibration finds.
RESULTS = {"fastkv": "tsp_layer", "structkv": "pivot"}


class PaperModel(NamedTuple):
    """A model of the paper, told by the shape of its configuration: its names are many."""

    name: str
    shape: Mapping[str, Any]
    tsp_layer: int


# Section 5.1 and Appendix C.1 of FastKV.
PAPER_TSP_LAYERS: tuple[PaperModel, ...] = (
    PaperModel(
        "Llama-3.1-8B",
        {
            "architecture": "LlamaForCausalLM",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        15,
    ),
    PaperModel(
        "Ministral-8B-2410",
        {
            "architecture": "MistralForCausalLM",
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "num_key_value_heads": 8,
        },
        17,
    ),
    PaperModel(
        "Mistral-Nemo-12B",
        {
            "architecture": "MistralForCausalLM",
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "num_key_value_heads": 8,
        },
        19,
    ),
)

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


def tsp_layer_of(
    config: Mapping[str, Any], model: str, num_layers: int, revision: str | None = None
) -> tuple[int, str] | None:
    """FastKV's TSP layer for a model, and where it came from; None if it is not known.

    A stored calibration wins over the paper's table.

    config: config.json as transformers reads it (`PretrainedConfig.to_dict()`).
    model: a directory, or a name on the Hugging Face hub; `revision` is the hub's.
    num_layers: the model's decoder layers, counted from 0 in the answer.

    Raises:
        OSError: the model's weights are there and cannot be read.
    """
    key = model_key(config, model_dir(model, revision))
    record = load("fastkv", key, num_layers)
    if record is not None:
        return record["tsp_layer"], f"calibrated: {record_path('fastkv', key)}"
    layer = paper_tsp_layer(config)
    if layer is not None and config.get("num_hidden_layers") == num_layers:
        return layer, "paper"
    return None


def pivot_of_model(
    config: Mapping[str, Any],
    model: str,
    num_layers: int,
    window: int,
    weights: Sequence[float],
    revision: str | None = None,
) -> tuple[int, str] | None:
    """StructKV's pivot for a model, and where it came from; None if it was not measured so.

    window: tokens whose queries look at the others.
    weights: w1, w2, w3 of Eq. 8. The other arguments are those of `tsp_layer_of`.

    A pivot that was measured with another window or other weights is ignored with a warning.

    Raises:
        OSError: the model's weights are there and cannot be read.
    """
    key = model_key(config, model_dir(model, revision))
    record = load("structkv", key, num_layers, window=window, weights=list(weights))
    if record is None:
        return None
    return record["pivot"], f"calibrated: {record_path('structkv', key)}"


def paper_tsp_layer(config: Mapping[str, Any]) -> int | None:
    """The TSP layer that the paper gives for a model of this shape; None if it gives none."""
    fields = {**config, "architecture": _architecture(config)}
    for paper in PAPER_TSP_LAYERS:
        if all(fields.get(name) == value for name, value in paper.shape.items()):
            return paper.tsp_layer
    return None


# The store.


def cache_root() -> Path:
    """`$KVX_CACHE_ROOT`, else `$XDG_CACHE_HOME/vllm-kvx`, else `~/.cache/vllm-kvx`."""
    if root := os.environ.get(CACHE_VARIABLE):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-kvx"


def record_path(method: str, key: str) -> Path:
    """The file of a record, whether or not it exists."""
    return cache_root() / "calibration" / f"{method}-{key}.json"


def save(record: Mapping[str, Any]) -> Path:
    """Store `record`, in place of what was stored for its method and key; returns its file.

    `record` is fit for JSON and has `method`, `key`, `layers` and what RESULTS names.

    Raises:
        OSError: the cache directory cannot be written.
        ValueError: the record would not be loaded again.
    """
    path = record_path(record["method"], record["key"])
    if problem := _problem(record, record["method"], record["key"], record.get("layers")):
        raise ValueError(f"{path.name}: {problem}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: a server that starts meanwhile reads the old record or the new one.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load(method: str, key: str, num_layers: int, **settings: Any) -> dict[str, Any] | None:
    """The stored record, or None.

    One that is not of this model, or not measured with these `settings`, is ignored with a warning.
    """
    path = record_path(method, key)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Ignoring calibration %s: %s. Calibrate again or delete it.", path, error)
        return None
    if problem := _problem(record, method, key, num_layers, **settings):
        logger.warning("Ignoring calibration %s: %s. Calibrate again or delete it.", path, problem)
        return None
    return record


def _problem(record: Any, method: str, key: str, num_layers: int | None, **settings: Any) -> str:
    """Why `record` cannot be used for that method, model and settings; empty if it can."""
    if not isinstance(record, Mapping):
        return "it is not a JSON object"
    expected = {"method": method, "key": key, "layers": num_layers, **settings}
    for name, wanted in expected.items():
        if record.get(name) != wanted:
            return f"its {name} is {record.get(name)!r}, wanted is {wanted!r}"
    if type(num_layers) is not int:
        return f"layers must be an integer, got {num_layers!r}"
    result = RESULTS.get(method)
    if result is None:
        return f"{method} is not calibrated; calibrated are {', '.join(RESULTS)}"
    layer = record.get(result)
    if type(layer) is not int or not 0 <= layer < num_layers:
        return f"its {result} is {layer!r}, not a layer of 0 .. {num_layers - 1}"
    return ""


# The key.


def model_key(config: Mapping[str, Any], model_dir: Path | None) -> str:
    """32 hex digits that tell a model from others: its architecture and its weights.

    Read are some bytes of each tensor, so it takes milliseconds whatever the model's size, and two
    fine-tunes of one model differ. Where no weights lie in `model_dir`, or it is None, the key is
    that of the configuration alone.

    Raises:
        OSError: weights are there and cannot be read.
    """
    digest = hashlib.sha256(json.dumps(_shape(config), sort_keys=True).encode())
    for path in _weight_files(model_dir) if model_dir is not None else []:
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


def _architecture(config: Mapping[str, Any]) -> str | None:
    # A server that runs the model in segments has renamed it.
    names = config.get("architectures") or [None]
    return names[0].removeprefix("Kvx") if isinstance(names[0], str) else None


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of the configuration makes the architecture, written one way for one architecture."""
    shape = {name: config.get(name) for name in _FIELDS}
    shape["architecture"] = _architecture(config)
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


def _weight_files(directory: Path) -> list[Path]:
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
