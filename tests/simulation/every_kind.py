"""The simulation that suits a server."""

from vllm.config import VllmConfig

from simulation.handing_over import HandingOver
from simulation.run import Simulation
from simulation.server import Server
from vllm_kvx.config.connectors import NIXL


def of_server(server: Server, config: VllmConfig, seed: int) -> Simulation | HandingOver:
    """config: see ``Server.config``."""
    kind = HandingOver if server.connector == NIXL else Simulation
    return kind(server, config, seed)
