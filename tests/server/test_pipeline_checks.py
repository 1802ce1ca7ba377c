"""Which policies a pipeline of ranks is refused for, by where its layers are cut into ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.server.pipeline_checks import has_rank_without_policy_layers

TWO_RANKS = {"dtype": "float32", "pipeline_parallel_size": 2}
FULL, SLIDES = ["full_attention"], ["sliding_attention"]

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="vLLM itself refuses it on one GPU"
)


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        ("snapkv:kv_rate=0.1", []),
        ("full", ["pyramidkv:kv_rate=0.1", "criticalkv:kv_rate=0.1", "fier-64"]),
        ("quest-64+streamingllm:recent=1020", []),
        # Of 8 layers the second rank has those from 4 on.
        ("speed-4", ["selfonly-4", "fier-64", "speed-4+streamingllm:recent=1020"]),
    ],
)
def test_what_runs(make_config, policy: str, room: list[str]) -> None:
    config = make_config(policy, additional_config={"kv_layout": room}, **TWO_RANKS)
    assert "Policy" in config.parallel_config.worker_cls


@pytest.mark.parametrize(
    ("policy", "room", "says"),
    [
        ("speed-3", [], r"before layer 3, .* use speed-4 \(ranks begin with layers 4\), or set"),
        ("selfonly-6", [], r"before layer 6, .* use speed-4"),
        ("speed-4", ["speed-2"], r"before layer 2, .* use speed-4"),
        ("swiftkv-4", [], r"swiftkv-K projects .* --pipeline-parallel-size 1"),
        (
            "fastkv:tsp_layer=3,kv_rate=0.1",
            [],
            r"selected tokens run .* --pipeline-parallel-size 1",
        ),
        (
            "structkv:pivot=online,kv_rate=0.1",
            [],
            r"selected tokens run .* --pipeline-parallel-size 1",
        ),
        (
            "snapkv:kv_rate=0.1",
            ["structkv:struct_rate=1,granularity=block,pivot=3,kv_rate=0.1"],
            r"ranks whole blocks .* granularity=token",
        ),
        # Requests may name gemfilter:layer=3 there.
        ("speed-4", ["snapkv:kv_rate=0.1"], r"selected tokens run .* score by a window \(snapkv"),
    ],
)
def test_what_does_not(make_config, policy: str, room: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        make_config(policy, additional_config={"kv_layout": room}, **TWO_RANKS)
    assert str(error.value).count("\n  - ") == 1
    make_config(policy, additional_config={"kv_layout": room}, dtype="float32")


def test_rows_of_adapters_do_not_leave(make_config) -> None:
    with pytest.raises(ValueError, match="some rows leave before it: drop --enable-lora"):
        make_config("speed-4", enable_lora=True, **TWO_RANKS)
    make_config("snapkv:kv_rate=0.1", enable_lora=True, **TWO_RANKS)


def test_a_request_may_not_rank_blocks(make_config) -> None:
    """Where a server without that policy has all that it needs."""
    settings = KVSettings.from_vllm_config(make_config("pyramidkv:kv_rate=0.1", **TWO_RANKS))
    assert settings is not None
    blocks = settings.parse("structkv:struct_rate=1,granularity=block,pivot=3")
    with pytest.raises(PolicyError, match="ranks whole blocks"):
        check_fits(blocks, settings.layout, settings.num_layers)


def test_connectors_are_refused(make_config) -> None:
    offloads = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match=r"KV connectors were never tried .* in a pipeline"):
        make_config("fier-64", kv_transfer_config=offloads, **TWO_RANKS)


def test_where_ranks_begin_is_vllms_choice(make_config, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,3,2")
    three = TWO_RANKS | {"pipeline_parallel_size": 3}
    for policy in ("speed-3", "speed-6"):
        make_config(policy, **three)
    with pytest.raises(ValueError, match=r"use speed-6 \(ranks begin with layers 3, 6\)"):
        make_config("speed-5", **three)


def test_nothing_is_measured_for_a_pipeline(make_config, monkeypatch) -> None:
    from vllm_kvx.server import measure_at_start as at_start

    monkeypatch.setattr(at_start, "measured", lambda *_: pytest.fail("it measures"))
    with pytest.raises(ValueError, match="selected tokens run"):
        make_config("fastkv:kv_rate=0.1", load_format="auto", **TWO_RANKS)


def test_rows_do_not_leave_where_layers_slide(make_config, model_dir) -> None:
    gemma = model_dir(architectures=["Gemma2ForCausalLM"], model_type="gemma2", head_dim=32)
    with pytest.raises(ValueError, match="slide over a window, and rows do not leave"):
        make_config("speed-4", model=gemma, **TWO_RANKS)
    make_config("snapkv:kv_rate=0.1", model=gemma, **TWO_RANKS)
    with pytest.raises(ValueError, match="retrieval was never tried in a pipeline"):
        make_config("fier-64", model=gemma, **TWO_RANKS)


def config_of(kinds: list[str], ranks: int) -> Any:
    """A model with layers of these kinds, or 8 of which nothing is said."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(layer_types=kinds),
        get_total_num_hidden_layers=lambda: len(kinds) or 8,
    )
    parallel = SimpleNamespace(pipeline_parallel_size=ranks)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


def test_every_rank_has_a_layer_that_policies_are_about(monkeypatch) -> None:
    lower = FULL * 2 + SLIDES * 6
    assert has_rank_without_policy_layers(config_of(lower, 2))
    assert not has_rank_without_policy_layers(config_of(lower, 1))
    for works in ((SLIDES + FULL) * 4, FULL * 8, []):
        assert not has_rank_without_policy_layers(config_of(works, 2))
    assert has_rank_without_policy_layers(config_of((SLIDES + FULL) * 4, 8))
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,7")
    assert not has_rank_without_policy_layers(config_of(lower, 2))
