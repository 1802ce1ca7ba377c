"""The status route and the metrics, against an engine that is not there."""

import asyncio
import json
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI

from vllm_kvx.config.measured import Measured
from vllm_kvx.server import route, stats
from vllm_kvx.server.route import KVPolicyEndpoint


def worker_stats(**policies: dict[str, int]) -> dict[str, Any]:
    return {
        "layout": {"num_blocks": 9, "pool_prompt_tokens": 200, "stock_pool_tokens": 100},
        "policies": policies,
    }


class Engine:
    """An engine client whose workers answer with `stats`, or fail, or never answer."""

    def __init__(
        self,
        policy: str | None,
        rank: int = 0,
        count: int = 1,
        model: str = "m",
        directory: str = "nowhere/m",
        **config: Any,
    ) -> None:
        self.stats: Any = worker_stats()
        self.calls = 0
        self.vllm_config = SimpleNamespace(
            additional_config={"kv_policy": policy, **config} if policy else {},
            model_config=SimpleNamespace(
                served_model_name=model,
                get_total_num_hidden_layers=lambda: 8,
                get_sliding_window=lambda: None,
                is_hybrid=False,
                multimodal_config=None,
                max_model_len=64,
                model=directory,
                revision=None,
                hf_config=SimpleNamespace(architectures=None),
                hf_text_config=SimpleNamespace(to_dict=lambda: {"num_hidden_layers": 8}),
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
            cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
            quant_config=None,
            speculative_config=None,
            parallel_config=SimpleNamespace(
                _api_process_rank=rank,
                _api_process_count=count,
                data_parallel_size=1,
                world_size=2,
                pipeline_parallel_size=1,
            ),
        )

    async def collective_rpc(self, method: str) -> list:
        assert method == "kv_policy_stats"
        self.calls += 1
        if isinstance(self.stats, Exception):
            raise self.stats
        if self.stats is None:
            await asyncio.sleep(3600)
        return [self.stats, {"rank": 1}]


async def serve(engine: Engine) -> httpx.AsyncClient:
    app = FastAPI()
    app.mount("/metrics", prometheus_client.make_asgi_app())
    (endpoint,) = KVPolicyEndpoint.for_tasks(("generate",))
    endpoint.attach_router(app)
    await endpoint.init_state(engine, app.state, Namespace())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


@pytest.fixture(autouse=True)
def always_read(monkeypatch) -> None:
    monkeypatch.setattr(stats, "FRESH_S", 0.0)


def sample(name: str, model: str, policy: str) -> float | None:
    labels = {"model_name": model, "policy": policy}
    return prometheus_client.REGISTRY.get_sample_value(f"vllm_kvx:{name}", labels)


def of_server(name: str, model: str, policy: str) -> float | None:
    labels = {"model_name": model, "server_policy": policy}
    return prometheus_client.REGISTRY.get_sample_value(f"vllm_kvx:{name}", labels)


def test_route_tells_policy_layout_and_counters(monkeypatch) -> None:
    monkeypatch.setattr(stats, "FRESH_S", 60.0)

    async def main() -> None:
        engine = Engine("speed-4")
        engine.stats = worker_stats(**{"speed-4": {"prompt_tokens": 5}})
        client = await serve(engine)
        answer = (await client.get("/v1/kv_policy")).json()
        (said,) = answer.pop("answers_kept").values()
        assert not said["measured"] and "vllm-kvx evaluate nowhere/m" in said["says"]
        assert len(answer.pop("model_key")) == 32
        assert answer.pop("kv_cache_dtype") == "auto"
        assert answer == {
            "version": metadata.version("vllm-kvx"),
            "policy": "speed-4",
            "parameters": {"propagate": {"method": "speed", "cutoff": 4, "anchors": 1, "tail": 1}},
            "auto": None,
            "request_policies": "layout",
            "text_alone": None,
            "measured": {"tsp_layer": None, "pivot": None},
            "measured_config": {},
            "tuned_for": None,
            "matches_tuning": {"speed-4": False},
            "num_layers": 8,
            "layout": {"splits": [4], "sidecar": None, "window": 0, **engine.stats["layout"]},
            "stash": {"tokens": 0, "tokens_used": 0, "waits": 0, "wait_seconds": 0.0},
            "run_in_full": {},
            "seconds_in_retention": 0.0,
            "seconds_in_detector": 0.0,
            "kv_bytes_moved": 0,
            "engines": 1,
            "counters": {"speed-4": {"prompt_tokens": 5}},
            "current": True,
        }
        await asyncio.gather(*(client.get("/v1/kv_policy") for _ in range(5)))
        assert engine.calls == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "policy", "splits"),
    [
        ({"kv_measured": {"pivot": 3}}, "structkv:pivot=3,kv_floor=0", [4]),
        (
            {
                "kv_measured": {"pivot": 3, "tsp_layer": 5},
                "kv_layout": ["fastkv:kv_floor=0,kv_rate=0.1"],
            },
            "structkv:pivot=3,kv_floor=0",
            [4, 6],
        ),
        ({"kv_measured": {"pivot": 7}}, "structkv:pivot=7,kv_floor=0", []),
    ],
)
def test_route_tells_what_was_measured(config: dict, policy: str, splits: list[int]) -> None:
    measured = config["kv_measured"]

    async def main() -> None:
        client = await serve(Engine("structkv:kv_floor=0,kv_rate=0.1", **config))
        answer = (await client.get("/v1/kv_policy")).json()
        assert answer["measured"] == {
            "pivot": measured["pivot"],
            "tsp_layer": measured.get("tsp_layer"),
        }
        assert answer["measured_config"] == {f"kv_{name}": measured[name] for name in measured}
        assert Measured.of_status(answer["measured_config"]) == Measured.of(config)
        assert answer["policy"] == policy and answer["layout"]["splits"] == splits
        assert answer["parameters"]["propagate"]["pivot"] == measured["pivot"]

    asyncio.run(main())


