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
        parser.add_argument(flag_of(name), nargs="?")
    # vLLM takes `_` in any place of a flag for `-`.
    given = [each if not each.startswith("--") else _dashed(each) for each in serve_args]
    return _sizes(vars(parser.parse_known_args(given)[0]))


def sizes_of(engine_args: Any) -> dict[str, float]:
    """The same of what vLLM made of flags that it takes, where they are not its defaults."""
    found, default = vars(engine_args), type(engine_args)
    return _sizes({name: found[name] for name in _SIZES if found[name] != getattr(default, name)})


def _sizes(values: Mapping[str, Any]) -> dict[str, float]:
    found = {name: _SIZES[name](value) for name, value in values.items()}
    return {name: size for name, size in found.items() if size is not None}


def _dashed(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _count(value: int | str | None) -> int | None:
    """None where it is no number above 0, as where vLLM is to find the length."""
    if isinstance(value, str):
        # No more digits than a float holds.
        parts = re.fullmatch(r"(\d{1,15}(?:\.\d+(?=[kmgt]))?)([kKmMgGtT]?)", value.strip())
        value = None if parts is None else int(float(parts[1]) * _UNITS.get(parts[2], 1))
    return value if value is not None and value > 0 else None


def _blocks(value: int | str | None) -> int | None:
    """A count without a unit."""
    return _count(value) if not isinstance(value, str) or value.strip().isdecimal() else None


def _share(value: float | str | None) -> float | None:
    try:
        share = float(value or 0)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


_SIZES = {
    "block_size": _blocks,
    "max_model_len": _count,
    "max_num_batched_tokens": _count,
    "gpu_memory_utilization": _share,
}
