"""What share of a model's KV its layers with full attention hold."""

from types import SimpleNamespace

import pytest

from vllm_kvx.tools.kv_layers import KVLayers

SLIDING = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 512}
STATES = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}


def test_a_layer_that_slides_holds_its_window() -> None:
    layers = KVLayers.of(SLIDING)
    assert layers is not None
    assert layers.share(512) == pytest.approx(1 / 6)
    assert layers.share(100) == pytest.approx(1 / 6)
    assert layers.share(32_768) == pytest.approx(32_768 / (32_768 + 5 * 512))


def test_entries_of_other_sizes() -> None:
    """As Gemma 4 31B's: 4 heads of 512 in full layers, 16 of 256 in the others."""
    own = {"05": {"head_dim": 512, "num_key_value_heads": 4}}
    heads = {"head_dim": 256, "num_key_value_heads": 16, "per_layer_config": own}
    layers = KVLayers.of(SLIDING | heads)
    assert layers is not None and layers.window_entry == 2
    assert layers.share(512) == pytest.approx(1 / 11)


def test_what_a_policy_saves_is_of_that_share() -> None:
    layers = KVLayers.of(SimpleNamespace(**SLIDING))
    assert layers is not None
    assert layers.says(32_768, 0.2) == (
        "full attention in 1 of 6 layers, which hold 93% of the KV of 32,768 tokens: a policy that "
        "keeps 20% there saves 74% of it"
    )
    assert layers.says(512, 1.0).endswith("hold 17% of the KV of 512 tokens: a policy saves at "
                                          "most 17%")  # fmt: skip
    assert "They hold 17% at 512 tokens and 93% at 32,768 tokens" in layers.bounds([512, 32_768])


def test_a_state_counts_once_it_is_known() -> None:
    unknown = KVLayers.of(STATES)
    assert unknown is not None and unknown.recurrent == 3
    assert unknown.share(1000) == 1.0
    assert "states of the others are not counted" in unknown.says(1000, 0.5)
    known = KVLayers.of(STATES, state_entries=250)
    assert known is not None and known.share(1000) == pytest.approx(0.8)
    assert "not counted" not in known.says(1000, 0.5)


def test_layers_without_attention_hold_nothing() -> None:
    layers = KVLayers.of({"layers_block_type": ["mamba", "mlp", "attention", "moe"]})
    assert layers is not None
    assert (layers.full, layers.sliding, layers.recurrent) == (1, 0, 1)


def test_a_list_of_numbers_says_which_slide() -> None:
    layers = KVLayers.of({"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 128})
    assert layers is not None
    assert (layers.full, layers.sliding) == (2, 2)


def test_a_layer_may_have_both() -> None:
    layers = KVLayers.of({"layers_block_type": ["hybrid"] * 4})
    assert layers is not None and (layers.full, layers.recurrent) == (4, 4)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sliding_window": 512},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 512},
    ],
)
def test_layers_that_are_alike_need_no_share(config: dict[str, object]) -> None:
    assert KVLayers.of(config) is None