def test_route_tells_what_weights_were_tuned_for(tmp_path: Path) -> None:
    record = {"policy": "speed-5", "original": "org/m", "layers": 8, "method": "full"}
    record |= {"loss": "self-distillation", "data": {}, "training": {}, "versions": {}}
    figures = {"kl": 0.5, "greedy": 0.75, "tokens": 100}
    agreement = {"before": figures, "after": figures}
    record |= {"agreement": agreement, "command": "c", "date": "2026-01-02"}
    (tmp_path / "kvx_tuned.json").write_text(json.dumps(record))

    async def main() -> None:
        engine = Engine("speed-5", directory=str(tmp_path), kv_layout=["fier-64"])
        client = await serve(engine)
        answer = (await client.get("/v1/kv_policy")).json()
        names = ("policy", "original", "method", "loss", "agreement", "date")
        assert answer["tuned_for"] == {name: record[name] for name in names}
        assert answer["matches_tuning"] == {"speed-5": True}
        # What requests named counts too; `other` stands for many.
        engine.stats = worker_stats(**{"speed-5:tail=3": {}, "speed-5+fier-64": {}, "other": {}})
        answer = (await client.get("/v1/kv_policy")).json()
        expected = {"speed-5": True, "speed-5:tail=3": False, "speed-5+fier-64": True}
        assert answer["matches_tuning"] == expected

    asyncio.run(main())


