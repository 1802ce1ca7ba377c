"""Options of our own that pytest takes; ``tests/conftest.py`` reads them before any test module.

Processes of pytest-xdist get the same options as the first one.
"""

from typing import Any

import pytest

_given: dict[str, Any] = {}


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-kvx")
    group.addoption("--nightly", action="store_true", help="run longer repetitions, too")
    group.addoption("--seeds", type=int, metavar="N", help="of each server of the simulation")
    group.addoption("--turns", type=int, metavar="N", help="of sessions, simulated or on an engine")
    group.addoption("--requests", type=int, metavar="N", help="of the soak (default: 120)")
    group.addoption("--soak-adapters", type=int, metavar="N", help="LoRA adapters of the soak")
    drafts = "tokens the soak drafts a step, by ngram or, as kvx:K, by the model itself"
    group.addoption("--soak-drafts", metavar="[METHOD:]K", help=drafts)
    events = "an engine of the soak publishes KV cache events"
    group.addoption("--soak-events", action="store_true", help=events)
    group.addoption("--soak-output", metavar="FILE", help="where the soak writes its figures")


def read(config: pytest.Config) -> None:
    """Keeps what `config` was called with."""
    soak = ("soak_adapters", "soak_drafts", "soak_events", "soak_output")
    for name in ("nightly", "seeds", "turns", "requests", *soak):
        _given[name] = config.getoption(name)


def nightly() -> bool:
    """Whether longer repetitions run, too."""
    return bool(_given.get("nightly"))


def seeds() -> int | None:
    """How many runs each server of the simulation has; None: what the tests choose."""
    return _given.get("seeds")


def turns(by_day: int, at_night: int) -> int:
    """How many turns sessions have; unless told, more of them with ``--nightly``."""
    found: int | None = _given.get("turns")
    if found is not None:
        return found
    return at_night if nightly() else by_day


def requests() -> int:
    """How many requests the soak sends, 120 unless told: two minutes of one core."""
    found: int | None = _given.get("requests")
    return 120 if found is None else found


def soak_adapters() -> int:
    """How many LoRA adapters the soak's conversations have, beside the base model; 0 unless told.

    Those of an engine then take turns in one slot for their weights.
    """
    return _given.get("soak_adapters") or 0


def soak_drafts() -> tuple[str, int]:
    """What drafts in the soak's load, and how many tokens a step; 0 unless told.

    Raises:
        pytest.UsageError: what was given is neither a number nor a method and one.
    """
    given: str = _given.get("soak_drafts") or "0"
    method, _, count = given.rpartition(":")
    if method not in ("", "ngram", "kvx") or not count.isdecimal():
        raise pytest.UsageError(f"--soak-drafts {given}: give K, ngram:K or kvx:K")
    return method or "ngram", int(count)


def soak_events() -> bool:
    """Whether the soak's engine publishes KV cache events, under policies that allow it."""
    return bool(_given.get("soak_events"))


def soak_output() -> str | None:
    """Where the soak's figures go; None: nowhere."""
    return _given.get("soak_output")
