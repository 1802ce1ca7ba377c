"""Layers that a policy leaves to measurement, as a server finds them before its engine starts.

FastKV's TSP layer is found in a record or in the paper's table. StructKV's pivot is found in a
record, or measured now, which is done once for a model.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm_kvx.calibration.model_key import architecture_of, model_dir, model_key
from vllm_kvx.calibration.records import load, record_path
from vllm_kvx.policy.axes import Method, Weights
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.spec import PolicyError, parse_policy
from vllm_kvx.settings import LAYOUT_KEY, POLICY_KEY, policy_is_set

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class Found(NamedTuple):
    """A layer, counted from 0, and where it came from, as the log says it."""

    layer: int
    source: str


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


def find_measured(vllm_config: "VllmConfig") -> list[str]:
    """Puts the layers that the server's policies leave to measurement into ``additional_config``.

    Only here: the engine's processes read what this one found. Returns a line for the log on each.

    Raises:
        PolicyError: a layer is not known and could not be measured.
    """
    config = vllm_config.additional_config
    if not policy_is_set(config):
        return []
    assert isinstance(config, dict)
    lines = []
    for part in _parts(config):
        wanted = part.unmeasured
        if wanted is None or wanted.key in config:
            continue
        found = _RESOLVERS[part.name](vllm_config, part)
        if found is None:
            continue
        layer, source = found
        config[wanted.key] = layer
        name, word = type(part).__name__, f"{wanted.parameter}={wanted.word}"
        lines.append(f"{name}: {word} is layer {layer} ({source}).")
        if layer == vllm_config.model_config.get_total_num_hidden_layers() - 1:
            lines.append(
                f"{name}: that is the last layer, so every token runs at full depth; another "
                f"{wanted.parameter} can be measured on your own prompts (`vllm-kvx calibrate`) or "
                "given."
            )
    return lines


def tsp_layer_of(
    config: Mapping[str, Any], model: str, num_layers: int, revision: str | None = None
) -> Found | None:
    """FastKV's TSP layer for a model; None if it is not known.

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
        return Found(record["tsp_layer"], f"calibrated: {record_path('fastkv', key)}")
    layer = paper_tsp_layer(config)
    if layer is not None and config.get("num_hidden_layers") == num_layers:
        return Found(layer, "paper")
    return None


def pivot_of_model(
    config: Mapping[str, Any],
    model: str,
    num_layers: int,
    window: int,
    weights: Sequence[float],
    revision: str | None = None,
) -> Found | None:
    """StructKV's pivot for a model; None if it was not measured so.

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
    return Found(record["pivot"], f"calibrated: {record_path('structkv', key)}")


def paper_tsp_layer(config: Mapping[str, Any]) -> int | None:
    """The TSP layer that the paper gives for a model of this shape; None if it gives none."""
    fields = {**config, "architecture": architecture_of(config)}
    for paper in PAPER_TSP_LAYERS:
        if all(fields.get(name) == value for name, value in paper.shape.items()):
            return paper.tsp_layer
    return None


def _parts(config: dict[str, Any]) -> list[Method]:
    """The methods that the server was started for; names that do not parse fail elsewhere."""
    names = config.get(LAYOUT_KEY)
    parts: list[Method] = []
    for name in [config[POLICY_KEY], *(names if isinstance(names, (list, tuple)) else ())]:
        try:
            parts += parse_policy(name).parts
        except PolicyError:
            continue
    return parts


def _model(model_config: "ModelConfig") -> tuple[dict[str, Any], str, int, str | None]:
    """Configuration, name, layers and revision."""
    return (
        model_config.hf_text_config.to_dict(),
        model_config.model,
        model_config.get_total_num_hidden_layers(),
        model_config.revision,
    )


def _tsp_layer(vllm_config: "VllmConfig", method: Method) -> Found | None:
    return tsp_layer_of(*_model(vllm_config.model_config))


def _pivot(vllm_config: "VllmConfig", method: Method) -> Found:
    # Safe: _RESOLVERS calls this for the method named structkv, and names are unique.
    structkv = cast(StructKV, method)
    config, model, num_layers, revision = _model(vllm_config.model_config)
    window, weights = structkv.window, structkv.weights

    def stored() -> Found | None:
        return pivot_of_model(config, model, num_layers, window, weights, revision)

    found = stored()
    if found is not None:
        return found
    if vllm_config.load_config.load_format == "dummy":
        why = "its weights are dummies"
    else:
        why = _measure(model, window, weights, revision)
        found = stored()
        if found is not None:
            return found
    raise PolicyError(
        f"{method}: the pivot of this model was never measured, and cannot be now ({why}): write "
        "pivot=<int>, or measure it with `vllm-kvx calibrate MODEL --method structkv --prompts "
        "FILE`"
    )


def _measure(model: str, window: int, weights: Weights, revision: str | None) -> str:
    """Runs the tool on its built-in prompts, in a process of its own: it needs the device too.

    Returns the last thing that it said.
    """
    from vllm.logger import init_logger

    logger = init_logger("vllm.kvx")
    logger.info("Measuring StructKV's pivot for %s; this is done once for a model.", model)
    command = [sys.executable, "-m", "vllm_kvx.cli", "calibrate", model, "--no-plot"]
    command += ["--method", "structkv", "--window", str(window)]
    command += ["--weights", ",".join(map(str, weights))]
    if revision is not None:
        command += ["--revision", revision]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = done.stderr.strip().splitlines()
    return said[-1] if said and done.returncode else "the measurement left no result"


# By method, what finds its layer; None leaves it unknown.
_RESOLVERS: dict[str, Callable[["VllmConfig", Method], Found | None]] = {
    "fastkv": _tsp_layer,
    "structkv": _pivot,
}
