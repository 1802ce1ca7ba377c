"""benchmarks.checkpoint.yarn: a longer context, as transformers and vLLM read it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from benchmarks.checkpoint.yarn import main, stretched


def test_config_is_read_with_a_longer_context(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from vllm.transformers_utils.config import get_config

    model, longer = tiny(), tmp_path / "longer"
    before = transformers.AutoConfig.from_pretrained(model)
    main([str(model), str(longer), "--factor", "2"])
    for config in (
        transformers.AutoConfig.from_pretrained(longer),
        get_config(str(longer), trust_remote_code=False),
    ):
        assert config.max_position_embeddings == 2 * before.max_position_embeddings
        scaled = config.rope_parameters
        assert (scaled["rope_type"], scaled["factor"]) == ("yarn", 2)
        assert scaled["rope_theta"] == before.rope_parameters["rope_theta"]
        assert scaled["original_max_position_embeddings"] == before.max_position_embeddings
    assert {file.name for file in longer.iterdir()} == {file.name for file in model.iterdir()}
    with pytest.raises(SystemExit, match="exists"):
        main([str(model), str(longer)])
    with pytest.raises(SystemExit, match="scaled already"):
        main([str(longer), str(tmp_path / "again")])


def test_what_has_no_rotary_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="no rope_theta"):
        stretched(json.loads('{"max_position_embeddings": 64}'), 4)
