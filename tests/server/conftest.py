"""Configurations of tiny models, made without starting an engine."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from support.configs import engine_args, vllm_config, write_config


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a config.json, Llama's with `changes`, and returns its directory."""

    def write(**changes: Any) -> str:
        return write_config(tmp_path_factory.mktemp("model"), **changes)

    return write


@pytest.fixture(autouse=True)
def _nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL is found where it is not installed: no engine of these tests starts with it."""
    if find_spec("nixl") is None:
        module = ModuleType("nixl")
        module.__spec__ = ModuleSpec("nixl", None)
        monkeypatch.setitem(sys.modules, "nixl", module)


@pytest.fixture(scope="session")
def llama(model_dir: Callable[..., str]) -> str:
    return model_dir()


@pytest.fixture
def make_config(llama: str) -> Callable[..., Any]:
    """Creates a VllmConfig as a server would: make_config(policy, **engine arguments)."""

    def make(policy: Any = None, *, model: str = llama, **kwargs: Any) -> Any:
        return vllm_config(model, policy, **kwargs)

    return make


@pytest.fixture(scope="module")
def stock(llama: str) -> Any:
    """The configuration of a server without a policy, for ``support.refused.changed``."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_args(llama)).create_engine_config()


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's routes and ours, as a server with a policy has them; no engine is behind them."""
    from support.vllm_routes import routes

    from vllm_kvx.server.route import KVPolicyEndpoint

    (endpoint,) = KVPolicyEndpoint.for_tasks(("generate",))
    return routes(endpoint)


@pytest.fixture
def post(app: Any) -> Callable[..., Any]:
    """Posts a body to a route of `app`: post(path, json=...), an httpx.Response."""
    from support.vllm_routes import poster

    return poster(app)
