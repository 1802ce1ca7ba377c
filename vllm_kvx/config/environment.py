"""Variables of the environment that are switches."""

import os

# Variables of earlier versions, and the entry of ``kv_disable`` that says the same.
REPLACED = {"KVX_INNER_CUTS": "split_layers", "KVX_STOCK_PIECES": "compiled_ranges"}

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Whether `variable` is set, to anything but 0, false, no or off, in any case."""
    return os.environ.get(variable, "").strip().lower() not in _OFF


def is_off(variable: str) -> bool:
    """Whether `variable`, which is on by itself, is set to 0, false, no, off or nothing."""
    return variable in os.environ and not is_on(variable)


def instead_of(variable: str) -> str:
    """What to write in the place of `variable`, one of `REPLACED`, which is set."""
    if is_on(variable):
        return f"unset {variable}: that is the default"
    entry = f'{{"kv_disable": ["{REPLACED[variable]}"]}}'
    return f"unset {variable}, and write {entry} in --additional-config"


def refuse_replaced() -> None:
    """Raises ValueError if a variable is set that earlier versions read."""
    for variable in REPLACED:
        if variable in os.environ:
            raise ValueError(f"{variable} is no longer read: {instead_of(variable)}")
