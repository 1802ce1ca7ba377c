"""The sizes that a server's flags ask for, whatever vLLM says of its other flags."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

# As vLLM reads them: `32k` is 32,000, `32K` 32,768.
_UNITS = {
    unit: base**power
    for units, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, unit in enumerate(units, 1)
}


def sizes_in(serve_args: Sequence[str]) -> dict[str, float]:
    """By name, such as `block_size`, those that are given in flags that vLLM does not take."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _SIZES:
        # Without its value it is None, not an error that ends the process.
        parser.add_argument(flag_of(name), f"--{name}", nargs="?")
    return _sizes(vars(parser.parse_known_args(serve_args)[0]))


def sizes_of(engine_args: Any) -> dict[str, float]:
    """The same of what vLLM made of flags that it takes, where they are not its defaults."""
    found, default = vars(engine_args), type(engine_args)
    return _sizes({name: found[name] for name in _SIZES if found[name] != getattr(default, name)})


def _sizes(values: Mapping[str, Any]) -> dict[str, float]:
    found = {name: _SIZES[name](value) for name, value in values.items()}
    return {name: size for name, size in found.items() if size is not None}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _count(value: int | str | None) -> int | None:
    """None where it is no number above 0, as where vLLM is to find the length."""
    if isinstance(value, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+(?=[kmgt]))?)([kKmMgGtT]?)", value.strip())
        value = None if parts is None else int(float(parts[1]) * _UNITS.get(parts[2], 1))
    return value if value is not None and value > 0 else None


def _share(value: float | str | None) -> float | None:
    try:
        share = float(value or 0)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


_SIZES = {
    "block_size": _count,
    "max_model_len": _count,
    "max_num_batched_tokens": _count,
    "gpu_memory_utilization": _share,
}
