"""What vllm-kvx adds to the HTTP server.

``GET /v1/kv_policy``, metrics that are fresh when ``/metrics`` is read, and a look at every body
for a policy in the wrong place.
"""

import asyncio
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_kvx import __version__
from vllm_kvx.config.settings import AUTO_KEY, KVSettings
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.server import refusal_reasons as refused
from vllm_kvx.server.answered import note_policy, say_policies
from vllm_kvx.server.bodies import check_bodies
from vllm_kvx.server.body_check import STATUS, check_request_body
from vllm_kvx.server.engines import ENGINES
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.server.metrics import PolicyMetrics
from vllm_kvx.server.start_metrics import export_auto, export_build_info, export_evaluated
from vllm_kvx.server.stats import StatsReader
from vllm_kvx.server.text_alone import why_text_alone
from vllm_kvx.server.tuned_weights_notice import TunedWeightsNotice
from vllm_kvx.server.validate import identity_of

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

PATH = "/v1/kv_policy"
METRICS_PATH = "/metrics"
POLL_S = 5.0


class KVPolicyEndpoint:
    """vLLM's ``EndpointPlugin`` for them; it has effect on servers with a policy alone."""

    name = "kvx"
    required_tasks = ("generate",)

    @classmethod
    def for_tasks(cls, supported_tasks: Any) -> list["KVPolicyEndpoint"]:
        """One endpoint for a server that generates; none for others, such as renderers."""
        return [cls()] if set(cls.required_tasks) & set(supported_tasks or ()) else []

    def attach_router(self, app: FastAPI) -> None:
        """Adds the route and what looks at requests; vLLM calls it while it builds the app."""
        app.add_api_route(PATH, kv_policy, methods=["GET"])
        app.add_middleware(FreshMetrics, state=app.state)
        check_bodies(app, _look_at)
        say_policies(app)

    async def init_state(
        self, engine_client: "EngineClient | None", state: State, args: Namespace
    ) -> None:
        """Called once the engine is up."""
        if engine_client is None:
            return
        settings = KVSettings.from_vllm_config(engine_client.vllm_config)
        if settings is not None:
            setattr(state, STATUS, PolicyStatus(settings, engine_client))


def _look_at(request: Request, body: Any, raw: bytes) -> None:
    check_request_body(request, body, raw)
    note_policy(request, body)


class PolicyStatus:
    """What a server says about its policy."""

    def __init__(self, settings: KVSettings, engine_client: "EngineClient") -> None:
        config = engine_client.vllm_config
        self.settings = settings
        # What the server chose for `auto`; None where it was named.
        additional: Any = config.additional_config
        self.auto: dict[str, Any] | None = additional.get(AUTO_KEY)
        self.model_name = str(config.model_config.served_model_name)
        # Why images are refused, if they are.
        self.text_alone = why_text_alone(config)
        # Anew: a hub's weights may have come since the start was checked.
        identity = identity_of(config)
        self.kv_cache_dtype = identity.kv_cache_dtype
        self.evaluation_notice = EvaluationNotice(identity)
        self.tuned_weights_notice = TunedWeightsNotice(identity, settings.num_layers)
        self.reader: StatsReader | None = None
        self.exports = config.parallel_config._api_process_rank == 0
        self._poller: asyncio.Task[None] | None = None
        refused.begin(self.model_name)
        policy = str(settings.policy)
        if self.exports:
            layout = "stock" if settings.stock else str(settings.layout)
            export_build_info(self.model_name, policy, layout)
            if self.auto is not None:
                export_auto(self.model_name, self.auto)
            notice = self.evaluation_notice
            for own in settings.policies:
                if notice.is_lossy(own):
                    measured = notice.as_json(own)["measured"]
                    export_evaluated(self.model_name, notice.name(own), measured)
        if settings.stock:
            return  # Stock workers count nothing.
        metrics = None
        if self.exports:
            metrics = PolicyMetrics(self.model_name, policy, settings.counted_policies())
        self.reader = StatsReader(engine_client, metrics.update if metrics else lambda stats: None)
        # Whoever asks while a step takes longer than a reader waits is given what was read last,
        # which must not be nothing. And /metrics may be read from another process, which sees what
        # this one last exported.
        self._poller = asyncio.create_task(self._poll())

    async def refresh_metrics(self) -> None:
        """Brings the Prometheus metrics up to date."""
        if self.reader is not None and self.exports:
            await self.reader.read()

    async def as_json(self) -> dict[str, Any]:
        """The answer of ``GET /v1/kv_policy``.

        ``current`` is false if the engine did not answer in time: the counters are older then, by
        one step and `POLL_S` seconds at most.
        """
        stats = await self.reader.read() if self.reader else {}
        settings = self.settings
        return {
            "version": __version__,
            "policy": str(settings.policy),
            "parameters": settings.policy.parameters(),
            "auto": self.auto,
            "request_policies": settings.request_policies,
            "text_alone": self.text_alone,
            "measured": settings.measured.as_dict(),
            "measured_config": settings.measured.as_status(),
            "model_key": self.evaluation_notice.model_key,
            "kv_cache_dtype": self.kv_cache_dtype,
            "answers_kept": {str(p): self.evaluation_notice.as_json(p) for p in settings.policies},
            "tuned_for": self.tuned_weights_notice.as_json(),
            "matches_tuning": self.tuned_weights_notice.matches(
                [*settings.policies, *self._requested(stats.get("policies", {}))]
            ),
            "num_layers": settings.num_layers,
            "layout": {
                "splits": list(settings.layout.later_starts),
                "sidecar": settings.layout.sidecar and settings.layout.sidecar.as_json(),
                "window": settings.layout.window,
                **stats.get("layout", {}),
            },
            "stash": {
                "tokens": stats.get("stash_tokens", 0),
                "tokens_used": stats.get("stash_tokens_used", 0),
                "waits": stats.get("stash_waits", 0),
                "wait_seconds": stats.get("stash_wait_seconds", 0.0),
            },
            "run_in_full": stats.get("run_in_full", {}),
            "seconds_in_retention": stats.get("seconds_in_retention", 0.0),
            "seconds_in_detector": stats.get("seconds_in_detector", 0.0),
            "kv_bytes_moved": stats.get("kv_bytes_moved", 0),
            **({"retrieval": stats["retrieval"]} if "retrieval" in stats else {}),
            "engines": stats.get(ENGINES, 1),
            "counters": stats.get("policies", {}),
            "current": self.reader is None or self.reader.is_current,
        }

    def _requested(self, names: Iterable[str]) -> Iterator[KVPolicy]:
        """The policies of `names`, which workers counted requests by."""
        for name in names:
            try:
                yield self.settings.parse(name)
            except PolicyError:  # Those that are counted together have no policy's name.
                continue

    async def _poll(self) -> None:
        assert self.reader is not None
        while True:
            await self.reader.read()
            await asyncio.sleep(POLL_S)


class FreshMetrics:
    """ASGI middleware: has the metrics brought up to date before they are served."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith(METRICS_PATH):
            status: PolicyStatus | None = getattr(self.state, STATUS, None)
            if status is not None:
                await status.refresh_metrics()
        await self.app(scope, receive, send)


async def kv_policy(request: Request) -> dict[str, Any]:
    """The server's KV policy: parameters, layout, and counters per policy."""
    status: PolicyStatus | None = getattr(request.app.state, STATUS, None)
    if status is None:
        raise HTTPException(404, "this server has no KV policy")
    return await status.as_json()
