"""Prompts that an LMCache server keeps and gives back. Skipped without a GPU, or LMCache.

The server opens the engine's memory by CUDA IPC, which is LMCache's own choice on a GPU. Where the
engine copies (``engine_driven``), its kernels take pages for keys and values alone, and a start is
refused (``tests/server/test_retrieval_refusals.py``).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.fier import Retrieve
from support.engine import running
from support.expected import FULL, Policy, Read
from support.gpu import EXACT
from support.lmcache_server import lmcache_server, settle
from support.parity import ask, assert_parity, room_for
from support.prompts import prompts_of

pytest.importorskip("lmcache", reason="needs lmcache, whose server keeps prompts")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FIER = Read(Retrieve(64, dense_below=0))
QUEST = Read(Retrieve(64, group=32, pages=True, dense_below=0))
LENGTHS = (200, 65, 161, 300, 480, 97)


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    if os.environ.get("LMCACHE_MP_TRANSFER_MODE", "auto").lower() == "engine_driven":
        pytest.skip("a start is refused while LMCACHE_MP_TRANSFER_MODE is engine_driven")
    with lmcache_server(tmp_path_factory.mktemp("lmcache") / "log") as config:
        yield config


@pytest.mark.parametrize("reads", [FIER, QUEST], ids=["fier", "quest"])
def test_what_one_stores_another_loads(
    tiny: Callable[..., Path],
    connector: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    reads: Policy,
) -> None:
    """The pool holds a few prompts, so what comes back is no longer in it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = tiny(head_dim=64, hidden=256)
    others = prompts_of((500,) * 6, seed=1)
    with running(
        model,
        "full",
        config=room_for([FULL, reads]),
        enable_prefix_caching=True,
        num_gpu_blocks_override=80,
        kv_transfer_config=connector,
        **(EXACT | dict(block_size=32, max_model_len=640, max_num_seqs=8)),
    ) as engine:
        pairs = [(FULL, reads), (reads, FULL), (reads, reads)]
        for seed, (before, after) in enumerate(pairs, 10 if reads is FIER else 20):
            prompts = prompts_of(LENGTHS, seed=seed)
            cold = ask(engine, prompts, [before] * len(prompts), max_tokens=40)
            settle(engine)
            ask(engine, others, [FULL] * len(others), max_tokens=2)
            settle(engine)
            loaded = ask(engine, prompts, [after] * len(prompts), max_tokens=40)
            assert [answer.cached for answer in loaded] == [192, 64, 128, 256, 448, 64]
            assert_parity(model, [*cold, *loaded], [before] * len(cold) + [after] * len(loaded))
            settle(engine)
            engine.assert_idle()


def test_what_a_stock_server_stores(
    tiny: Callable[..., Path], connector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages have no tail and half as many tokens."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = tiny(head_dim=64, hidden=256)
    prompts = prompts_of(LENGTHS, seed=31)
    options = EXACT | dict(max_model_len=640, max_num_seqs=8, kv_transfer_config=connector)
    with running(model, None, **options) as stock:
        stock.generate(prompts, 1)
        settle(stock)
    room = room_for([FULL, FIER])
    with running(model, "full", config=room, **(options | dict(block_size=32))) as engine:
        loaded = ask(engine, prompts, [FIER] * len(prompts), max_tokens=40)
        assert [answer.cached for answer in loaded] == [192, 64, 128, 256, 448, 64]
        assert_parity(model, loaded, FIER)
