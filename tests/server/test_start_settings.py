"""What a policy sets at start, and what it is refused beside: schedulers, adapters, connectors."""

from typing import Any

import pytest
from support.refused import changed, lines_of

from vllm_kvx.server.validate import WORKERS, machinery_rows


def test_a_policy_sets_scheduler_worker_and_check(make_config) -> None:
    stock = make_config()
    config = make_config("speed-4", additional_config={"theirs": 1})
    kind = "Async" if config.scheduler_config.async_scheduling else ""
    assert config.scheduler_config.async_scheduling == stock.scheduler_config.async_scheduling
    assert (
        config.scheduler_config.scheduler_cls == f"vllm_kvx.cache.scheduler.{kind}PolicyScheduler"
    )
    assert config.parallel_config.worker_cls == WORKERS[stock.parallel_config.worker_cls]
    (check,) = config.model_config.logits_processors
    assert check.startswith("vllm_kvx.server.request_check:")
    assert config.additional_config == {"kv_policy": "speed-4", "theirs": 1}


def test_full_alone_is_stock_but_for_the_check(make_config) -> None:
    stock, config = make_config(), make_config("full")
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == stock.parallel_config.worker_cls
    assert len(config.model_config.logits_processors) == 1
    roomy = make_config("full", additional_config={"kv_layout": ["speed-4"]})
    assert roomy.scheduler_config.scheduler_cls


def test_users_logits_processors_stay(make_config) -> None:
    config = make_config("speed-4", logits_processors=["their.module:Processor"])
    assert config.model_config.logits_processors[0] == "their.module:Processor"
    assert len(config.model_config.logits_processors) == 2


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({"scheduler_cls": "their.Scheduler"}, "--scheduler-cls"),
        ({"worker_cls": "their.Worker"}, "--worker-cls"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    ],
)
def test_real_settings_are_refused(make_config, kwargs: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make_config("speed-4", **kwargs)
    make_config(None, **kwargs)


def test_all_reasons_at_once(make_config) -> None:
    with pytest.raises(ValueError) as error:
        make_config("speed-4", enable_prompt_embeds=True, scheduler_cls="their.Scheduler")
    assert "--enable-prompt-embeds" in str(error.value)
    assert "--scheduler-cls" in str(error.value)


def test_full_alone_refuses_little(make_config) -> None:
    make_config("full", enable_lora=True, scheduler_cls="their.Scheduler")


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ("their.Worker", "drop --worker-cls"),
        ("vllm.v1.worker.xpu_worker.XPUWorker", "serve on one of these, or drop the KV policy"),
    ],
)
def test_other_workers(stock, worker: str, says: str) -> None:
    (row,) = machinery_rows(changed(stock, "parallel_config.worker_cls", worker))
    assert row.reason.endswith(f"cannot extend {worker}: {says}")


def test_nothing_is_measured_for_a_server_that_cannot_run(make_config, monkeypatch) -> None:
    from vllm_kvx.server import measure_at_start as at_start

    monkeypatch.setattr(at_start, "measured", lambda *_: pytest.fail("it measures"))
    with pytest.raises(ValueError, match=r"\n  - .*--scheduler-cls"):
        make_config(
            "fastkv:kv_rate=0.1",
            dtype="float32",
            scheduler_cls="their.Scheduler",
            load_format="auto",
        )


