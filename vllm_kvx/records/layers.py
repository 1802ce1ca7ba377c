"""The store of calibration records: what was measured about models, such as FastKV's TSP layer.

`vllm-kvx calibrate` stores a record under its method and the model's key; a server finds it by the
same two (`resolve`), whatever the model is called there.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.policy.axes import WINDOW_REDUCTIONS, Method
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.parameters import allows
from vllm_kvx.records.folder import CACHE_VARIABLE, cache_root, root_to_read

# A child of vLLM's logger: within a server it is formatted as the rest of the log.
# What begins the time left in a line of progress of the tools that write records. A server that
# waits for one shows such lines without it.
TIME_LEFT = ", about"
logger = logging.getLogger("vllm.kvx.calibration")

# In the cache folder.
FOLDER = "calibration"

_MEND = f"Calibrate again, delete it, or set {CACHE_VARIABLE} to another directory."

# Method -> the layer that its calibration finds.
RESULTS: dict[str, str] = {
    name: method.to_measure.parameter
    for name, method in METHODS.items()
    if method.to_measure is not None
}

# Method and criterion -> the parameters that its layer was measured with, and holds for. A rate
# that a policy leaves open is the record's, if it was searched for (`rates` are those that were
# tried) or is the usual one: a layer found for another rate alone may be needlessly high or low.
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "fastkv": {
        "answers": ("window", "kernel", "tsp_rate"),
        "paper": ("window", "kernel", "tsp_rate"),
    },
    "structkv": {
        "answers": ("window", "struct_rate", "decay"),
        "paper": ("window", "weights"),
    },
}

# Models that `vllm-kvx calibrate` runs, whose modules have the same names and the same meaning;
# q_norm and k_norm are Qwen3's alone. Those with a dense MLP, and those with one of experts.
DENSE_MLPS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
CALIBRATED = (*DENSE_MLPS, "MixtralForCausalLM", "Qwen3MoeForCausalLM")
# Models that also read images and wrap such a language model, by its `model_type`. On a text their
# three rows of rotary positions are equal, which makes them one.
WRAPPERS = {
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
}


def is_calibrated(architecture: str, text_model_type: str) -> bool:
    """Whether `vllm-kvx calibrate` runs the model.

    architecture: of the whole model. text_model_type: of what reads text in it.
    """
    return architecture in CALIBRATED or WRAPPERS.get(architecture) == text_model_type


def record_path(method: str, key: str, root: Path | None = None) -> Path:
    """The file of a record, whether or not it exists; `root` is the cache folder if not given.

    Raises:
        CacheFolderError: there is no cache folder.
    """
    return (root or cache_root()) / FOLDER / f"{method}-{key}.json"


def save(record: Mapping[str, Any]) -> Path:
    """Store `record`, in place of what was stored for its method and key; returns its file.

    `record` is fit for JSON and has `method`, `key`, `layers` and what RESULTS names.

    Raises:
        CacheFolderError, OSError: there is no cache folder, or it cannot be written.
        ValueError: the record would not be loaded again.
    """
    path = record_path(record["method"], record["key"])
    if problem := _problem(record, record["method"], record["key"], record.get("layers"), None):
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


def load(
    policy: Method, key: str, num_layers: int, root: Path | None = None
) -> dict[str, Any] | None:
    """The stored record of what `policy` leaves to measurement, or None.

    One that is not of this model, or was measured with other parameters than the policy's, is
    ignored with a warning. `root` is the cache folder if not given.
    """
    root = root or root_to_read()
    if root is None:
        return None
    path = record_path(policy.name, key, root)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Ignoring calibration %s: %s. %s", path, error, _MEND)
        return None
    if problem := _problem(record, policy.name, key, num_layers, policy):
        logger.warning("Ignoring calibration %s: %s. %s", path, problem, _MEND)
        return None
    return record


def _problem(
    record: Any, method: str, key: str, num_layers: int | None, policy: Method | None
) -> str:
    """Why `record` cannot be used for that method, model and policy; empty if it can."""
    if not isinstance(record, Mapping):
        return "it is not a JSON object"
    expected = {"method": method, "key": key, "layers": num_layers}
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
    return _other_settings(record, method, policy)


def _other_settings(record: Mapping[str, Any], method: str, policy: Method | None) -> str:
    """Why the record does not hold for the policy's parameters; empty if it does."""
    criterion = record.get("criterion")
    names = SETTINGS[method].get(criterion) if isinstance(criterion, str) else None
    if names is None:
        return (
            f"its criterion is {criterion!r}, not one of {', '.join(SETTINGS[method])}: it is of "
            "an older vllm-kvx, or no calibration"
        )
    for name in names:
        if name not in record:
            return f"it does not say with which {name} it was measured"
        wanted = getattr(policy, name) if policy is not None else record[name]
        measurement = None if policy is None else policy.to_measure
        if measurement is not None and name == measurement.rate and wanted is None:
            if not allows(type(policy), name, record[name]):
                return f"its {name} is {record[name]!r}, not a rate"
            wanted = record[name] if "rates" in record else measurement.usual_rate(policy)
        if isinstance(wanted, tuple):
            wanted = list(wanted)
        if record[name] != wanted:
            return f"its {name} is {record[name]!r}, wanted is {wanted!r}"
    return "" if policy is None else _other_reduction(record, policy)


def _other_reduction(record: Mapping[str, Any], policy: Method) -> str:
    """Why the record's reduction is not the policy's; empty if it is, or is left to the record."""
    wanted, found = policy.to_measure, record.get("reduction", WINDOW_REDUCTIONS[0])
    if found not in WINDOW_REDUCTIONS:
        return f"its reduction is {found!r}, not one of {', '.join(WINDOW_REDUCTIONS)}"
    if wanted is None or wanted.chooses_reduction(policy):
        return ""
    own = getattr(policy, wanted.reduction) if wanted.reduction else WINDOW_REDUCTIONS[0]
    return "" if found == own else f"its reduction is {found!r}, wanted is {own!r}"
