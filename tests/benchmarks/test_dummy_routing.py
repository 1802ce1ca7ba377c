"""Which experts tokens choose under vLLM's dummy weights, and the ideals that follow."""

import pytest
import torch
from torch import Tensor
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from benchmarks.engine import compare, shapes


def dummy(*size: int) -> Tensor:
    weight = torch.empty(*size, dtype=torch.bfloat16)
    initialize_single_dummy_weight(weight)
    return weight


@pytest.mark.parametrize(("name", "has_bias"), [("gpt-oss-20b", True), ("qwen3-30b-a3b", False)])
def test_a_bias_sends_all_tokens_to_the_same_experts(name: str, has_bias: bool) -> None:
    """The first layer's router, of tokens as they are embedded."""
    shape = shapes.SHAPES[name]
    eps = shape.extra["rms_norm_eps"]
    tokens = dummy(2000, shape.hidden)
    normed = torch.rms_norm(tokens.float(), (shape.hidden,), eps=eps).bfloat16()
    bias = dummy(shape.experts) if has_bias else None
    router = dummy(shape.experts, shape.hidden)
    logits = torch.nn.functional.linear(normed * dummy(shape.hidden), router, bias)
    chosen = logits.topk(shape.chosen).indices
    experts = shapes.as_routed(shape, {"dummy_weights": True}).experts
    assert chosen.unique().numel() == experts == (shape.chosen if has_bias else shape.experts)
    assert shapes.as_routed(shape, {"dummy_weights": False}) == shapes.as_routed(shape, {}) == shape


def test_a_correction_of_scores_does_so_too() -> None:
    """GLM chooses by the sigmoid of its logits and a bias for each expert."""
    shape = shapes.SHAPES["glm-4.5-air-12-layers"]
    normed = torch.rms_norm(dummy(2000, shape.hidden).float(), (shape.hidden,), eps=1e-5)
    router = dummy(shape.experts, shape.hidden).float()
    logits = torch.nn.functional.linear(normed * dummy(shape.hidden).float(), router)
    scores = logits.sigmoid() + dummy(shape.experts).float()
    chosen = scores.topk(shape.chosen).indices.unique().numel()
    assert chosen < 2 * shape.chosen
    assert shapes.as_routed(shape, {"dummy_weights": True}).experts == shape.chosen


def test_ideals_count_the_experts_that_are_read() -> None:
    """41 requests against 64, one fifth of the cache: weights are a small part of either."""
    shape, name = shapes.SHAPES["gpt-oss-20b"], "snapkv:kv_rate=0.2"
    case = "pool_decode:32768"

    def ideal(is_dummy: bool) -> float:
        runs = {
            engine: {"cases": {case: {"median": 1.0, "tokens_per_s": 1.0, "batch": batch}}}
            for engine, batch in (("stock", 41), (name, 64))
        }
        settings = {"engine": {"dtype": "bfloat16"}, "tokens": 129, "steps": 64}
        model = {"dummy_weights": is_dummy}
        compare.derive({"model": model, "settings": settings, "engines": runs}, shape)
        found = runs[name]["cases"][case]["ideal"]
        assert found is not None
        return found

    assert ideal(False) == pytest.approx(2.246, abs=0.001)
    assert ideal(True) == pytest.approx(3.548, abs=0.001)
