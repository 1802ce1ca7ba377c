"""Servers in situations that random traffic hardly ever brings about."""

from dataclasses import replace
from pathlib import Path

from simulation.client import AMPLE, Client
from simulation.servers import SERVERS
from simulation.traffic import VOCAB

FIER = "fier-64:dense_below=0"


def test_resumes_behind_a_prefix_of_the_same_step(tmp_path: Path, one_thread: None) -> None:
    """The only token that a request has left retrieves from what another computes meanwhile.

    Its prompt is whole blocks, all of which are the other's prefix. Sidecars of these blocks are
    written after the step, unless beside each layer.
    """
    server = SERVERS["fier"]
    case = replace(AMPLE, shares_prefixes=True, max_chunk=64)
    client = Client(server, server.config(tmp_path), case)
    prefix = [number % VOCAB for number in range(2 * server.block_size)]
    client.send("computes", FIER, [*prefix, *[1] * 100])
    client.send("resumes", FIER, prefix, answer=10)
    client.step()
    assert list(client.began) == ["computes", "resumes"]
    client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    hits = client.engine.worker.counts["prefix hits"]
    client.step()
    assert client.engine.worker.counts["prefix hits"] == hits + 1
    client.order()
    assert client.engine.worker.counts["retrieved"]
