"""Which servers keep the encoder of a model that also reads images, and why others do not."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from reference.wrappers import build

from vllm_kvx.server.text_alone import ASKED_FOR, why_text_alone

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None,
    reason="torchvision is missing: `bash tests/run.sh` sets it up",
)

KEEP, SEVERAL = "snapkv:kv_rate=0.2", ("pyramidkv", "criticalkv", "knorm")
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SELF = {"method": "kvx", "policy": "fier-64", "num_speculative_tokens": 2}
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
KNOWN: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": False}
# A policy and arguments, and what the reason names.
TEXT_ALONE: list[tuple[str, dict[str, Any], str]] = [
    ("speed-4", {}, "drop them from the KV policy and kv_layout"),
    ("auto", {}, "name the policy in its place"),
    ("full", {"additional_config": {"kv_layout": [KEEP, "speed-4"]}}, "propagate (speed,"),
    (f"{KEEP},lookahead=4", {"model": "mistral3"}, "leave it out of the KV policy and kv_layout"),
    ("fier-64", {"speculative_config": NGRAM}, "drop --speculative-config"),
    ("full", {"speculative_config": SELF, "model": "mistral3"}, "drop --speculative-config"),
    (KEEP, {"spec_method": "ngram", "spec_tokens": 2}, "and --spec-method"),
    (KEEP, {"enable_lora": True}, "drop --enable-lora"),
    (KEEP, {"pipeline_parallel_size": 2}, "set --pipeline-parallel-size 1"),
    ("fier-64", {"kv_transfer_config": CONNECTOR}, "drop --kv-transfer-config"),
    (KEEP, {"video_pruning_rate": 0.5}, "drop --video-pruning-rate"),
    (KEEP, {"skip_tokenizer_init": True}, "drop --skip-tokenizer-init"),
    (KEEP, {"hf_overrides": {"is_mm_prefix_lm": True}}, "see those behind them"),
]
SERVES_IMAGES: list[tuple[str | None, dict[str, Any]]] = [
    (f"{KEEP},after=8", {}),
    ("fier-64", {"additional_config": {"kv_layout": [f"{name}:kv_rate=0.2" for name in SEVERAL]}}),
    ("streamingllm:recent=1020", {"tensor_parallel_size": 2}),
    ("quest-64", {}),
    # Stock vLLM's own business.
    ("full", {"enable_lora": True}),
    ("full", {"hf_overrides": {"is_mm_prefix_lm": True}}),
    (None, {}),
]


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By type of model: the second has one position a token, beside which more is possible."""
    names = ("qwen2_5_vl", "mistral3")
    return {name: str(build(tmp_path_factory.mktemp(name), name)) for name in names}


@pytest.fixture
def wrapper(wrappers: dict[str, str]) -> str:
    return wrappers["qwen2_5_vl"]


@pytest.mark.parametrize(("policy", "arguments", "named"), TEXT_ALONE)
def test_a_server_of_text_alone_says_why(
    make_config: Callable[..., Any],
    stock: Any,
    wrappers: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    arguments: dict[str, Any],
    named: str,
) -> None:
    """What to change, too: in its log, and to those who send an image.

    stock: an earlier configuration, with which vLLM sets its loggers up.
    """
    monkeypatch.setattr(logging.getLogger("vllm.kvx"), "handlers", [caplog.handler])
    model = wrappers[arguments.get("model", "qwen2_5_vl")]
    given = KNOWN | arguments | {"model": model}
    config = make_config(policy, **given)
    assert not config.model_config.supports_multimodal_inputs
    why = why_text_alone(config)
    assert why is not None and named in why
    assert named in caplog.text


@pytest.mark.parametrize(("policy", "arguments"), SERVES_IMAGES)
def test_a_server_keeps_the_encoder(
    make_config: Callable[..., Any], wrapper: str, policy: str, arguments: dict[str, Any]
) -> None:
    config = make_config(policy, **KNOWN | {"model": wrapper} | arguments)
    assert config.model_config.supports_multimodal_inputs
    assert why_text_alone(config) is None


def test_language_model_only_is_obeyed(make_config: Callable[..., Any], wrapper: str) -> None:
    config = make_config(KEEP, **KNOWN | {"model": wrapper, "language_model_only": True})
    assert not config.model_config.supports_multimodal_inputs
    assert why_text_alone(config) == ASKED_FOR


@pytest.mark.parametrize("policy", ["speed-4", "auto"])
def test_the_arguments_stay_those_of_the_caller(wrapper: str, policy: str) -> None:
    """In Python several models may be started with one configuration."""
    from support.configs import engine_args
    from vllm.engine.arg_utils import EngineArgs

    ours = {"kv_policy": policy}
    args = EngineArgs(**engine_args(wrapper, additional_config=ours))
    config = args.create_engine_config()
    assert ours == {"kv_policy": policy}
    assert not args.language_model_only
    assert args.create_model_config().supports_multimodal_inputs
    # A further API server is given what was found, and not auto but what was chosen for it.
    args.additional_config = config.additional_config
    further = args.create_engine_config()
    assert not further.model_config.supports_multimodal_inputs
    assert why_text_alone(further) == why_text_alone(config) != ASKED_FOR


def test_models_of_text_have_no_reason(make_config: Callable[..., Any]) -> None:
    assert why_text_alone(make_config("speed-4")) is None
    with pytest.raises(ValueError, match="kv_text_alone is what a server sets"):
        make_config("speed-4", additional_config={"kv_text_alone": "I say so"})
