"""What servers that draft tokens are refused: by vLLM's drafters, by the model, behind prompts."""

from pathlib import Path
from typing import Any

import pytest
from support.configs import own_drafts, speculative, write_config
from support.refused import changed, drafted_by, lines_of
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.cache.draft_slots import reserve_slots
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.config.wording import in_python
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.draft_checks import WITH_DRAFTS, WITH_OWN_DRAFTS
from vllm_kvx.server.lookahead_checks import WITH_LOOKAHEAD
from vllm_kvx.server.start_refusal import reasons
from vllm_kvx.server.validate import SCHEDULER


def test_rows_where_tokens_are_drafted_behind_prompts(stock) -> None:
    assert not reasons(WITH_LOOKAHEAD, stock)
    of_experts = changed(stock, "model_config.is_moe", True)
    asked = [
        changed(stock, "speculative_config", drafted_by("ngram")),
        changed(stock, "parallel_config.pipeline_parallel_size", 2),
        changed(stock, "model_config.is_hybrid", True),
        changed(stock, "model_config.uses_mrope", True),
        changed(stock, "lora_config", object()),
        changed(of_experts, "parallel_config.data_parallel_size", 2),
        changed(stock, "parallel_config.enable_eplb", True),
        changed(stock, "attention_config.backend", AttentionBackendEnum.FLASHINFER),
    ]
    found = [reasons(WITH_LOOKAHEAD, config) for config in asked]
    assert found == [[row.reason] for row in WITH_LOOKAHEAD]
    assert not reasons(WITH_LOOKAHEAD, of_experts)


@pytest.mark.parametrize(
    "name", ["snapkv:kv_rate=0.1,lookahead=4", "criticalkv:kv_rate=0.1,lookahead=4"]
)
def test_a_server_that_looks_ahead(make_config, name: str) -> None:
    assert not lines_of(make_config, name)
    room = {"additional_config": {"kv_layout": [name]}}
    (found,) = lines_of(make_config, "full", **room, **NGRAM)
    assert "drop --speculative-config, or leave out lookahead=" in found


def test_rows_where_tokens_are_drafted(stock) -> None:
    assert not reasons(WITH_DRAFTS, stock)
    in_time = changed(stock, "scheduler_config.async_scheduling", False)
    ahead = changed(stock, "scheduler_config.async_scheduling", True)
    ngram, suffix = drafted_by("ngram"), drafted_by("suffix")
    for method in ("ngram", "draft_model", "eagle", "eagle3", "mtp"):
        works = changed(in_time, "speculative_config", drafted_by(method))
        assert not reasons(WITH_DRAFTS, works), method
    found = [
        *reasons(WITH_DRAFTS, changed(ahead, "speculative_config", ngram)),
        *reasons(WITH_DRAFTS, changed(in_time, "speculative_config", suffix)),
    ]
    assert found == [row.reason for row in WITH_DRAFTS[:2]]
    assert "set it to draft_model, eagle, eagle3, mtp, ngram, or drop" in found[1]
    # What would be refused whatever is scheduled ahead is told first.
    assert reasons(WITH_DRAFTS, changed(ahead, "speculative_config", suffix)) == found[1:]
    for form in UNTRIED:
        other = changed(in_time, "speculative_config", drafted_by("mtp", form))
        assert reasons(WITH_DRAFTS, other) == [WITH_DRAFTS[2].reason], form
    state = changed(in_time, "model_config.is_hybrid", True)
    assert reasons(WITH_DRAFTS, changed(state, "speculative_config", ngram)) == [
        WITH_DRAFTS[4].reason
    ]
    rows = changed(in_time, "model_config.uses_mrope", True)
    by_layers = changed(rows, "speculative_config", drafted_by("mtp"))
    assert reasons(WITH_DRAFTS, by_layers) == [WITH_DRAFTS[7].reason]
    for method in ("ngram", "draft_model", "eagle", "eagle3"):
        assert not reasons(WITH_DRAFTS, changed(rows, "speculative_config", drafted_by(method)))
    for method in ("draft_model", "eagle3", "mtp"):
        beside = changed(state, "speculative_config", drafted_by(method))
        assert WITH_DRAFTS[3].reason in reasons(WITH_DRAFTS, beside), method


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_rows_where_drafts_are_accepted_otherwise(stock, method: str) -> None:
    """`fly` is vLLM 0.33's; one that a later vLLM adds is not known to keep the answers."""
    in_time = changed(stock, "scheduler_config.async_scheduling", False)
    for accepts in ("standard", "block", "synthetic", "fly", "another"):
        drafter = drafted_by(method, accepts=accepts)
        found = reasons(WITH_DRAFTS, changed(in_time, "speculative_config", drafter))
        keeps = accepts in ("standard", "block")
        assert found == ([] if keeps else [WITH_DRAFTS[8].reason]), accepts


