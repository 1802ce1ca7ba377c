"""Layers that a policy leaves to measurement, as a server finds them before its engine starts.

A layer is found in a record; for FastKV's models also in its paper's table. Otherwise it is
measured now, by the answers to generated lookups, which is done once for a model.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvx.config.measured import MEASURED_KEY, Measured
from vllm_kvx.config.settings import LAYOUT_KEY, POLICY_KEY, policy_is_set
from vllm_kvx.policy.axes import WINDOW_REDUCTIONS, Method
from vllm_kvx.policy.measurement import Measurement
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.layers import (
    CALIBRATED,
    SETTINGS,
    WRAPPERS,
    is_calibrated,
    load,
    record_path,
)
from vllm_kvx.records.model_key import ModelIdentity, architecture_of
from vllm_kvx.server import measure_at_start as at_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Found(NamedTuple):
    """A layer, counted from 0, where it came from, as the log says it, and the reduction there.

    rate: the share of the tokens that was measured with it; None where it is the usual one, or the
        method has none.
    """

    layer: int
    source: str
    reduction: str = WINDOW_REDUCTIONS[0]
    rate: float | None = None

    def values(self, wanted: Measurement) -> dict[str, Any]:
        """By parameter, what takes the place of what was left to measurement."""
        found: dict[str, Any] = {wanted.parameter: self.layer}
        if self.reduction != WINDOW_REDUCTIONS[0]:
            found[wanted.reduction] = self.reduction
        if self.rate is not None:
            found[wanted.rate] = self.rate
        return found

    def says(self, wanted: Measurement) -> str:
        """`layer 12 with tsp_rate=0.4`, for a log."""
        more = [f"{name}={value}" for name, value in self.values(wanted).items()][1:]
        return f"layer {self.layer}" + (f" with {' and '.join(more)}" if more else "")


class PaperModel(NamedTuple):
    """A model of the paper, told by the shape of its configuration: its names are many."""

    name: str
    shape: Mapping[str, Any]
    tsp_layer: int


PAPER = "the paper's"
# Section 5.1 and Appendix C.1 of FastKV. Its third model, Ministral-8B, slides its attention's
# window, which no policy serves.
PAPER_TSP_LAYERS: tuple[PaperModel, ...] = (
    PaperModel(
        "Llama-3.1-8B",
        {
            "architecture": "LlamaForCausalLM",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "rope_theta": 500000,
            "rope_type": "llama3",  # Llama 3's is the default, with a context of 8K.
        },
        15,
    ),
    PaperModel(
        "Mistral-Nemo-12B",
        {
            "architecture": "MistralForCausalLM",
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "rope_theta": 1000000,
            "rope_type": "default",
        },
        19,
    ),
)


def find_measured(
    vllm_config: "VllmConfig", identity: ModelIdentity, may_measure: bool = True
) -> list[str]:
    """Puts the layers that the server's policies leave to measurement into ``additional_config``.

    Only here: the engine's processes read what this one found. Returns a line for the log on each.
    may_measure: whether a layer that is not known is measured; else it is an error.

    Raises:
        PolicyError: a layer is not known and could not be measured.
        ValueError: ``kv_measured`` is not as this function leaves it.
    """
    config = vllm_config.additional_config
    if not policy_is_set(config):
        return []
    assert isinstance(config, dict)
    lines = []
    measured: dict[str, Any] = Measured.of(config).as_config().get(MEASURED_KEY, {})
    # By parameter, the policy that its layer was found for.
    found_for: dict[str, Method] = {}
    for part in parts_of(config):
        wanted = part.unmeasured
        if wanted is None:
            continue
        if wanted.parameter in measured:
            if wanted.parameter in found_for:
                check_alike(part, found_for[wanted.parameter], wanted)
            continue
        found = _layer(vllm_config, identity, part, wanted, may_measure)
        measured |= found.values(wanted)
        config[MEASURED_KEY] = measured
        found_for[wanted.parameter] = part
        name, word = type(part).__name__, f"{wanted.parameter}={wanted.word}"
        lines.append(f"{name}: {word} is {found.says(wanted)} ({found.source}).")
        if found.source == PAPER:
            lines.append(
                f"{name}: this layer was not measured by answers on these weights; "
                f"`vllm-kvx calibrate MODEL --method {part.name}` does."
            )
        if found.layer == vllm_config.model_config.get_total_num_hidden_layers() - 1:
            lines.append(
                f"{name}: that is the last layer, so every token runs at full depth; another "
                f"{wanted.parameter} can be measured on your own prompts (`vllm-kvx calibrate`) or "
                "given."
            )
    return lines


def layer_of(
    policy: Method, identity: ModelIdentity, num_layers: int, root: Path | None = None
) -> Found | None:
    """The layer that `policy` leaves to measurement, for a model; None if it is not known.

    A stored calibration wins over the paper's table. One that was measured for other parameters
    than the policy's is ignored with a warning.

    num_layers: the model's decoder layers, counted from 0 in the answer.
    root: the cache folder that records are looked for in, if not the usual one.

    Raises:
        OSError: the model's weights are there and cannot be read.
    """
    wanted = policy.to_measure
    assert wanted is not None
    key, config = identity.key, identity.config
    record = load(policy, key, num_layers, root)
    if record is not None:
        measured = "by answers" if record["criterion"] == "answers" else "by the paper's criterion"
        where = f": {record_path(policy.name, key)}" if root is None else " for this start alone"
        rate = None
        if wanted.rate:
            # One that the policy names, too: requests that leave theirs open get the layer with it.
            named = getattr(policy, wanted.rate)
            rate = record[wanted.rate] if named is None else named
        return Found(
            record[wanted.parameter],
            f"calibrated {measured}{where}",
            record.get("reduction", WINDOW_REDUCTIONS[0]),
            None if rate is None or rate == wanted.usual_rate(policy) else rate,
        )
    if policy.name == "fastkv" and config.get("num_hidden_layers") == num_layers:
        layer = paper_tsp_layer(config)
        return None if layer is None else Found(layer, PAPER)
    return None


def paper_tsp_layer(config: Mapping[str, Any]) -> int | None:
    """The TSP layer that the paper gives for this model, told by its shape; None if none."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    # transformers 5 has one field for what were two.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fields = {
        **config,
        "architecture": architecture_of(config),
        # Old configurations leave out what follows from the rest.
        "head_dim": config.get("head_dim") or (hidden // heads if hidden and heads else None),
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta"),
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
    }
    for paper in PAPER_TSP_LAYERS:
        if all(fields.get(name) == value for name, value in paper.shape.items()):
            return paper.tsp_layer
    return None


