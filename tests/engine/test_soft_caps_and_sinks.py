"""Models with soft caps and with sinks, and full attention in every layer, against the references.

Their hybrids, under policies that retain or retrieve, are in test_hybrids.py. Here tokens leave the
batch: what chooses them, and attention in the layer that chose them, have caps and sinks too.
"""

import json
from pathlib import Path

import pytest
from reference import fastkv, hybrids, structkv, zoo
from support.engine import running
from support.expected import FULL, Policy, Speed
from support.nightly import by_day
from support.parity import ask, assert_parity, room_for
from support.prompts import prompts_of

POLICIES: list[Policy] = [
    fastkv.Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    structkv.Struct(3, struct_rate=0.3, kv_rate=0.2),
    FULL,
    Speed(4),
    fastkv.Keep(tsp_layer=2, tsp_rate=0.5, kv_rate=1.0),
]
LENGTHS = (97, 161, 33, 200, 130)


@pytest.mark.parametrize("name", by_day(["gpt_oss", "gemma2"], ()))
def test_parity(name: str, tmp_path: Path) -> None:
    every = {"layer_types": ["full_attention"] * zoo.LAYERS, "sliding_window": None}
    model = zoo.write(tmp_path, name, hybrids.HYBRIDS[name], **every)
    with running(
        model, "full", config=room_for(POLICIES), max_model_len=512, max_num_seqs=16
    ) as engine:
        answers = ask(engine, prompts_of(LENGTHS), POLICIES, max_tokens=6)
        engine.assert_idle()
    # transformers makes a mask of windows even where no layer has one; vLLM's gpt-oss goes by this
    # number alone.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": hybrids.WINDOW}))
    assert_parity(model, answers, POLICIES)
