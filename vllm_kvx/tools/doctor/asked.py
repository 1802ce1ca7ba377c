"""The policies that were asked for, and the layers that they leave to measurement."""

from types import SimpleNamespace
from typing import Any

from vllm_kvx.config.flags import merge_flags
from vllm_kvx.config.measured import MEASURED_KEY
from vllm_kvx.config.policy_layers import windows_by_config
from vllm_kvx.config.settings import LAYOUT_KEY, POLICY_KEY, KVSettings, policy_is_set
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.windows import Windows
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.auto_policy import as_judged, asks_for_auto, with_choice
from vllm_kvx.server.measured_layers import Found, layer_of, parts_of
from vllm_kvx.tools.doctor.findings import Context
from vllm_kvx.tools.kv_layers import KVLayers


def additional_config(context: Context) -> dict[str, Any]:
    """``additional_config`` as the server makes it of its flags, as far as it is known.

    Raises:
        ValueError: as ``settings.merge_flags``.
    """
    if context.additional_config is not None:
        return dict(context.additional_config)
    request = context.request
    config = request.additional_config
    merged = merge_flags(request.policy, request.request_policies, config, request.layout)
    return dict(with_auto(context, merged))


def with_auto(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the policy that a server would choose in the place of `auto`.

    What the server's other flags rule out is not known here.

    Raises:
        PolicyError: `auto` is malformed, or there is no model to choose for.
    """
    if not asks_for_auto(config):
        return config
    lacks = context.missing.get("model") or context.missing.get("layers")
    if lacks:
        raise PolicyError(
            f"{config[POLICY_KEY]} is chosen by what was measured of a model: {lacks}"
        )

    def why_not(name: str) -> str | None:
        layers = context.text_config["num_hidden_layers"]
        try:
            KVSettings.of(as_judged(config, name), layers, _windows(context))
        except ValueError as error:
            return str(error)
        return None

    return dict(with_choice(config, identity_of(context), why_not))


def left_to_measurement(config: dict[str, Any]) -> list[Method]:
    """The methods in `config` whose layer has to be measured, one for each such layer."""
    if config.get(POLICY_KEY) is None:
        return []
    measured = config.get(MEASURED_KEY)
    measured = measured if isinstance(measured, dict) else {}
    found: dict[str, Method] = {}
    for part in parts_of(config):
        wanted = part.unmeasured
        if wanted is not None and wanted.parameter not in measured:
            found.setdefault(wanted.parameter, part)
    return list(found.values())


def policies_of(config: dict[str, Any]) -> list[KVPolicy]:
    """The policies in `config` as they are written, no layer put in; they parse."""
    return [parse_policy(name) for name in (config[POLICY_KEY], *config.get(LAYOUT_KEY, ()))]


def identity_of(context: Context) -> ModelIdentity:
    """The model as servers look for what was measured of it, without vLLM."""
    request = context.request
    return ModelIdentity(
        request.model or "", context.text_config, request.revision, context.kv_cache_dtype
    )


def known_layer(context: Context, part: Method) -> Found | None:
    """The layer that a server would find for `part`; None if it would have to measure it."""
    return layer_of(part, identity_of(context), context.text_config["num_hidden_layers"])


def layers_for(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """The key of ``additional_config`` for the layers that `config` leaves to measurement.

    One that is known is what a server would find. For one that is not, the middle layer stands in:
    a check of the flags needs some layer, and measuring takes the weights. It is 0 where the number
    of layers is not known.
    """
    left = left_to_measurement(config)
    measured = config.get(MEASURED_KEY) or {}
    if not left or not isinstance(measured, dict):
        return {}
    measured = dict(measured)
    for part in left:
        wanted = part.to_measure
        assert wanted is not None
        if "layers" in context.missing:
            measured[wanted.parameter] = 0
            continue
        found = known_layer(context, part)
        if found is None:
            measured[wanted.parameter] = _stand_in(context)
            continue
        measured |= found.values(wanted)
    return {MEASURED_KEY: measured}


def _windows(context: Context) -> Windows | None:
    """The model's layers that slide, where all others have full attention."""
    return windows_by_config(SimpleNamespace(**context.text_config))


def _stand_in(context: Context) -> int:
    """The layer with full attention next to the middle, the lower of two."""
    count, windows = context.text_config["num_hidden_layers"], _windows(context)
    middle, sliding = (count - 1) // 2, () if windows is None else windows.layers
    full = [layer for layer in range(count) if layer not in sliding]
    return min(full or [middle], key=lambda layer: abs(layer - middle))


def settings_of(context: Context) -> KVSettings | None:
    """The server's settings, with layers as ``layers_for`` says; None if no policy is asked for.

    Raises:
        PolicyError, ValueError: as ``KVSettings.of``.
    """
    config = additional_config(context)
    if not policy_is_set(config):
        return None
    config = {**config, **layers_for(context, config)}
    settings = KVSettings.of(config, context.text_config["num_hidden_layers"])
    layers = KVLayers.of(context.text_config)
    if layers is None or settings.layout.propagates:
        # As a server does: each may know of layers that slide.
        return KVSettings.of(config, settings.num_layers, _windows(context))
    # As a server does: what a policy stores is counted over its own layers.
    return KVSettings.of(config, layers.full)
