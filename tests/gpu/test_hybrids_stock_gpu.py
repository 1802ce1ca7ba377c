"""Stock vLLM on hybrids on a GPU, compiled, answers as the dense references do.

Here run the kernels that vLLM's CPU build lacks: Nemotron-H's experts, Triton's Mamba 2 and short
convolutions. Skipped without a GPU.
"""

from pathlib import Path

import pytest
import torch
from reference import hybrids
from support.engine import forget_ranks, running
from support.expected import Speed
from support.gpu import EXACT
from support.parity import ATOL, assert_parity
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# A state adds up what a chunk of tokens left in it, in another order than transformers does.
RECURRENT = ("granitemoehybrid", "nemotron_h")


@pytest.mark.parametrize("name", hybrids.HYBRIDS)
def test_stock_is_the_reference(name: str, tmp_path: Path) -> None:
    if name == "olmo3":
        pytest.skip("in float32 vLLM's Transformers backend fails on it, without a policy too")
    if name in ("qwen3_next", "qwen3_5_text"):
        pytest.skip("vLLM's delta rule has no float32 kernel on a GPU")
    _assert_stock_is_the_reference(hybrids.build(tmp_path, name), name)


def test_experts_between_mamba_layers(tmp_path: Path) -> None:
    kinds = ["linear_attention", "moe", "full_attention", "moe"] * 2
    model = hybrids.build(tmp_path, "nemotron_h", layers_block_type=kinds)
    _assert_stock_is_the_reference(model, "nemotron_h")


def _assert_stock_is_the_reference(model: Path, name: str) -> None:
    forget_ranks()
    prompts = prompts_of((40, 97, 230, 500))
    options = EXACT | {"max_model_len": 1024, "enable_prefix_caching": True}
    with running(model, None, **options) as engine:
        answers = engine.generate(prompts, max_tokens=16)
        again = engine.generate([[*prompt, 7, 8, 9] for prompt in prompts], max_tokens=4)
        engine.assert_idle()
    atol = 1e-3 if name in RECURRENT else ATOL
    # Rounding may choose another expert.
    assert_parity(model, [*answers, *again], Speed(), most=1, atol=atol)
