"""Servers whose requests have LoRA adapters, and such as publish KV cache events.

Prefixes and hidden states are an adapter's own; a step has room for fewer adapters than there are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from simulation.server import Server

# It rates values by the base model's projections: `start_checks.WITH_VALUE_NORMS`; tokens that are
# drafted behind prompts have no adapter: `lookahead_checks`.
_REFUSED = "criticalkv", "lookahead="
# Whose cached blocks all requests may read: `start_checks.WITH_PARTIAL_PREFIXES`.
_SHARE_WHOLE = ("shared", "fier", "quest", "shareddrafts", "fierdrafts", "owndrafts")


def with_adapters(servers: Mapping[str, Server]) -> dict[str, Server]:
    """The same servers with three adapters, by names of their own, but for what is refused."""
    return {
        f"{name}adapters": replace(
            server,
            layout=_allowed(server.layout),
            requests=_allowed(server.requests),
            adapters=3,
        )
        for name, server in servers.items()
        # The model drafts for itself without adapters alone.
        if server.drafter is None and _allowed([server.policy])
    }


def _allowed(policies: Iterable[str]) -> tuple[str, ...]:
    return tuple(each for each in policies if not any(part in each for part in _REFUSED))


def with_events(servers: Mapping[str, Server]) -> dict[str, Server]:
    """Those of the servers that may publish KV cache events, by names of their own."""
    found = {name: servers[name] for name in _SHARE_WHOLE}
    return {
        f"{name}events": replace(server, events=True, adapters=2 if server.drafter is None else 0)
        for name, server in found.items()
    }
