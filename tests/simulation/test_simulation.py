"""Every server of the simulation over a few seeds; `--seeds` sets how many.

See `fuzz` for runs that go on after a failure.
"""

from pathlib import Path

import pytest
from support import options
from support.nightly import nightly

from simulation.every_kind import of_server
from simulation.hybrids import ADAPTERS, DRAFTS, EVENTS, EVERY, HANDED, OFFLOADING, PIPELINES

SEEDS = options.seeds()
# Where the first seeds miss what others find: blocks re-linked by a stale output (3), blocks
# lost that a preempted request had set aside (7), anchors that are published too early (3). Windows
# of lossy answers in the cache (1055), chunks that no block's end lets through (1), adapters of
# running prompts that get no tokens in a step ("afteradapters", 0). Seeds with a prefix cache.
TELLING = {"block": (3, 7), "speed1": (1, 3), "windows": (1055,), "fierstates": (1,)}
TELLING |= {"sharedevents": (2,), "fierdraftsevents": (2,)}
# Of those that draft tokens, the ones with every kind of pass, the ones that retrieve, and the ones
# that draft for themselves. What tells "checkpoints" from others scenarios show.
DRAFTS_BY_DAY = ("fastkvdrafts", "fierdrafts", "owndrafts")
# Hidden states of several adapters; prompts that wait for a window; prompts compacted in place, and
# sidecars, under a router's eyes.
BESIDE_BY_DAY = ("fastkvadapters", "afteradapters", "sharedevents", "fierdraftsevents")
# KV connectors: sidecars of what is loaded; prompts of which two servers keep a part, with one KV
# group, several, hidden states, and sidecars.
CONNECTED_BY_DAY = ("fulloffloaded", "fieroffloaded", "sharedadaptershanded", "pyramidhanded")
CONNECTED_BY_DAY += ("fastkvadaptershanded", "speedfierhanded")
# Pipelines: what goes once a prompt is in, in one KV group and in several; rows that leave between
# ranks, and sidecars.
PIPELINES_BY_DAY = ("sharedpipeline", "pyramidpipeline", "speedfierpipeline")
AT_NIGHT = {*DRAFTS, *ADAPTERS, *EVENTS, *HANDED, *OFFLOADING, *PIPELINES} - {
    *DRAFTS_BY_DAY,
    *BESIDE_BY_DAY,
    *CONNECTED_BY_DAY,
    *PIPELINES_BY_DAY,
}
AT_NIGHT |= {"checkpoints", "afterfier"}
NAMES = [
    name if SEEDS or name not in AT_NIGHT else pytest.param(name, marks=nightly) for name in EVERY
]


@pytest.mark.parametrize("name", NAMES)
def test_all_read_what_they_should(name: str, tmp_path: Path, one_thread: None) -> None:
    config = EVERY[name].config(tmp_path)
    for seed in range(SEEDS) if SEEDS else TELLING.get(name, (0,)):
        try:
            outcome = of_server(EVERY[name], config, seed).run()
        except Exception as error:
            error.add_note(f"python -m simulation.fuzz {name} 1 {seed}")
            raise
        assert outcome.finished, outcome
        if name in EVENTS and not SEEDS and outcome.case.shares_prefixes:
            assert outcome.counts["promises kept"], outcome
        if not SEEDS and name in (*HANDED, *OFFLOADING):
            assert outcome.counts["prompts that came"] + outcome.counts["blocks loaded"], outcome
