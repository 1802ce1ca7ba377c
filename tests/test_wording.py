"""Messages that speak of flags, in Python's words."""

import re

import pytest

from vllm_kvx.config.wording import in_python, worded
from vllm_kvx.server.draft_checks import WITH_OWN_DRAFTS
from vllm_kvx.server.lookahead_checks import WITH_LOOKAHEAD
from vllm_kvx.server.model_checks import WITH_PROPAGATION
from vllm_kvx.server.start_checks import (
    ALWAYS,
    WITH_PARTIAL_PREFIXES,
    WITH_POLICY,
    WITH_RETENTION,
    WITH_RETRIEVAL,
    WITH_SELECTION,
    WITH_VALUE_NORMS,
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("unknown key 'a' in vllm_xargs", "unknown key 'a' in extra_args"),
        (
            "start the server with --kv-policy speed-4:anchors=0,tail=3, or drop it",
            'start the server with additional_config={"kv_policy": "speed-4:anchors=0,tail=3"}, or '
            "drop it",
        ),
        (
            "make room with --kv-policy full --kv-layout speed-4+fier-64",
            'make room with additional_config={"kv_policy": "full", "kv_layout": '
            '["speed-4+fier-64"]}',
        ),
        ("add fier-64 to its --kv-layout", "add fier-64 to its kv_layout in additional_config"),
        ("with --kv-layout fier-64", 'with additional_config={"kv_layout": ["fier-64"]}'),
        ("without --kv-policy", "without kv_policy in additional_config"),
        ("in --additional-config, and", "in additional_config, and"),
        ("add --enforce-eager", "set enforce_eager=True"),
        ("set --dtype float32", "set dtype=float32"),
        ("set --block-size to a multiple of 32", "set block_size to a multiple of 32"),
        ("set --pipeline-parallel-size 1 and use", "set pipeline_parallel_size=1 and use"),
        (
            """set --compilation-config '{"a": {"b": false}}' or C""",
            """set compilation_config={"a": {"b": false}} or C""",
        ),
        ("--cpu-offload-gb works", "cpu_offload_gb works"),
        (
            "measure it with `vllm-kvx calibrate M --method fastkv`, or set --max-model-len",
            "measure it with `vllm-kvx calibrate M --method fastkv`, or set max_model_len",
        ),
    ],
)
def test_in_python(message: str, expected: str) -> None:
    assert in_python(message) == expected


def test_no_reason_keeps_a_flag() -> None:
    layout = *WITH_PROPAGATION, *WITH_PARTIAL_PREFIXES, *WITH_VALUE_NORMS, *WITH_LOOKAHEAD
    layout = *layout, *WITH_OWN_DRAFTS
    for row in (*ALWAYS, *WITH_POLICY, *layout, *WITH_RETENTION, *WITH_SELECTION, *WITH_RETRIEVAL):
        said = re.sub("`[^`]*`", "", in_python(row.reason))
        assert "--" not in said, said


def test_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match=r"^drop enable_lora$"), worded(for_python=True):
        raise ValueError("drop --enable-lora")
    with pytest.raises(RuntimeError, match=r"^drop --enable-lora$"), worded(for_python=False):
        raise RuntimeError("drop --enable-lora")
    with pytest.raises(KeyError, match="--a"), worded(for_python=True):
        raise KeyError("--a")
