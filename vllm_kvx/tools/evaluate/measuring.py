"""What an engine measures before it answers: that takes minutes, and its log is not shown."""

import shlex
from collections.abc import Iterable

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.server.measured_layers import calibrate_arguments, layer_of
from vllm_kvx.tools.evaluate.original import Model


def measures_first(model: Model, policies: Iterable[KVPolicy]) -> list[str]:
    """A line on each layer that an engine for these policies is yet to measure for the model."""
    lines: dict[str, str] = {}
    for part in (part for policy in policies for part in policy.parts):
        wanted, num_layers = part.unmeasured, model.text_config.num_hidden_layers
        if wanted is None or layer_of(part, model.identity, num_layers) is not None:
            continue
        command = shlex.join(calibrate_arguments(part, model.source, model.revision))
        lines[wanted.parameter] = (
            f"{part}: {wanted.parameter} is not known for {model.name}, so the engine measures it "
            f"first, by `vllm-kvx {command}`: minutes, once for a model. With a layer in the "
            f"policy, {wanted.parameter}=<int>, nothing is measured."
        )
    return list(lines.values())