def test_retrieval_is_told_and_measured() -> None:
    async def main() -> None:
        engine = Engine("full", model="retrieval", kv_layout=["quest-79"])
        client = await serve(engine)
        assert "retrieval" not in (await client.get("/v1/kv_policy")).json()
        own: dict[str, Any] = {"ops": "cuda", "recall": None, "recall_samples": 0}
        counts = {"entries_held_in_decode": 9, "entries_scored": 7, "entries_read": 5}
        counts |= {"retrieval_steps": 3, "dense_fallbacks": 2}
        engine.stats = {**worker_stats(**{"quest-79": counts}), "retrieval": own}
        answer = (await client.get("/v1/kv_policy")).json()
        sidecar = {"has_codes": False, "group": 16, "reduction": "max", "max_units": 4}
        sidecar |= {"reuse_layers": 1, "dense_layers": 2}
        assert answer["layout"]["sidecar"] == sidecar
        assert answer["retrieval"] == own and answer["counters"] == {"quest-79": counts}
        await client.get("/metrics/")
        assert sample("retrieval_recall", "retrieval", "quest-79") is None
        assert sample("kv_entries_held_in_decode_total", "retrieval", "quest-79") == 9
        assert sample("kv_entries_scored_total", "retrieval", "quest-79") == 7
        assert sample("kv_entries_read_total", "retrieval", "quest-79") == 5
        assert sample("retrieval_steps_total", "retrieval", "quest-79") == 3
        assert sample("retrieval_dense_fallbacks_total", "retrieval", "quest-79") == 2
        counts |= {"recall": 0.75, "recall_samples": 12}
        await client.get("/metrics/")
        assert sample("retrieval_recall", "retrieval", "quest-79") == 0.75
        assert sample("retrieval_recall_samples", "retrieval", "quest-79") == 12
        assert sample("retrieval_recall", "retrieval", "full") is None

    asyncio.run(main())


@pytest.mark.parametrize(("skipped", "dtype"), [([], "fp8"), (["1", "0"], "fp8-skip-0-1")])
def test_a_quantized_kv_cache_is_told(skipped: list[str], dtype: str) -> None:
    async def main() -> None:
        engine = Engine("fier-64", model=dtype, kv_layout=["full"])
        engine.vllm_config.cache_config.cache_dtype = "fp8"
        engine.vllm_config.cache_config.kv_cache_dtype_skip_layers = skipped
        client = await serve(engine)
        answer = (await client.get("/v1/kv_policy")).json()
        assert answer["kv_cache_dtype"] == dtype
        for policy, said in answer["answers_kept"].items():
            assert f"--policies {policy}@{dtype} --save" in said["says"]
            # As the alert's command takes it.
            assert sample("policy_evaluated", dtype, f"{policy}@{dtype}") == 0
        assert set(answer["answers_kept"]) == {"fier-64", "full"}

    asyncio.run(main())


def test_metrics_are_those_of_the_scrape() -> None:
    async def main() -> None:
        engine = Engine("speed-4", model="scrape")
        client = await serve(engine)
        text = (await client.get("/metrics/")).text
        assert 'vllm_kvx:prompt_tokens_total{model_name="scrape",policy="speed-4"} 0.0' in text
        for total in (10, 25):
            engine.stats = worker_stats(**{"speed-4": {"prompt_tokens": total, "blocks_held": 3}})
            text = (await client.get("/metrics/")).text
            assert f'policy="speed-4"}} {total}.0' in text
        assert sample("kv_blocks_held", "scrape", "speed-4") == 3
        assert of_server("kv_pool_tokens", "scrape", "speed-4") == 200
        assert of_server("stock_kv_pool_tokens", "scrape", "speed-4") == 100
        assert of_server("kv_pool_blocks", "scrape", "speed-4") == 9

    asyncio.run(main())


def test_a_dead_or_busy_engine_leaves_the_last_values(monkeypatch) -> None:
    async def main() -> None:
        engine = Engine("speed-4", model="dead")
        client = await serve(engine)
        engine.stats = worker_stats(**{"speed-4": {"prompt_tokens": 7}})
        await client.get("/v1/kv_policy")
        monkeypatch.setattr(stats, "WAIT_S", 0.05)
        for broken in (RuntimeError("engine is dead"), {"policies": 3}, None, None):
            engine.stats = broken
            response = await client.get("/v1/kv_policy")
            assert response.status_code == 200
            assert response.json()["counters"] == {"speed-4": {"prompt_tokens": 7}}
            assert response.json()["current"] is False
            response = await client.get("/metrics/")
            assert response.status_code == 200
            assert 'vllm_kvx:prompt_tokens_total{model_name="dead",policy="speed-4"} 7.0' in (
                response.text
            )

    asyncio.run(main())


