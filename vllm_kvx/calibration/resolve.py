"""Layers that have to be measured once for a model: found, or measured before the engine starts."""

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvx.calibration import records
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.spec import PolicyError, parse_policy
from vllm_kvx.settings import LAYOUT_KEY, POLICY_KEY, policy_is_set

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def find_measured(vllm_config: "VllmConfig") -> list[str]:
    """Puts the layers that the server's policies leave to measurement into ``additional_config``.

    Once, here: other processes read what this one found. Returns a line for the log on each.

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
    return (
        model_config.hf_text_config.to_dict(),
        model_config.model,
        model_config.get_total_num_hidden_layers(),
        model_config.revision,
    )


def _tsp_layer(vllm_config: "VllmConfig", method: Method) -> tuple[int, str] | None:
    return records.tsp_layer_of(*_model(vllm_config.model_config))


def _pivot(vllm_config: "VllmConfig", method: Method) -> tuple[int, str]:
    assert isinstance(method, StructKV)
    config, model, num_layers, revision = _model(vllm_config.model_config)
    weights = method.weights

    def stored() -> tuple[int, str] | None:
        return records.pivot_of_model(config, model, num_layers, method.window, weights, revision)

    found = stored()
    if found is not None:
        return found
    if vllm_config.load_config.load_format == "dummy":
        why = "its weights are dummies"
    else:
        why = _measure(model, method.window, weights, revision)
        found = stored()
        if found is not None:
            return found
    raise PolicyError(
        f"{method}: the pivot of this model was never measured, and cannot be now ({why}): write "
        "pivot=<int>, or measure it with `vllm-kvx calibrate MODEL --method structkv --prompts "
        "FILE`"
    )


def _measure(
    model: str, window: int, weights: tuple[float, float, float], revision: str | None
) -> str:
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


# By method, what finds its layer, with where it came from; None leaves it unknown.
_RESOLVERS: dict[str, Callable[["VllmConfig", Method], tuple[int, str] | None]] = {
    "fastkv": _tsp_layer,
    "structkv": _pivot,
}
