"""Servers that draft tokens: of those that a step verifies, any number stays.

A rejected token is as if it had never been, though its entries are in the cache.
"""

from collections.abc import Mapping
from dataclasses import replace

from simulation.server import Server, long
from simulation.servers import SERVERS

# A gap that grows forgets the entry that a rejection brings back: `layout.beside_drafts`.
_OVERWRITES = ("selfonly", "selffier")
# Refused at start: `lookahead_checks.WITH_LOOKAHEAD`.
_REFUSED = ("lookahead",)


def drafting(servers: Mapping[str, Server]) -> dict[str, Server]:
    """The same servers, as they would be if they drafted tokens; by names of their own."""
    return {
        f"{name}drafts": replace(server, drafts=5 if server.retrieves else 3)
        for name, server in servers.items()
    }


# The model drafts for itself, and its drafts are in the cache, behind what counts.
_FIER = "fier-64:dense_below=0"
_OWN = {
    "owndrafts": long(
        policy="full",
        layout=(_FIER,),
        requests=("full", _FIER, "fier-64:dense_below=100"),
        drafts=5,
        drafter="fier-32",
    )
}
DRAFTING = _OWN | drafting(
    {n: server for n, server in SERVERS.items() if n not in (*_OVERWRITES, *_REFUSED)}
)
