"""Every architecture under every kind of policy, against the dense references.

One server of each runs chunks, mixed batches and prompts that come back; another has too small a
pool. Models that vLLM runs by Transformers' own code have no ranges of layers: they retain and
retrieve.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference import fastkv, structkv
from reference.criticalkv import Critical
from reference.fier import Retrieve
from reference.zoo import ZOO, build
from support.cpu_router import complete_cpu_router
from support.engine import forget_ranks, running
from support.expected import FULL, Policy, Read, Speed
from support.nightly import by_day
from support.parity import (
    ask,
    assert_parity,
    assert_parity_and_again,
    assert_parity_preempted,
    in_turn,
    room_for,
)
from support.prompts import prompts_of
from support.transformers_backend import keep_transformers_classes

KEEPS: list[Policy] = [
    FULL,
    fastkv.Keep(kv_rate=0.2),
    Critical(kv_rate=0.3),
    Read(Retrieve(64)),
    Read(Retrieve(64), fastkv.Keep(kv_rate=0.5)),
]
PROPAGATES: list[Policy] = [
    Speed(4),
    fastkv.Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    structkv.Struct(3, struct_rate=0.3, kv_rate=0.2),
    Read(Retrieve(64), fastkv.Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.5)),
]
# Run by Transformers' own code, which criticalkv's projections are not known of.
WITHOUT_RANGES = ("olmo2", "olmo3", "starcoder2", "smollm3", "seed_oss", "hunyuan_v1_dense")
# What one of each kind stands for every day: experts behind a dense layer, states alone that are
# the stream, learned positions, Transformers' code. Experts in all layers are preempted.
DAILY = {"glm4_moe", "granite", "gpt2", "smollm3"}
LENGTHS = (97, 33, 200, 5, 161, 64, 130, 250, 48)


def policies_of(name: str) -> list[Policy]:
    if name in WITHOUT_RANGES:
        return [policy for policy in KEEPS if not isinstance(policy, Critical)]
    return KEEPS + PROPAGATES


names = list(ZOO)
every = by_day(names, {names.index(name) for name in DAILY})


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    complete_cpu_router(monkeypatch)
    keep_transformers_classes(monkeypatch)
    forget_ranks()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = build(tmp_path_factory.mktemp(name), name)
        return made[name]

    return of


@pytest.mark.parametrize("name", every)
def test_parity(zoo: Callable[[str], Path], name: str) -> None:
    assert_parity_and_again(zoo(name), LENGTHS, policies_of(name))


@pytest.mark.parametrize("name", by_day(names, {names.index("qwen3_moe")}))
def test_preempted(zoo: Callable[[str], Path], name: str) -> None:
    # In 70 steps retrieval meets near-ties that six have not: GPT-2's end at 74% of the tokens, and
    # Mixtral's at 71%. Of models without ranges few answers retrieve, so that one near-tie counts
    # for more.
    least = 0.6 if name in ("gpt2", "mixtral") or name in WITHOUT_RANGES else 0.8
    # Without stages that propagation makes, layers share one set of block tables.
    blocks = 34 if name in WITHOUT_RANGES else 60
    options = {"num_gpu_blocks_override": blocks, "max_model_len": 384, "max_num_seqs": 6}
    assert_parity_preempted(zoo(name), policies_of(name), least=least, **options)


def test_transformers_code_where_vllm_has_its_own(zoo: Callable[[str], Path]) -> None:
    """`--model-impl transformers`."""
    model, each = zoo("glm4"), policies_of("smollm3")
    prompts, policies = prompts_of(LENGTHS), in_turn(each, len(LENGTHS))
    with running(
        model, "full", config=room_for(each), max_model_len=512, model_impl="transformers"
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        engine.assert_idle()
    assert_parity(model, answers, policies)
