"""Every kind of hybrid under retention and retrieval, against the dense references.

Policies are about the layers with full attention. The others slide over a window or keep a state,
and see every token whatever a policy drops. Prompts are longer than the window and than a chunk.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference import fastkv, hybrids
from reference.after import After
from reference.criticalkv import Critical
from reference.fier import Retrieve
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from support.cpu_hybrids import complete_cpu_hybrids
from support.expected import FULL, Policy, Read
from support.nightly import by_day
from support.parity import (
    assert_parity_and_again,
    assert_parity_preempted,
)

POLICIES: list[Policy] = [
    FULL,
    fastkv.Keep(kv_rate=0.2),
    Critical(kv_rate=0.3),
    Norm(0.3),
    Read(Retrieve(64)),
    Read(Retrieve(64), fastkv.Keep(kv_rate=0.5)),
    Pyramid(kv_rate=0.3, groups=2, beta=4, score="critical"),
    After(fastkv.Keep(kv_rate=0.2), 2),
    Read(Retrieve(64), After(fastkv.Keep(kv_rate=0.5), 3)),
]
LENGTHS = (97, 33, 200, 5, 161, 64, 130, 150, 250, 48)
names = list(hybrids.HYBRIDS)
every = by_day(names, {names.index("gemma3_text")})


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    complete_cpu_hybrids(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    models: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name == "qwen3_5_text" or name in hybrids.WRAPPED:
            pytest.importorskip("torchvision", reason="vLLM's module of it imports that")
        if name not in models:
            make = hybrids.wrap if name in hybrids.WRAPPED else hybrids.build
            models[name] = make(tmp_path_factory.mktemp(name), name)
        return models[name]

    return of


@pytest.mark.parametrize("name", every)
def test_parity(made: Callable[[str], Path], name: str) -> None:
    assert_parity_and_again(made(name), LENGTHS, POLICIES)


@pytest.mark.parametrize("name", by_day(["gpt_oss", "gemma2", "gemma3_text", "qwen3_next"], {0}))
def test_layers_that_share_a_choice(made: Callable[[str], Path], name: str) -> None:
    """They are counted over full layers: the next full one may be several layers above."""
    assert_parity_and_again(made(name), LENGTHS[:6], [Read(Retrieve(64, reuse_layers=2)), FULL])


@pytest.mark.parametrize("name", by_day(["qwen3_next", "gpt_oss"], ()))
def test_every_full_layer_retrieves(made: Callable[[str], Path], name: str) -> None:
    assert_parity_and_again(made(name), LENGTHS[:6], [Read(Retrieve(64, dense_layers=0)), FULL])


@pytest.mark.parametrize("name", by_day(list(hybrids.WRAPPED), ()))
def test_wrapped(made: Callable[[str], Path], name: str) -> None:
    """As checkpoints are: in models that also read images, one with experts."""
    assert_parity_and_again(made(name), LENGTHS, POLICIES)


# A pool that a server starts with holds all of these prompts of Cohere 2, two of whose layers have
# full attention: test_speed_on_hybrids preempts it.
@pytest.mark.parametrize("name", by_day([name for name in names if name != "cohere2"], ()))
def test_preempted(made: Callable[[str], Path], name: str) -> None:
    options = {"num_gpu_blocks_override": 66, "max_model_len": 288, "max_num_seqs": 6}
    assert_parity_preempted(made(name), POLICIES, **options)
