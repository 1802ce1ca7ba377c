"""Parts of a server that `additional_config` may turn off, to find a fault."""

from typing import Any

from vllm_kvx.config.environment import REPLACED

DISABLE_KEY = "kv_disable"
# Whose value is a list of some of these.
SPLIT_LAYERS, COMPILED_RANGES = PARTS = tuple(REPLACED.values())


def disabled_parts(config: Any) -> frozenset[str]:
    """The parts that ``additional_config`` disables.

    Raises:
        ValueError: it disables something else.
    """
    value = config.get(DISABLE_KEY, []) if isinstance(config, dict) else []
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
        raise ValueError(f'{DISABLE_KEY} must be a list such as ["{PARTS[0]}"], got {value!r}')
    if unknown := [part for part in value if part not in PARTS]:
        raise ValueError(
            f"{DISABLE_KEY} cannot disable {', '.join(map(repr, unknown))}; "
            f"it may name {', '.join(PARTS)}"
        )
    return frozenset(value)