def parts_of(config: dict[str, Any]) -> list[Method]:
    """The methods that the server was started for; names that do not parse fail elsewhere."""
    names = config.get(LAYOUT_KEY)
    parts: list[Method] = []
    for name in [config[POLICY_KEY], *(names if isinstance(names, (list, tuple)) else ())]:
        try:
            parts += parse_policy(name).parts
        except PolicyError:
            continue
    return parts


def check_alike(part: Method, other: Method, wanted: Measurement) -> None:
    """Raise PolicyError if a layer that was found for `other` does not hold for `part`."""
    reduction = (wanted.reduction,) if wanted.reduction else ()
    for name in SETTINGS[part.name]["answers"] + reduction:
        if getattr(part, name) != getattr(other, name):
            raise PolicyError(
                f"{part} and {other} leave {wanted.parameter} to measurement with another {name}, "
                f"and a server measures it once: write {wanted.parameter}=<int> in one of them"
            )


def _layer(
    vllm_config: "VllmConfig",
    identity: ModelIdentity,
    part: Method,
    wanted: Measurement,
    may_measure: bool,
) -> Found:
    """The layer for `part`: known, or measured now."""
    model, revision = identity.path, identity.revision
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()

    def known(root: Path | None = None) -> Found | None:
        return layer_of(part, identity, num_layers, root)

    found = known()
    if found is not None:
        return found
    if why := cannot_be_measured(vllm_config):
        raise PolicyError(
            f"{part}: {wanted.parameter} of this model is not known, and {why}: write "
            f"{wanted.parameter}=<int>, and compare layers by `vllm-kvx evaluate`"
        )
    arguments = calibrate_arguments(part, model, revision)
    if vllm_config.load_config.load_format == "dummy":
        why = "its weights are dummies"
    elif not may_measure:
        why = "the configuration is refused"
    else:
        from vllm.logger import init_logger

        name = hashlib.sha256(json.dumps([model, revision]).encode()).hexdigest()[:32]
        measurement = at_start.Measurement(
            f"{type(part).__name__}'s layer for {model}",
            # Not the record's name: a hub's weights, which it is made of, may come meanwhile.
            f"{part.name}-{name}.lock",
            at_start.command_of(*arguments, "--no-plot"),
        )
        try:
            return at_start.measured(measurement, known, init_logger("vllm.kvx"))
        except at_start.NotMeasuredError as error:
            why = str(error)
    raise PolicyError(
        f"{part}: {wanted.parameter} of this model is not known, and was not measured ({why}): "
        f"write {wanted.parameter}=<int>, or measure it beforehand with `vllm-kvx "
        f"{shlex.join(arguments)}`, which takes your own prompts, too (--prompts FILE)"
    )


def cannot_be_measured(vllm_config: "VllmConfig") -> str | None:
    """Why `vllm-kvx calibrate` cannot run this model; None if it can."""
    model_config = vllm_config.model_config
    # The whole model's architecture: one that wraps a language model is loaded in another way.
    names = model_config.hf_config.architectures
    architecture = names[0] if names else "none"
    inner = model_config.hf_text_config.model_type
    if is_calibrated(architecture, inner):
        return None
    found = f"{architecture} of a {inner}" if architecture in WRAPPERS else architecture
    return (
        f"`vllm-kvx calibrate`, which runs {', '.join((*CALIBRATED, *WRAPPERS))}, cannot measure "
        f"it (architecture: {found})"
    )


def calibrate_arguments(part: Method, model: str, revision: str | None) -> list[str]:
    """Those of the `vllm-kvx` that measures for `part`, by answers to generated lookups."""
    arguments = ["calibrate", model, "--method", part.name]
    for parameter in SETTINGS[part.name]["answers"]:
        # A rate that is left open is searched for.
        if (value := getattr(part, parameter)) is not None:
            arguments += [f"--{parameter.replace('_', '-')}", str(value)]
    wanted = part.to_measure
    if wanted is not None and wanted.reduction and not wanted.chooses_reduction(part):
        arguments += ["--reduction", getattr(part, wanted.reduction)]
    if revision is not None:
        arguments += ["--revision", revision]
    return arguments
