"""Servers with KV connectors.

Some bring back blocks that another life of the pool has stored. Their policies keep whole prompts:
``connector_checks.WITHOUT_WHOLE_PROMPTS``. Others are two, of which one goes on with the prompts
that the other has computed, or with what is left of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from simulation.server import Server, long
from vllm_kvx.config.connectors import NIXL

_FIER = "fier-64:dense_below=0"
_RETRIEVES = (_FIER, "fier-64:dense_below=100", "full")

OFFLOADING: dict[str, Server] = {
    "fulloffloaded": Server(
        "full", (), ("full",), repeats=0.6, connector="OffloadingConnector", adapters=2
    ),
    "fieroffloaded": long(
        policy=_FIER,
        layout=(),
        requests=_RETRIEVES,
        repeats=0.6,
        connector="OffloadingConnector",
    ),
}


def handing_over(servers: Mapping[str, Server]) -> dict[str, Server]:
    """Pairs of these servers, by names of their own, without what is refused: waiting for tokens
    that the first one of them does not generate (``connector_checks.beside_connectors``).
    """
    return {
        f"{name}handed": replace(
            server,
            layout=tuple(each for each in server.layout if "after=" not in each),
            requests=tuple(each for each in server.requests if "after=" not in each),
            connector=NIXL,
        )
        for name, server in servers.items()
        if "after=" not in server.policy
    }
