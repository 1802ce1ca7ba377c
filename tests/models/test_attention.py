"""What a model's attention may be, and what it is refused for."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from vllm_kvx.models import attention as module
from vllm_kvx.models.attention import (
    attention_layers,
    check_softmax,
    every_layer,
    output_projections,
)


def layer(kind: type = Attention, **changes: Any) -> Any:
    """vLLM's attention as far as it is read, without an engine."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    values = {
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8},
        **{"kv_cache_dtype": "auto", "attn_type": AttentionType.DECODER},
        **{"sliding_window": None, "kv_sharing_target_layer_name": None, "has_sink": False},
        "impl": SimpleNamespace(logits_soft_cap=0, alibi_slopes=None, sinks=None),
    }
    made.__dict__.update(values | changes)
    spec = FullAttentionSpec
    if made.__dict__["sliding_window"] is not None:
        spec = SlidingWindowSpec
    made.__dict__["get_kv_cache_spec"] = lambda _: object.__new__(spec)
    return made


class Subclass(Attention):
    pass


def found(
    monkeypatch: pytest.MonkeyPatch, skipped: Sequence[str] = (), **layers: Any
) -> list[Attention]:
    named = {
        f"model.layers.{name.removeprefix('n').replace('_', '.')}": x for name, x in layers.items()
    }
    monkeypatch.setattr(module, "get_layers_from_vllm_config", lambda *_: named)
    cache = SimpleNamespace(kv_cache_dtype_skip_layers=list(skipped))
    return attention_layers(SimpleNamespace(cache_config=cache))  # type: ignore[arg-type]


def test_layers_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    some, other = layer(), layer()
    assert found(monkeypatch, n1_attn=some, n0_attn=other) == [other, some]


def test_kv_cache_types_differ_where_layers_skip_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"n0_attn": layer(), "n1_attn": layer(kv_cache_dtype="fp8")}
    assert found(monkeypatch, ["0"], **layers) == list(layers.values())
    with pytest.raises(ValueError, match="unequal kv_cache_dtype: "):
        found(monkeypatch, **layers)


def test_layers_that_slide_or_keep_a_state_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    full = layer()
    state = object.__new__(ShortConv)
    state.__dict__["get_kv_cache_spec"] = lambda _: object.__new__(MambaSpec)
    layers = {"n0_conv": state, "n1_a": layer(sliding_window=8, num_heads=2), "n2_a": full}
    found_layers = found(monkeypatch, **layers)
    assert found_layers == [full]
    with pytest.raises(ValueError, match="2 of its 3 layers have full attention or slide"):
        every_layer(None, found_layers, 3)  # type: ignore[arg-type]


def test_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    full, slides = layer(), layer(sliding_window=8, num_heads=2)
    found_layers = found(monkeypatch, n1_attn=full, n0_attn=slides)
    assert every_layer(None, found_layers, 2) == [slides, full]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slides", "says"),
    [
        (layer(Subclass, sliding_window=8), "are not plain attention"),
        (layer(sliding_window=8, attn_type="encoder"), "of type encoder"),
        (layer(sliding_window=8, kv_sharing_target_layer_name="0"), "read other layers' keys"),
    ],
)
def test_layers_that_slide_otherwise(
    monkeypatch: pytest.MonkeyPatch, slides: Any, says: str
) -> None:
    found_layers = found(monkeypatch, n0_attn=layer(), n1_attn=slides)
    with pytest.raises(ValueError, match=says):
        every_layer(None, found_layers, 2)  # type: ignore[arg-type]


def test_both_kinds_in_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found_layers = found(monkeypatch, n0_a=layer(), n0_b=layer(sliding_window=8))
    with pytest.raises(ValueError, match="more than one attention a layer"):
        every_layer(None, found_layers, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ({}, "none of its layers has full attention"),
        ({"n0_attn": layer(sliding_window=8)}, "none of its layers has full attention"),
        ({"n0_attn_0": layer(), "n0_attn_1": layer()}, "more than one attention a layer"),
        ({"n0_a": layer(), "n0_b": layer()}, "more than one attention a layer"),
        ({"n0_a": layer(), "n1_a": object()}, "are not plain attention"),
        ({"n0_a": layer(), "n1_a": layer(Subclass)}, "are not plain attention"),
        ({"n0_a": layer(), "n1_a": layer(attn_type="encoder")}, "of type encoder"),
        (
            {"n0_a": layer(), "n1_a": layer(kv_sharing_target_layer_name="0")},
            "read other layers' keys",
        ),
        ({"n0_a": layer(), "n1_a": layer(num_heads=8)}, "unequal num_heads"),
        ({"n0_a": layer(), "n1_a": layer(num_kv_heads=1)}, "unequal num_kv_heads"),
        ({"n0_a": layer(head_size_v=4), "n1_a": layer(head_size_v=4)}, "its values 4"),
    ],
)
def test_models_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, layers: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        found(monkeypatch, **layers)


SOFT_CAP = SimpleNamespace(logits_soft_cap=50.0, alibi_slopes=None, sinks=None)
SINKS = SimpleNamespace(logits_soft_cap=0, alibi_slopes=None, sinks=object())
HIDES_SINKS = SimpleNamespace(logits_soft_cap=0, alibi_slopes=None)
ALIBI = SimpleNamespace(logits_soft_cap=0, alibi_slopes=object(), sinks=None)


@pytest.mark.parametrize(
    ("impl", "computes", "moves", "says"),
    [
        (SOFT_CAP, True, True, None),
        (SINKS, True, True, None),
        (HIDES_SINKS, True, False, "backend HIDES keeps them where they are not found"),
        (HIDES_SINKS, False, True, None),
        (ALIBI, True, False, "ALiBi"),
        (ALIBI, False, True, "counts stored entries"),
        (ALIBI, False, False, None),
    ],
)
def test_what_attention_does_to_logits(
    impl: Any, computes: bool, moves: bool, says: str | None
) -> None:
    backend = SimpleNamespace(get_name=lambda: "HIDES")
    has_sink = impl in (SINKS, HIDES_SINKS)
    layers = [layer(), layer(impl=impl, has_sink=has_sink, attn_backend=backend)]
    if says is None:
        check_softmax(layers, computes, moves)
        return
    with pytest.raises(ValueError, match=says):
        check_softmax(layers, computes, moves)


def test_output_projections_that_are_not_known() -> None:
    some = layer()
    with pytest.raises(ValueError, match="score=critical"):
        output_projections(nn.ModuleList([some, nn.Linear(1, 1)]), [some])
