"""Models that also read images, of which policies serve the text: against the dense references.

The references run transformers' own wrappers. vLLM's modules of these models import torchvision.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference import fastkv, structkv
from reference.criticalkv import Critical
from reference.fier import Retrieve
from reference.wrappers import WRAPPERS, build
from support.engine import greedy, running
from support.expected import FULL, Policy, Read, Speed
from support.nightly import by_day
from support.parity import assert_identical, assert_parity_and_again
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None,
    reason="torchvision is missing: `bash tests/run.sh` sets it up",
)

POLICIES: list[Policy] = [
    FULL,
    fastkv.Keep(kv_rate=0.2),
    Speed(4),
    Read(Retrieve(64)),
    fastkv.Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    Critical(kv_rate=0.3),
    structkv.Struct(3, struct_rate=0.3, kv_rate=0.2),
    Read(Retrieve(64), fastkv.Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.5)),
]
LENGTHS = (97, 33, 200, 161, 64, 130, 250, 48)
NAMES = list(WRAPPERS)


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = build(tmp_path_factory.mktemp(name), name)
        return made[name]

    return of


# The one by day has three rows of positions, and adds what images leave to its first layers.
every = pytest.mark.parametrize("name", by_day(NAMES, {NAMES.index("qwen3_vl")}))


@every
def test_parity(wrapper: Callable[[str], Path], name: str) -> None:
    assert_parity_and_again(wrapper(name), LENGTHS, POLICIES)


@every
def test_full_is_stock(wrapper: Callable[[str], Path], name: str) -> None:
    """Bit for bit, beside policies; and an image is refused before it reaches the engine."""
    prompts = prompts_of((97, 33, 161))
    with running(wrapper(name), None, language_model_only=True, max_model_len=512) as engine:
        stock = engine.generate(prompts, max_tokens=6)
    config = {"kv_layout": ["speed-4"]}
    with running(wrapper(name), "full", config=config, max_model_len=512) as engine:
        assert_identical(engine.generate(prompts, max_tokens=6), stock)
        image = {"prompt_token_ids": [5, 6], "multi_modal_data": {"image": torch.zeros(3, 56, 56)}}
        with pytest.raises(ValueError, match="not available for text-only models"):
            engine.llm.generate(image, greedy(1))
        engine.assert_idle()
