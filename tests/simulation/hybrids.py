"""Servers of models that mix kinds of layers: windows and states beside what follows policies."""

from simulation.connected import OFFLOADING, handing_over
from simulation.drafting import DRAFTING, drafting
from simulation.other_layers import Others
from simulation.pipelines import in_pipelines
from simulation.routed import with_adapters, with_events
from simulation.server import Server, long
from simulation.servers import SERVERS

_SNAP = "snapkv:window=3,kernel=3,kv_floor=0"
_FIER = "fier-64:dense_below=0"
_PYRAMID = "pyramidkv:kv_floor=0,window=3,kernel=3"
_ONE_STAGE = (
    f"{_SNAP},kv_rate=0.4",
    f"{_SNAP},kv_rate=0.8",
    "snapkv:window=2,kv_rate=0.2,kv_floor=0",
    "streamingllm:sinks=2,recent=10",
    "knorm:kv_rate=0.3,kv_floor=0",
    "criticalkv:window=3,kv_rate=0.4,kv_floor=0",
    "full",
    "full",
)
_LAYOUT = ("streamingllm:recent=1020", "knorm:kv_floor=0", "criticalkv:kv_floor=0,window=3", "full")
_FAST = "fastkv:window=3,kernel=3,kv_floor=0"
_STRUCT = "structkv:kv_floor=0,window=3"
_GEM = "gemfilter:kv_floor=0,window=3,kernel=3"
_RETRIEVES = (
    _FIER,
    "fier-64:dense_below=100",
    f"{_SNAP},kv_rate=0.5+{_FIER}",
    f"{_SNAP},kv_rate=0.6,after=9+{_FIER}",
    f"streamingllm:sinks=2,recent=70+{_FIER}",
    "snapkv:kv_floor=0,window=3",
    "full",
)
_RETRIEVES_LAYOUT = ("snapkv:kv_floor=0,window=3,after=9", "streamingllm:sinks=2,recent=70")

HYBRIDS: dict[str, Server] = {
    "windows": Server(
        f"{_SNAP},kv_rate=0.4", _LAYOUT, _ONE_STAGE, repeats=0.4, others=Others(11, window=10)
    ),
    # A window of a block and a half, and fewer of its layers than others.
    "narrow": Server(
        f"{_SNAP},kv_rate=0.4", _LAYOUT, _ONE_STAGE, repeats=0.4, others=Others(3, window=6)
    ),
    "pyramidwindows": Server(
        f"{_PYRAMID},kv_rate=0.4",
        ("knorm:kv_floor=0", "snapkv:kv_floor=0,window=3,after=4"),
        (
            f"{_PYRAMID},kv_rate=0.4",
            f"{_PYRAMID},kv_rate=0.3,groups=4",
            f"{_PYRAMID},kv_rate=0.6,groups=2,beta=3",
            "snapkv:window=3,kv_rate=0.5,kv_floor=0",
            "snapkv:window=2,kv_rate=0.3,kv_floor=0,after=5",
            "knorm:kv_rate=0.3,kv_floor=0",
            "full",
        ),
        repeats=0.4,
        others=Others(5, window=13),
    ),
    "states": Server(f"{_SNAP},kv_rate=0.4", _LAYOUT, _ONE_STAGE, repeats=0.4, others=Others(9)),
    "checkpoints": Server(
        f"{_SNAP},kv_rate=0.4",
        _LAYOUT,
        _ONE_STAGE,
        repeats=0.4,
        others=Others(9, checkpoints=True),
    ),
    "privatestates": Server(
        f"{_SNAP},kv_rate=0.4", _LAYOUT, _ONE_STAGE, others=Others(9, mode="none")
    ),
    "pyramidstates": Server(
        f"{_PYRAMID},kv_rate=0.4",
        ("snapkv:kv_floor=0,window=3",),
        (
            f"{_PYRAMID},kv_rate=0.4",
            f"{_PYRAMID},kv_rate=0.3,groups=4",
            "snapkv:window=3,kv_rate=0.5,kv_floor=0",
            "full",
        ),
        repeats=0.4,
        others=Others(4),
    ),
    # Layers slide below the lower cut, right below and above it, and above the other.
    "slidingspeed": Server(
        "speed-5",
        ("speed-9",),
        (
            "speed-5",
            "speed-9",
            "speed-5:anchors=3,tail=2",
            "speed-9:anchors=0",
            "speed-5:anchors=9,tail=4",
            "speed-9:anchors=5,tail=12",
            "full",
        ),
        steps=200,
        repeats=0.4,
        others=Others.sliding(1, 4, 6, 7, 10, 11, window=6),
    ),
    "slidingfastkv": Server(
        f"{_FAST},tsp_layer=4,tsp_rate=0.4,kv_rate=0.3",
        (f"{_STRUCT},pivot=8,after=5", f"{_GEM},layer=8", "snapkv:kv_floor=0,window=3"),
        (
            f"{_FAST},tsp_layer=4,tsp_rate=0.4,kv_rate=0.3",
            f"{_FAST},tsp_layer=4,tsp_rate=0.2,kv_rate=1",
            f"{_FAST},tsp_layer=8,tsp_rate=0.3,kv_rate=0.8",
            f"{_STRUCT},pivot=8,struct_rate=0.5,kv_rate=0.4",
            f"{_FAST},tsp_layer=4,tsp_rate=0.4,kv_rate=0.2,after=5",
            f"{_STRUCT},pivot=8,struct_rate=0.5,kv_rate=0.3,after=2",
            f"{_FAST},tsp_layer=8,tsp_rate=0.3,kv_rate=1+{_SNAP},kv_rate=0.2,after=3",
            f"{_GEM},layer=8,rate=0.4",
            f"{_GEM},layer=4,rate=0.1",
            "speed-9:anchors=3",
            "snapkv:kv_floor=0,window=3,kv_rate=0.4",
            "full",
        ),
        stash=200,
        steps=200,
        repeats=0.4,
        others=Others.sliding(1, 2, 5, 6, 9, 10, window=10),
    ),
    "fierwindows": long(
        policy=_FIER,
        layout=_RETRIEVES_LAYOUT,
        requests=_RETRIEVES,
        repeats=0.4,
        others=Others(11, window=70),
    ),
    "fiercheckpoints": long(
        policy=_FIER,
        layout=_RETRIEVES_LAYOUT,
        requests=_RETRIEVES,
        repeats=0.4,
        others=Others(9, checkpoints=True),
    ),
    "fierstates": long(
        policy=_FIER,
        layout=_RETRIEVES_LAYOUT,
        requests=_RETRIEVES,
        repeats=0.4,
        others=Others(9),
    ),
}
# States cannot be taken back yet: `start_checks.WITH_DRAFTS`.
WINDOWS = {n: server for n, server in HYBRIDS.items() if server.others and server.others.window}
DRAFTS = {**DRAFTING, **drafting(WINDOWS)}
ADAPTERS = with_adapters({**SERVERS, **HYBRIDS, **DRAFTS})
EVENTS = with_events({**SERVERS, **DRAFTS})
HANDED = handing_over(
    SERVERS | {name: ADAPTERS[name] for name in ("fastkvadapters", "sharedadapters")}
)
PIPELINES = in_pipelines({**SERVERS, **ADAPTERS})
EVERY = {**SERVERS, **HYBRIDS, **DRAFTS, **ADAPTERS, **EVENTS, **OFFLOADING, **HANDED, **PIPELINES}