async def polled(engine: Engine, times: int = 2) -> None:
    """Waits until the server has asked so many times by itself, each after the one before came."""
    calls = engine.calls + times
    while engine.calls < calls:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 2)], ids=["the only one", "another"])
def test_counters_that_nobody_read_before_a_long_step(monkeypatch, rank: int, count: int) -> None:
    """They are late then, as of the step before, and not zero."""
    monkeypatch.setattr(stats, "WAIT_S", 0.05)
    monkeypatch.setattr(route, "POLL_S", 0.01)

    async def main() -> None:
        engine = Engine("speed-4", rank, count, model=f"long step {rank}")
        client = await serve(engine)
        engine.stats = worker_stats(**{"speed-4": {"prompt_tokens": 7}})
        await polled(engine)
        engine.stats = None  # A step began.
        await polled(engine, 1)
        answer = (await client.get("/v1/kv_policy")).json()
        assert answer["counters"] == {"speed-4": {"prompt_tokens": 7}}
        assert answer["layout"]["num_blocks"] == 9 and answer["current"] is False
        await client.get("/metrics/")
        exported = sample("prompt_tokens_total", f"long step {rank}", "speed-4")
        assert exported == (7 if rank == 0 else None)

    asyncio.run(main())


def test_of_several_api_servers_one_exports() -> None:
    async def main() -> None:
        first, second = (Engine("speed-4", rank, 2, "several") for rank in (0, 1))
        first.stats = second.stats = worker_stats(**{"speed-4": {"prompt_tokens": 4}})
        clients = [await serve(engine) for engine in (first, second)]
        for client in clients:
            await client.get("/metrics/")
            assert (await client.get("/v1/kv_policy")).json()["counters"]
        assert sample("prompt_tokens_total", "several", "speed-4") == 4

    asyncio.run(main())


def test_the_exporter_of_several_polls(monkeypatch) -> None:
    monkeypatch.setattr(route, "POLL_S", 0.01)

    async def main() -> None:
        engine = Engine("speed-4", 0, 2, "poll")
        await serve(engine)
        engine.stats = worker_stats(**{"speed-4": {"prompt_tokens": 4}})
        await polled(engine)
        assert sample("prompt_tokens_total", "poll", "speed-4") == 4

    asyncio.run(main())


def has_build_info(model: str) -> bool:
    families = list(prometheus_client.REGISTRY.collect())
    (info,) = [each for each in families if each.name == "vllm_kvx:build_info"] or [None]
    return info is not None and any(s.labels["model_name"] == model for s in info.samples)


def test_servers_without_a_policy() -> None:
    async def main() -> None:
        stock = Engine(None, model="none")
        response = await (await serve(stock)).get("/v1/kv_policy")
        assert response.status_code == 404
        assert not has_build_info("none")
        full = Engine("full", model="full")
        client = await serve(full)
        answer = (await client.get("/v1/kv_policy")).json()
        assert (answer["policy"], answer["counters"], answer["current"]) == ("full", {}, True)
        assert (await client.get("/metrics/")).status_code == 200
        assert has_build_info("full")
        assert stock.calls == full.calls == 0
        app = FastAPI()
        await KVPolicyEndpoint().init_state(None, app.state, Namespace())

    asyncio.run(main())
    assert KVPolicyEndpoint.for_tasks(("render",)) == []
    assert KVPolicyEndpoint.for_tasks(None) == []


def test_vllm_takes_the_endpoint_for_a_plugin(make_config) -> None:
    import vllm.plugins
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin, attach_endpoint_plugins

    make_config("speed-4")
    assert isinstance(KVPolicyEndpoint(), EndpointPlugin)
    assert [p.name for p in vllm.plugins.load_endpoint_plugins(("generate",))] == ["kvx"]
    assert vllm.plugins.load_endpoint_plugins(("render",)) == []
    app = FastAPI()
    attach_endpoint_plugins(app, ("generate",))
    assert "/v1/kv_policy" in {getattr(route, "path", None) for route in app.routes}
