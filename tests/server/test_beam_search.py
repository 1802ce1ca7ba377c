"""Beam search is refused where a policy would change what it does."""

from types import SimpleNamespace

import pytest

from vllm_kvx.server.beam_search import refuse_beam_search


@pytest.mark.parametrize(
    ("config", "refused"),
    [({"kv_policy": "speed-4"}, True), ({"kv_policy": "full"}, False), ({}, False)],
)
def test_refused_under_a_policy_only(config: dict[str, str], refused: bool) -> None:
    from vllm.sampling_params import BeamSearchParams, SamplingParams

    model_config = SimpleNamespace(get_total_num_hidden_layers=lambda: 8, served_model_name="beams")
    processor = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=config, model_config=model_config)
    )
    resolve = refuse_beam_search(lambda self, params: "asked vLLM")
    assert resolve(processor, SamplingParams()) == "asked vLLM"
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    if refused:
        with pytest.raises(ValueError, match="drop use_beam_search"):
            resolve(processor, beam)
    else:
        assert resolve(processor, beam) == "asked vLLM"
