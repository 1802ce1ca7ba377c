"""What was measured for this model and policy, and the command for each that was not."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from vllm_kvx.config.measured import MEASURED_KEY
from vllm_kvx.policy.axes import Method
from vllm_kvx.server import measure_at_start as at_start
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.server.measured_layers import (
    PAPER,
    calibrate_arguments,
    cannot_be_measured,
)
from vllm_kvx.server.tuned_weights_notice import TunedWeightsNotice
from vllm_kvx.tools.doctor.asked import (
    additional_config,
    identity_of,
    known_layer,
    layers_for,
    left_to_measurement,
    policies_of,
    settings_of,
)
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok, problem
from vllm_kvx.tools.doctor.surroundings import why_not_kept


def measured(context: Context) -> Iterator[Finding]:
    """Layers, what policies keep of the answers, and what the weights were tuned for."""
    try:
        config = additional_config(context)
        settings = settings_of(context)
    except ValueError:
        return  # The policy's section says so.
    left = left_to_measurement(config)
    for part in left:
        yield from _layer(context, part, layers_for(context, config)[MEASURED_KEY])
    if settings is None:
        yield note("no policy was asked for", "vllm-kvx doctor MODEL --kv-policy POLICY")
        return
    identity = identity_of(context)
    # Where a layer stands in, the policy's own name says what to evaluate.
    waits = any(known_layer(context, part) is None for part in left)
    policies = policies_of(config) if waits else settings.policies
    lines = TunedWeightsNotice(identity, settings.num_layers).lines(settings.policies)
    lines += EvaluationNotice(identity).lines(policies)
    for line, is_well in lines:
        yield ok(line) if is_well else note(line, _command(line))
    for served in settings.policies:
        for part in served.parts:
            if notice := part.notice(settings.num_layers):
                yield note(f"{served}: {notice}")


def _command(line: str) -> str:
    """The command in a sentence for the log, which has it between backticks."""
    found = re.search("`(vllm-kvx [^`]+)`", line)
    return found[1] if found else ""


def _layer(context: Context, part: Method, measured: dict[str, Any]) -> Iterator[Finding]:
    wanted, found = part.to_measure, known_layer(context, part)
    assert wanted is not None
    model, revision = context.request.model or "MODEL", context.request.revision
    command = f"vllm-kvx {shlex.join(calibrate_arguments(part, model, revision))}"
    word = f"{wanted.parameter}={wanted.word}"
    if found is None:
        says = (
            f"{part}: {word} was not measured for this model; above, layer "
            f"{measured[wanted.parameter]} stands in for it."
        )
        yield _to_measure(context, says, command)
    elif found.source == PAPER:
        yield note(f"{part}: {word} is {found.says(wanted)} ({PAPER}), not measured here", command)
    else:
        yield ok(f"{part}: {word} is {found.says(wanted)} ({found.source})")


def _to_measure(context: Context, says: str, command: str) -> Finding:
    """What a server's start does about a layer that is not known: it measures, or it ends."""
    config = context.vllm_config
    if config is not None and (why := cannot_be_measured(config)):
        return problem(f"{says} A server does not start: {why}. Write a layer into the policy")
    if config is not None and config.load_config.load_format == "dummy":
        return problem(f"{says} A server cannot measure it: its weights are dummies", command)
    try:
        limit = at_start.limit()
    except ValueError as error:
        return problem(f"{says} A server would measure it, but {error}", command)
    if not limit:
        return problem(
            f"{says} A server does not start: {at_start.LIMIT_VARIABLE}=0 lets none measure",
            command,
        )
    if why := why_not_kept():
        return note(
            f"{says} Every start of a server measures it, and cannot keep it: {why}", command
        )
    return note(f"{says} A server measures it at its first start, in at most {limit:,g} s", command)