# Policies, and whether layers may hold unequally much; whether the output projections' weights are
# read.
@pytest.mark.parametrize(
    ("policy", "unequal", "reads_weights"),
    [
        ("snapkv:kv_rate=0.1", False, False),
        ("streamingllm:recent=1020", False, False),
        ("knorm:kv_rate=0.1", False, False),
        ("fier-64", False, False),
        ("snapkv:kv_rate=0.1+quest-64", False, False),
        ("pyramidkv:kv_rate=0.1", True, False),
        ("criticalkv:kv_rate=0.1", False, True),
        ("speed-4", True, False),
        ("fastkv:tsp_layer=3,kv_rate=0.1", True, False),
        ("structkv:pivot=online,kv_rate=0.1", True, False),
        ("fastkv:tsp_layer=3,kv_rate=1+criticalkv:kv_rate=0.1", True, True),
        ("snapkv:score=critical,kv_rate=0.1", False, True),
        ("pyramidkv:score=critical,kv_rate=0.1", True, True),
        ("fastkv:tsp_layer=3,score=critical,kv_rate=0.1", True, True),
        ("structkv:pivot=3,score=critical,kv_rate=0.1", True, True),
    ],
)
def test_adapters_and_events(make_config, policy: str, unequal: bool, reads_weights: bool) -> None:
    """Refused by what a policy needs, whether the server runs it or has room for it."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    beside = {"additional_config": {"kv_layout": [policy]}}
    for name, room in ((policy, {}), ("full", beside)):
        found = lines_of(make_config, name, enable_lora=True, **room)
        assert ["rates values" in line for line in found] == [True] * reads_weights
        found = lines_of(make_config, name, kv_events_config=events, **room)
        assert ["--kv-events-config" in line for line in found] == [True] * unequal
        off = events | {"enable_kv_cache_events": False}
        assert not lines_of(make_config, name, kv_events_config=off, **room)


@pytest.mark.parametrize(
    ("policy", "connector", "says"),
    [
        ("fier-64", "OffloadingConnector", None),
        ("quest-64", "ExampleConnector", None),
        ("fier-64", "NixlConnector", None),
        ("fier-64", "LMCacheConnectorV1", "policies know OffloadingConnector, ExampleConnector"),
        ("snapkv:kv_rate=0.1", "LMCacheConnectorV1", "fier and quest from the KV policy"),
        ("snapkv:kv_rate=0.1", "OffloadingConnector", "hands over what is kept"),
        ("snapkv:kv_rate=0.1", "NixlConnector", None),
        ("pyramidkv:kv_rate=0.1", "NixlConnector", None),
        ("snapkv:kv_rate=0.1+fier-64", "NixlConnector", None),
        ("snapkv:kv_rate=0.1+fier-64", "ExampleConnector", "hands over what is kept"),
        ("snapkv:kv_rate=0.1,after=16", "NixlConnector", "leave out after=, or drop"),
        ("fastkv:tsp_layer=3,kv_rate=0.1,after=16", "NixlConnector", "leave out after=, or drop"),
        ("snapkv:kv_rate=0.1,after=16+fier-64", "NixlConnector", "leave out after=, or drop"),
        ("snapkv:kv_rate=0.1,lookahead=16", "NixlConnector", None),
        ("snapkv:kv_rate=0.1,lookahead=16", "OffloadingConnector", "hands over what is kept"),
        ("speed-4", "OffloadingConnector", "retain or propagate do not leave"),
        ("fastkv:tsp_layer=3,kv_rate=0.1", "ExampleConnector", "retain or propagate do not leave"),
        ("fastkv:tsp_layer=3,kv_rate=0.1", "NixlConnector", None),
        ("speed-4+snapkv:kv_rate=0.1", "NixlConnector", None),
        ("selfonly-4", "NixlConnector", None),
        ("swiftkv-4", "NixlConnector", None),
    ],
)
def test_connectors(make_config, policy: str, connector: str, says: str | None) -> None:
    """Refused once, whether the server runs the policy or has room for it."""
    asked = {"kv_connector": connector, "kv_role": "kv_both"}
    for name, room in (
        (policy, {}),
        ("full", {"additional_config": {"kv_layout": [policy]}}),
    ):
        found = lines_of(make_config, name, kv_transfer_config=asked, **room)
        assert len(found) == (says is not None) and all(str(says) in line for line in found)


@pytest.mark.parametrize(
    ("policy", "connector", "key", "value"),
    [
        ("fier-64", "OffloadingConnector", "offload_prompt_only", False),
        ("quest-64", "NixlConnector", "bidirectional_kv_xfer", True),
        ("snapkv:kv_rate=0.1", "NixlConnector", "bidirectional_kv_xfer", True),
        ("knorm:kv_rate=0.1", "NixlConnector", "enforce_handshake_compat", False),
    ],
)
def test_what_connectors_are_not_to_do(
    make_config, policy: str, connector: str, key: str, value: bool
) -> None:
    asked: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    asked["kv_connector_extra_config"] = {key: value}
    (line,) = lines_of(make_config, policy, kv_transfer_config=asked)
    assert f"drop {key}" in line
    make_config("full", kv_transfer_config=asked)
