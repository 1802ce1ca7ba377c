"""Two ranks select, store and answer what one does."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from reference import hybrids, wrappers, zoo
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.gemfilter import Filter
from reference.knorm import Norm
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from reference.selfonly import Alone
from reference.structkv import Struct
from reference.structsnap import StructSnap
from reference.swiftkv import Swift
from support import inside, pictures
from support.engine import running
from support.expected import FULL, Policy, Read, Speed, is_served, named
from support.nightly import nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import distinct_prompts, prompts_of

TWO_RANKS: dict[str, Any] = dict(tensor_parallel_size=2)


@pytest.fixture(autouse=True)
def a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM binds one rank to a NUMA node unless told which cores to take."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def counters_by_rank(engine: Any) -> list[dict[str, dict[str, Any]]]:
    """By policy, what every rank counts, without time and bytes, which are its own."""
    own = ("seconds_in_retention", "seconds_in_detector", "kv_bytes_moved")
    return [
        {
            name: {field: total for field, total in totals.items() if field not in own}
            for name, totals in stats["policies"].items()
        }
        for stats in engine.llm.collective_rpc("kv_policy_stats")
    ]


@nightly
def test_tp2_equals_reference(tiny: Callable[..., Path]) -> None:
    model = tiny()
    prompts = prompts_of((2, 33, 97, 200))
    policies = [None, "full", None, None]
    with running(model, "speed-4", enable_prefix_caching=True, **TWO_RANKS) as engine:
        answers = engine.generate(prompts, policies=policies)
        again = engine.generate([prompts[3] + [5, 6, 7]])
        engine.assert_idle()
    assert_parity(model, [answers[0], *answers[2:], *again], Speed(4))
    assert_parity(model, answers[1:2], Speed())
    assert again[0].cached == 192


def test_tp2_selects_retains_and_reads_what_one_rank_does(
    tiny: Callable[..., Path],
) -> None:
    # Ranks wait for each other twice a layer and step, on a busy machine for the scheduler's turn.
    model = tiny(layers=6)
    prompts = prompts_of((2, 33, 97, 200, 150, 301, 110, 240))
    names = [None, "full", None, None, "snapkv:kv_rate=0.3,kv_floor=0", None]
    fast = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)
    keeps = [fast, Keep(), fast, fast, Keep(kv_rate=0.3), fast]
    reads = ["fier-64:reduction=sum", "snapkv:kv_rate=0.4,kv_floor=0+fier-64:reduction=sum"]
    cut, beyond = "speed-4", prompts_of((97, 200), seed=1)
    config = {"kv_layout": [*reads, cut], "kv_debug": True}
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config=config,
        enable_prefix_caching=True,
        max_num_batched_tokens=224,
        **TWO_RANKS,
    ) as engine:
        answers = engine.generate([*prompts, *beyond], policies=names + reads + [cut] * 2)
        again = engine.generate([[*beyond[1], 5, 6, 7]], policies=[cut])
        # Each rank keeps all hidden states, in its smaller pages.
        nexts = [[*prompts[5], 5, 6, 7], [*prompts[4], 5, 6, 7]]
        hits = engine.generate(nexts, policies=[None, names[4]])
        cold = engine.generate(nexts, policies=[None, names[4]], cache_salt="cold")
        grain = inside.state_tokens(engine)
        counters = counters_by_rank(engine)
        engine.assert_idle()
    assert [answer.cached for answer in hits] == [301 // grain * grain, 128]
    assert_close(hits, cold)
    assert_parity(model, hits, [fast, keeps[4]], most=0)
    # SPEED's prompts need no states of theirs.
    assert again[0].cached == 192
    assert_parity(model, [*answers[8:], *again], Speed(4))
    answers, read, kept = answers[:6], answers[6:7], answers[7:8]
    retrieve = Retrieve(64, reduction="sum")
    assert_parity(model, read, Read(retrieve))
    assert_parity(model, kept, Read(retrieve, Keep(kv_rate=0.4)))
    assert counters[0] == counters[1] and counters[0][reads[0]]["retrieval_steps"] == 3
    assert_parity(model, answers, keeps, most=0)


MORE: list[Policy] = [
    Pyramid(kv_rate=0.3, groups=4),
    Norm(kv_rate=0.3),
    Critical(kv_rate=0.3),
    Lookahead(Critical(kv_rate=0.3), 5),
    After(Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.3), 2),
    After(Struct(3, struct_rate=0.5, kv_rate=0.2), 1),
    Read(Retrieve(64, reduction="sum"), After(Keep(kv_rate=0.5), 2)),
    Struct(3, struct_rate=0.5, kv_rate=0.2, score="critical"),
    Filter(3, rate=0.4, window=4),
    StructSnap(3, struct_rate=0.5, kv_rate=0.2),
    Swift(3),
    Alone(3, 2),
]


@nightly
@pytest.mark.skipif(not any(map(is_served, MORE)), reason="none of them is served")
def test_tp2_of_further_methods(tiny: Callable[..., Path]) -> None:
    """Scores that ranks have to add up, and scores that each has for its own KV heads."""
    model = tiny()
    policies = [*filter(is_served, MORE), FULL] * 2
    prompts = distinct_prompts([90 + 23 * i for i in range(len(policies))])
    with running(model, named(policies[0]), config=room_for(policies), **TWO_RANKS) as engine:
        answers = ask(engine, prompts, policies)
        counters = counters_by_rank(engine)
        engine.assert_idle()
    assert counters[0] == counters[1]
    assert_parity(model, answers, policies, most=0)


ZOO_POLICIES: list[Policy] = [
    FULL,
    Speed(4),
    Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    Keep(kv_rate=0.3),
    Critical(kv_rate=0.3),
    Read(Retrieve(64, reduction="sum")),
]


@nightly
@pytest.mark.parametrize("name", ["qwen3_moe", "granite"])
def test_tp2_of_other_architectures(tmp_path: Path, name: str) -> None:
    """Experts that ranks share; states that alone are the stream.

    Not experts in parallel: stock vLLM's worker dies of them on CPU, see tests/gpu.
    """
    model = zoo.build(tmp_path / name, name)
    policies = ZOO_POLICIES * 2
    prompts = distinct_prompts([90 + 23 * i for i in range(len(policies))])
    with running(
        model, "full", config=room_for(ZOO_POLICIES), max_model_len=512, **TWO_RANKS
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        engine.assert_idle()
    assert_parity(model, answers, policies)


HYBRID_POLICIES: list[Policy] = [
    FULL,
    Keep(kv_rate=0.3),
    Critical(kv_rate=0.3),
    Norm(0.3),
    Read(Retrieve(64, reduction="sum")),
    Read(Retrieve(64, reduction="sum"), Keep(kv_rate=0.5)),
]


@nightly
def test_tp2_of_a_hybrid(tmp_path: Path) -> None:
    """Gemma 2: every other layer slides, and all cap their logits. Windows are in every prefix."""
    model = hybrids.build(tmp_path, "gemma2")
    policies = HYBRID_POLICIES * 2
    prompts = distinct_prompts([60 + 23 * i for i in range(len(policies))])
    options: dict[str, Any] = dict(max_model_len=512, enable_prefix_caching=True, **TWO_RANKS)
    with running(model, "full", config=room_for(HYBRID_POLICIES), **options) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        again = ask(engine, [[*each, 5, 6, 7] for each in prompts], policies, max_tokens=4)
        counters = counters_by_rank(engine)
        engine.assert_idle()
    assert counters[0] == counters[1]
    assert any(answer.cached for answer in again)
    assert_parity(model, [*answers, *again], policies * 2)


@nightly
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's code of it imports that")
def test_tp2_with_images(tmp_path: Path) -> None:
    """Each rank has its part of the encoder, and scores its own heads."""
    name, policies = "qwen3_vl", [Keep(kv_rate=0.2), Read(Retrieve(64)), FULL]
    model = wrappers.add_processor(wrappers.build(tmp_path / "model", name), name)
    shown = [pictures.Shown.of(name, 20 + i, (7, 9, i), 60, seed=i) for i in range(3)]
    options = TWO_RANKS | {"skip_tokenizer_init": False, "max_model_len": 512}
    with running(model, "full", config=room_for(policies), **options) as engine:
        answers = pictures.ask(engine, shown, policies, 6)
        engine.assert_idle()
    pictures.assert_parity_shown(model, shown, answers, policies)
