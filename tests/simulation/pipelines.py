"""Servers whose layers are shared out among the ranks of a pipeline."""

from collections.abc import Mapping
from dataclasses import replace

from simulation.server import Server

# Those that retain and retrieve. Others run passes of their own, or rank blocks by all layers:
# ``further_passes``, ``layout.in_a_pipeline``.
_SAME = "shared", "after", "pyramid", "fier", "quest", "sharedadapters", "pyramidadapters"
# Rows leave between ranks alone: ``pipeline_checks.where_rows_leave``.
_FIER = "fier-64:dense_below=0"
_SPEED = (
    "speed-4",
    "speed-6",
    "speed-4:anchors=3,tail=2",
    "speed-6:anchors=0",
    "speed-2:anchors=4",
    "full",
)


def in_pipelines(servers: Mapping[str, Server]) -> dict[str, Server]:
    """Some of the servers, by names of their own, with ranks of four layers or of two."""
    found = {
        f"{name}pipeline": replace(servers[name], ranks=4 if number % 2 else 2)
        for number, name in enumerate(_SAME)
    }
    found["speedpipeline"] = replace(
        servers["speed"], policy="speed-4", layout=("speed-6", "speed-2"), requests=_SPEED, ranks=4
    )
    found["speedfierpipeline"] = replace(
        servers["speedfier"],
        policy=f"speed-4+{_FIER}",
        requests=(
            f"speed-4+{_FIER}",
            f"speed-4:anchors=32,tail=2+{_FIER}",
            "speed-4:anchors=3",
            "full",
            _FIER,
            f"speed-4+snapkv:window=3,kv_rate=0.5,kv_floor=0+{_FIER}",
        ),
        ranks=2,
    )
    return found
