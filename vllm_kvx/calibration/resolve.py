"""Layers that have to be measured once for a model: found, or measured before the engine starts."""

import subprocess
import sys
from typing import TYPE_CHECKING, Any

from vllm_kvx.calibration import records as calibration
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.policy.parameters import Method
from vllm_kvx.policy.spec import PolicyError, parse_policy
from vllm_kvx.settings import LAYOUT_KEY, PIVOT_KEY, POLICY_KEY, TSP_LAYER_KEY, policy_is_set

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def find_measured(vllm_config: "VllmConfig") -> list[str]:
    """Puts the layers that the server's policies leave to measurement into ``additional_config``.

    Once, here: other processes read what this one found. Returns a line for the log on each.

    Raises:
        PolicyError: StructKV's pivot is not known and could not be measured.
    """
    config = vllm_config.additional_config
    if not policy_is_set(config):
        return []
    assert isinstance(config, dict)
    lines = []
    for part in _parts(config):
        if isinstance(part, FastKV) and part.tsp_layer == "auto" and TSP_LAYER_KEY not in config:
            found = calibration.tsp_layer_of(*_model(vllm_config.model_config))
            if found is not None:
                config[TSP_LAYER_KEY], source = found
                lines.append(f"FastKV: tsp_layer=auto is layer {found[0]} ({source}).")
        if isinstance(part, StructKV) and part.pivot == "calibrated" and PIVOT_KEY not in config:
            if part.struct_rate == 1 and part.granularity == "token":
                continue  # It propagates everything and needs no pivot.
            found = _pivot(vllm_config, part)
            config[PIVOT_KEY], source = found
            lines.append(f"StructKV: pivot=calibrated is layer {found[0]} ({source}).")
            if found[0] == vllm_config.model_config.get_total_num_hidden_layers() - 1:
                lines.append(
                    "StructKV: that is the last layer, so every token runs at full depth; another "
                    "pivot can be measured on your own prompts (`vllm-kvx calibrate`) or given."
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


def _pivot(vllm_config: "VllmConfig", method: StructKV) -> tuple[int, str]:
    config, model, num_layers, revision = _model(vllm_config.model_config)
    weights = (method.entropy_weight, method.sparsity_weight, method.variance_weight)

    def stored() -> tuple[int, str] | None:
        return calibration.pivot_of_model(
            config, model, num_layers, method.window, weights, revision
        )

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