UNTRIED = "parallel_drafting", "enable_adaptive_verification", "several layers", "shared layers"


NGRAM = {"speculative_config": speculative(3)}


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "snapkv:kv_rate=0.1",
        "pyramidkv:kv_rate=0.1",
        "fier-64",
        "quest-64",
        "speed-4+fier-64",
        "swiftkv-4",
        "snapkv:kv_rate=0.1,after=4",
        "fastkv:tsp_layer=3,kv_rate=0.1,after=4",
        "snapkv:kv_rate=0.1,after=4+fier-64",
    ],
)
def test_ngram_drafts_under_policies(make_config, policy: str) -> None:
    config = make_config("snapkv:kv_rate=0.1", dtype="float32", **NGRAM)
    assert config.scheduler_config.async_scheduling is False
    assert not lines_of(make_config, policy, **NGRAM)


def test_drafts_that_are_accepted_by_a_rate(make_config) -> None:
    """A benchmark's: wrong on purpose. Servers of `full` alone run vLLM's own code, and take it."""
    made_up = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    drafts = {"speculative_config": speculative(3) | made_up}
    (found,) = lines_of(make_config, "fier-64", **drafts)
    assert "set it to standard or block, or leave it out" in found
    room = {"additional_config": {"kv_layout": ["fier-64"]}}
    assert lines_of(make_config, "full", **room, **drafts) == [found]
    assert not lines_of(make_config, "full", **drafts)
    drafts = {"speculative_config": speculative(3) | {"rejection_sample_method": "block"}}
    assert not lines_of(make_config, "fier-64", **drafts)
    with pytest.raises(ValueError, match="not 'rejection_sample_method'"):
        make_config("full", speculative_config=OWN["speculative_config"] | made_up)


def test_what_a_rejected_draft_would_leave_without_entries(make_config) -> None:
    """A request is refused what the server is refused at start, and so is a server with room."""
    (found,) = lines_of(make_config, "selfonly-4", **NGRAM)
    assert "selfonly-4 keeps the last token's entry alone" in found
    room = {"additional_config": {"kv_layout": ["selfonly-4"]}}
    assert lines_of(make_config, "speed-4", **room, **NGRAM) == [found]
    settings = KVSettings.from_vllm_config(make_config("speed-4", dtype="float32", **NGRAM))
    assert settings is not None
    with pytest.raises(PolicyError, match="drop --speculative-config, or run speed-K"):
        check_fits(settings.parse("selfonly-4"), settings.layout, settings.num_layers)
    check_fits(settings.parse("speed-4:anchors=2"), settings.layout, settings.num_layers)


@pytest.fixture
def eagle(tmp_path: Path) -> dict[str, Any]:
    """The arguments of an engine whose tokens an EAGLE-3 head drafts."""
    head = tmp_path / "head"
    head.mkdir()
    model = write_config(head, num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])
    drafter = {"method": "eagle3", "model": model, "num_speculative_tokens": 3}
    return {"speculative_config": drafter, "async_scheduling": False}


@pytest.mark.parametrize(
    "policy",
    ["snapkv:kv_rate=0.1", "fier-64", "snapkv:kv_rate=0.1,after=4", "streamingllm:recent=1020"],
)
def test_drafts_by_states_under_policies(make_config, eagle, policy: str) -> None:
    assert not lines_of(make_config, policy, **eagle)


@pytest.mark.parametrize("policy", ["speed-4", "swiftkv-4", "speed-4+fier-64", "selfonly-4"])
def test_tokens_without_states_to_draft_from(make_config, eagle, policy: str) -> None:
    """A request is refused what the server is refused at start, and so is a server with room."""
    *_, found = lines_of(make_config, policy, **eagle)
    assert f"under {policy.removesuffix('+fier-64')} some tokens have none" in found
    room = {"additional_config": {"kv_layout": [policy]}}
    assert lines_of(make_config, "full", **room, **eagle)[-1] == found
    settings = KVSettings.from_vllm_config(
        make_config("snapkv:kv_rate=0.1", dtype="float32", **eagle)
    )
    assert settings is not None
    with pytest.raises(PolicyError, match="policy that retains or retrieves, or set the method"):
        check_fits(settings.parse("speed-4"), settings.layout, settings.num_layers)


def test_rows_where_the_model_drafts_for_itself(stock) -> None:
    """As behind a prompt, but for what stands in for it in vLLM's configuration."""
    own = changed(stock, "speculative_config", drafted_by("ngram"))
    assert not reasons(WITH_OWN_DRAFTS, own)
    assert reasons(WITH_OWN_DRAFTS, stock) == [WITH_OWN_DRAFTS[0].reason]
    mixed = changed(own, "model_config.is_hybrid", True)
    lora = changed(own, "lora_config", object())
    assert reasons(WITH_OWN_DRAFTS, mixed) == [WITH_OWN_DRAFTS[2].reason]
    assert reasons(WITH_OWN_DRAFTS, lora) == [WITH_OWN_DRAFTS[4].reason]
    assert all("method kvx" in row.reason for row in WITH_OWN_DRAFTS)


