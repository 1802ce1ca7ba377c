"""What is refused where vLLM admits requests: beam search under a policy, policies without one."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_kvx.plugin import with_request_checks


@pytest.mark.parametrize(
    ("config", "refused"),
    [({"kv_policy": "speed-4"}, True), ({"kv_policy": "full"}, False), ({}, False)],
)
def test_refused_under_a_policy_only(config: dict[str, str], refused: bool) -> None:
    from vllm.sampling_params import BeamSearchParams, SamplingParams

    model_config = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 8,
        get_sliding_window=lambda: None,
        is_hybrid=False,
        served_model_name="beams",
    )
    processor = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config=config,
            model_config=model_config,
            speculative_config=None,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
    )
    resolve = with_request_checks(lambda self, params: "asked vLLM")
    assert resolve(processor, SamplingParams()) == "asked vLLM"
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    if refused:
        with pytest.raises(ValueError, match="to drop use_beam_search, or use an engine without"):
            resolve(processor, beam)
    else:
        assert resolve(processor, beam) == "asked vLLM"


def test_an_engine_without_a_policy_refuses_one() -> None:
    """Where vLLM admits requests, however they came."""
    from vllm.sampling_params import SamplingParams

    resolve = with_request_checks(lambda self, params: "asked vLLM")

    def ask(extra_args: Any, config: Any = None) -> Any:
        processor = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=config))
        return resolve(processor, SamplingParams(extra_args=extra_args))

    for config in (None, {}, {"theirs": 1}, {"kv_policy": None}):
        for key in ("kv_policy", "kv-policy", "kv_polcy", "KVPolicy"):
            says = rf"'{key}' in extra_args .*without kv_policy in additional_config, and answers"
            with pytest.raises(VLLMValidationError, match=says):
                ask({"a": 1, key: "full"}, config)
        theirs = {"policy": 1, "kv_transfer_params": {}, "kv_rate": 2, "kv_cache_policy": 3, 7: 1}
        for passes in (None, {}, {"kv_policy": None}, theirs):
            assert ask(passes, config) == "asked vLLM"