OWN = {"speculative_config": own_drafts(3, "fier-64")}


@pytest.mark.parametrize("policy", ["full", "fier-32", "fier-128"])
def test_the_model_drafts_for_itself(make_config, policy: str) -> None:
    config = make_config(policy, dtype="float32", **OWN)
    assert config.speculative_config.method == "ngram"
    assert config.additional_config["kv_drafts"] == {"policy": "fier-64", "cache_to_weights": 0}
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.async_scheduling is False
    reserve_slots()
    reserve_slots()
    assert config.num_lookahead_tokens == 3
    assert make_config(policy, dtype="float32", **NGRAM).num_lookahead_tokens == 0
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None and not settings.stock and settings.layout.sidecar is not None
    # A request may name what reads less, and no policy that leaves something out.
    check_fits(settings.parse("fier-64"), settings.layout, settings.num_layers)
    with pytest.raises(PolicyError, match="use full, fier or quest"):
        check_fits(settings.parse("streamingllm:recent=1020"), settings.layout, settings.num_layers)


@pytest.mark.parametrize(
    "policy",
    [
        *("snapkv:kv_rate=0.1", "streamingllm:recent=1020", "speed-4", "swiftkv-4"),
        *("knorm:kv_rate=0.1", "snapkv:kv_rate=0.1,after=4+fier-64"),
    ],
)
def test_what_leaves_entries_out_where_the_model_drafts(make_config, policy: str) -> None:
    (found,) = lines_of(make_config, policy, **OWN)
    room = {"additional_config": {"kv_layout": [policy]}}
    assert lines_of(make_config, "full", **room, **OWN) == [found]
    assert f"{parse_policy(policy)} leaves some out" in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"policy": "snapkv:kv_rate=0.1"}, "set it to fier-256 or another policy that retrieves"),
        ({"policy": "snapkv:kv_rate=0.1+fier-64"}, "retrieves and does nothing else"),
        ({"policy": "snapkv:kv_rate=0.1,after=4+fier-64"}, "retrieves and does nothing else"),
        ({"policy": "full"}, "retrieves and does nothing else"),
        ({"policy": "fier-64:dense_below=0"}, "leave out dense_below"),
        ({"policy": "fier"}, "policy of --speculative-config: "),
        ({"policy": 64}, "policy of --speculative-config: "),
        ({"policy": "quest-64"}, "one server holds one sidecar"),
        ({"cache_to_weights": -1}, "must be a number of at least 0"),
        ({"cache_to_weights": True}, "must be a number of at least 0"),
        ({"cache_to_weights": float("nan")}, "must be a number of at least 0"),
        ({"num_speculative_tokens": None}, "needs num_speculative_tokens"),
        ({"prompt_lookup_max": 3}, "not 'prompt_lookup_max'"),
    ],
)
def test_what_the_drafter_may_not_be(make_config, changes: dict[str, Any], why: str) -> None:
    drafter = OWN["speculative_config"] | changes
    drafter = {key.replace("_", "-"): value for key, value in drafter.items()}
    with pytest.raises(ValueError) as refused:
        make_config("fier-32", dtype="float32", speculative_config=drafter)
    # In Python's words.
    assert in_python(why) in str(refused.value) or why in str(refused.value)


def test_flags_that_say_what_drafts(make_config) -> None:
    """vLLM's own, beside the speculative configuration."""
    drafter = {"method": "kvx", "policy": "fier-64"}
    config = make_config("full", dtype="float32", speculative_config=drafter, spec_tokens=3)
    assert config.speculative_config.num_speculative_tokens == 3
    with pytest.raises(ValueError, match="not 'model'"):
        make_config("full", spec_model="some", **OWN)
    with pytest.raises(ValueError, match="say the same: drop one of them"):
        make_config("full", spec_tokens=4, **OWN)
    with pytest.raises(ValueError, match="mutually exclusive"):
        make_config("full", spec_method="ngram", **OWN)


def test_a_drafter_without_a_policy_or_a_policy_without_one(make_config) -> None:
    with pytest.raises(ValueError, match="set --kv-policy full too"):
        make_config(None, **OWN)
    inner = {"kv_drafts": {"policy": "fier-64", "cache_to_weights": 0}}
    (found,) = lines_of(make_config, "full", additional_config=inner)
    assert "set the method of --speculative-config to kvx" in found
    with pytest.raises(ValueError, match="remove it, and set --speculative-config"):
        make_config("full", dtype="float32", additional_config={"kv_drafts": "fier-64"})


def test_what_no_test_drafts_beside(make_config) -> None:
    offloads = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    (found,) = lines_of(make_config, "fier-64", kv_transfer_config=offloads, **NGRAM)
    assert "beside a KV connector" in found
